"""Compares two blocks of elements on their device with torch, and measures how much they differ."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES, TORCH_NAMES
from ...core.comparison.difference import Difference, measure_difference, same
from ...core.passes.plan import Match
from .readers import BlockMatch, memory_of

LINE = 4096  # bytes; rows of at least this length are compared one by one
LOOK = 1 << 20  # elements of a differing block that are measured together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _float(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    return bits.view(kind)


def _unequal(a: torch.Tensor, b: torch.Tensor, match: Match) -> torch.Tensor:
    assert match.b is not None
    if match.how == "values":
        ours, theirs = _float(a, match.a.dtype).double(), _float(b, match.b.dtype).double()
        return (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    a, b = _rounded(a, b, match)
    return torch.ne(a, b)


def any_unequal(a: torch.Tensor, b: torch.Tensor, match: Match) -> torch.Tensor | bool:
    """Whether two blocks differ anywhere. On a GPU the result is a tensor, to avoid waiting."""
    if match.how == "bits" and a.device.type == "cpu":
        if a.shape[1] * a.element_size() < LINE:
            return not torch.equal(a, b)
        lines = zip(a, b, strict=True)  # memcmp(3) is five times faster than torch's comparison
        return not all(same(memory_of(one), memory_of(other)) for one, other in lines)
    return _unequal(a, b, match).any()


def _rounded(a: torch.Tensor, b: torch.Tensor, match: Match) -> tuple[torch.Tensor, torch.Tensor]:
    """Both blocks as raw bits of one type, to which the wider type is rounded."""
    assert match.b is not None
    if match.how != "rounded":
        return a, b
    if match.rounds_a:
        narrow = getattr(torch, TORCH_NAMES[match.b.dtype])
        return _float(a, match.a.dtype).to(narrow).view(b.dtype), b
    narrow = getattr(torch, TORCH_NAMES[match.a.dtype])
    return a, _float(b, match.b.dtype).to(narrow).view(a.dtype)


def difference_of(a: torch.Tensor, b: torch.Tensor, item: BlockMatch) -> Difference:
    """Measures the difference of two blocks. Only the differing elements are copied to the CPU."""
    match, difference = item.match, Difference()
    dtypes = (match.a.dtype, item.other.dtype)
    rounded = match.how == "rounded"
    if rounded:
        a, b = _rounded(a, b, match)
        narrow = min(dtypes, key=lambda dtype: SIZES[dtype])
        dtypes = (narrow, narrow)
        match = replace(match, how="bits")
    columns = item.block.columns
    step = max(1, LOOK // columns)
    for row in range(0, item.block.rows, step):
        for column in range(0, columns, LOOK):
            ours = a[row : row + step, column : column + LOOK]
            theirs = b[row : row + step, column : column + LOOK]
            unequal = _unequal(ours, theirs, match)
            places = unequal.nonzero()
            if not len(places):
                continue
            views = [bytes_of(side[unequal]) for side in (ours, theirs)]
            part = measure_difference(views[0], dtypes[0], views[1], dtypes[1], 0, rounded)
            if part.first is not None:
                at_row, at_column = places[part.first].tolist()
                first = (row + at_row) * item.block.stride + column + at_column
                part.first = item.block.start + first
            difference.add(part)
    return difference


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, row-major."""
    return memory_of(tensor.contiguous().view(-1).view(torch.uint8).cpu())
