"""What two blocks of elements have in common: compared where they are, by torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...core.compare import Difference, measure, same
from ...core.dtypes import SIZES, TORCH_NAMES
from ...core.partition import (
    Block,
)
from ...core.plan import Match
from .readers import Item, memory_of

LINE = 4096  # bytes of a row, from which on rows are compared one by one
LOOK = 1 << 20  # elements of a difference that are looked at together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _lines(a: torch.Tensor, block: Block) -> list[torch.Tensor]:
    """A block's rows, or all of it where they follow each other in the tensor."""
    return [a] if len(block.runs()) == 1 else list(a)


def _float(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    return bits.view(kind)


def _unequal(a: torch.Tensor, b: torch.Tensor, item: Match) -> torch.Tensor:
    """Where two blocks, given by their bits, differ."""
    assert item.b is not None
    if item.how == "values":
        ours, theirs = _float(a, item.a.dtype).double(), _float(b, item.b.dtype).double()
        return (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    a, b = _rounded(a, b, item)
    return torch.ne(a, b)


def any_unequal(a: torch.Tensor, b: torch.Tensor, item: Match) -> torch.Tensor | bool:
    """Whether two blocks differ anywhere: on a GPU without waiting for the answer."""
    if item.how == "bits" and a.device.type == "cpu":
        if a.shape[1] * a.element_size() < LINE:
            return not torch.equal(a, b)
        lines = zip(a, b, strict=True)  # memcmp(3) is five times faster than torch's comparison
        return not all(same(memory_of(one), memory_of(other)) for one, other in lines)
    return _unequal(a, b, item).any()


def _rounded(a: torch.Tensor, b: torch.Tensor, item: Match) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bits of one type: the wider is rounded to the other's."""
    assert item.b is not None
    if item.how != "rounded":
        return a, b
    if SIZES[item.a.dtype] > SIZES[item.b.dtype]:
        narrow = getattr(torch, TORCH_NAMES[item.b.dtype])
        return _float(a, item.a.dtype).to(narrow).view(b.dtype), b
    narrow = getattr(torch, TORCH_NAMES[item.a.dtype])
    return a, _float(b, item.b.dtype).to(narrow).view(a.dtype)


def difference_of(a: torch.Tensor, b: torch.Tensor, item: Item) -> Difference:
    """Numbers of a block that differs; only the elements that do leave the device."""
    held, found = item.match, Difference()
    dtypes = (held.a.dtype, item.other.dtype)
    if held.how == "rounded":
        a, b = _rounded(a, b, held)
        narrow = min(dtypes, key=lambda dtype: SIZES[dtype])
        dtypes = (narrow, narrow)
    plain = replace(held, how="bits") if held.how == "rounded" else held
    columns = item.block.columns
    step = max(1, LOOK // columns)
    for row in range(0, item.block.rows, step):
        for column in range(0, columns, LOOK):
            ours = a[row : row + step, column : column + LOOK]
            theirs = b[row : row + step, column : column + LOOK]
            unequal = _unequal(ours, theirs, plain)
            places = unequal.nonzero()
            if not len(places):
                continue
            views = [bytes_of(side[unequal]) for side in (ours, theirs)]
            part = measure(views[0], dtypes[0], views[1], dtypes[1], 0, held.how == "rounded")
            if part.first is not None:
                at_row, at_column = places[part.first].tolist()
                first = (row + at_row) * item.block.stride + column + at_column
                part.first = item.block.start + first
            found.add(part)
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements, row-major."""
    return memory_of(tensor.contiguous().view(-1).view(torch.uint8).cpu())
