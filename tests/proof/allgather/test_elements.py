"""Blocks that torch compares: where they differ, by how much, and at which elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.passes.plan import Match
from zckpt.core.ranks.partition import FlatMember
from zckpt.core.storage.fragments import Runs
from zckpt.proof.allgather import elements as module
from zckpt.proof.allgather.buckets import Block
from zckpt.proof.allgather.elements import BITS, any_unequal, bytes_of, difference_of
from zckpt.proof.allgather.readers import BlockMatch

NAN = float("nan")


def matched(a: str, b: str, how: str) -> Match:
    return Match(
        Entry("w", "param", a, (100,), Runs(())), Entry("w", "param", b, (100,), Runs(())), how
    )


def bits(values: Any, dtype: str) -> torch.Tensor:
    """A matrix of these values, as a bucket has it."""
    kind: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    return torch.tensor(values, dtype=kind).view(BITS[SIZES[dtype]])


def block_of(a: torch.Tensor, start: int = 0, stride: int = 0) -> Block:
    rows, columns = a.shape
    return Block(
        FlatMember(("w", "param"), (100,), 0), 0, rows, 0, columns, start, stride or columns
    )


@pytest.mark.parametrize("columns", [1, 3, 4, 5])
@pytest.mark.parametrize("changed", [None, (0, 0), (1, -1)])
def test_bits_in_short_and_in_long_lines(
    monkeypatch: pytest.MonkeyPatch, columns: int, changed: tuple[int, int] | None
) -> None:
    """Lines of 16 bytes are long. A block is a part of wider rows, as in a bucket."""
    monkeypatch.setattr(module, "LINE", 16)
    a, b = (torch.arange(20, dtype=torch.int32).view(2, 10) for _ in range(2))
    b[:, columns:] = -1  # beside the block
    if changed:
        b[:, :columns][changed] = -1
    match = matched("F32", "F32", "bits")
    assert any_unequal(a[:, :columns], b[:, :columns], match) == bool(changed)


@pytest.mark.parametrize("dtype", SIZES)
def test_bits_of_every_type(dtype: str) -> None:
    a, b = bits([[1, 0, 1, 1]], dtype), bits([[1, 0, 1, 0]], dtype)
    match = matched(dtype, dtype, "bits")
    assert not any_unequal(a, a.clone(), match)
    assert any_unequal(a, b, match)
    difference = difference_of(a, b, BlockMatch(block_of(a), 0, match, 0))
    assert (difference.count, difference.first) == (1, 3)


@pytest.mark.parametrize(
    ("dtypes", "a", "b", "expected"),
    [
        # as numbers: a NaN equals any NaN and no number, and zero has no sign
        (("F32", "BF16"), [1.0, NAN, 0.0], [1.0, NAN, -0.0], []),
        (("F32", "BF16"), [1.0, NAN, 2.0], [1.0, 1.0, 3.0], [1, 2]),
        (("F32", "I32"), [1.0, 2.5, NAN], [1, 2, 3], [1, 2]),
    ],
)
def test_values(
    dtypes: tuple[str, str], a: list[float], b: list[float], expected: list[int]
) -> None:
    match = matched(*dtypes, "values")
    ours, theirs = bits([a], dtypes[0]), bits([b], dtypes[1])
    assert bool(any_unequal(ours, theirs, match)) == bool(expected)
    difference = difference_of(ours, theirs, BlockMatch(block_of(ours, 7), 0, match, 0))
    assert difference.count == len(expected)
    assert difference.first == (7 + expected[0] if expected else None)


@pytest.mark.parametrize("dtypes", [("F32", "BF16"), ("BF16", "F32")])
def test_rounded(dtypes: tuple[str, str]) -> None:
    """The wider one is rounded, whichever it is: 1 + 2**-12 is 1 in bf16."""
    match = matched(*dtypes, "rounded")
    wide = [1 + 2**-12, 3.0, 4.0, 5.0]
    for narrow, count in (([1.0, 3.0, 4.0, 5.0], 0), ([1.0, 3.0, 4.0, 5.0625], 1)):
        sides = {"F32": bits([wide], "F32"), "BF16": bits([narrow], "BF16")}
        a, b = (sides[dtype] for dtype in dtypes)
        assert bool(any_unequal(a, b, match)) == bool(count)
        difference = difference_of(a, b, BlockMatch(block_of(a, 50), 0, match, 0))
        assert (difference.count, difference.first) == (count, 53 if count else None)
        if count:  # in units of bf16, of whose numbers from 4 to 8 these are the first to differ
            ours, theirs = (5.0, 5.0625) if dtypes[0] == "F32" else (5.0625, 5.0)
            assert (difference.a, difference.b, difference.max_abs) == (ours, theirs, 0.0625)
            assert difference.max_ulp == 2


def test_nans_of_other_bits_are_equal_if_one_was_rounded() -> None:
    """They leave the device, since their bits differ, and are not counted."""
    match = matched("F32", "BF16", "rounded")
    a, b = bits([[NAN, 1.0]], "F32"), bits([[-NAN, 1.0]], "BF16")
    b[0, 0] = 0x7FC1
    difference = difference_of(a, b, BlockMatch(block_of(a), 0, match, 0))
    assert (difference.count, difference.first) == (0, None)


def test_bits_of_zeros_and_nans() -> None:
    """Of one type, 0.0 and -0.0 differ, and a NaN equals itself."""
    match = matched("F32", "F32", "bits")
    a, b = bits([[0.0, NAN]], "F32"), bits([[-0.0, NAN]], "F32")
    difference = difference_of(a, b, BlockMatch(block_of(a), 0, match, 0))
    assert (difference.count, difference.first, difference.max_ulp) == (1, 0, 0)


@pytest.mark.parametrize("look", [1, 2, 3, 6, 7, 12, 100])
@pytest.mark.parametrize("first", range(12))
def test_the_first_element_that_differs(
    monkeypatch: pytest.MonkeyPatch, look: int, first: int
) -> None:
    """Of 4 rows of 3 elements, which begin at element 5 and are 10 apart, however many at once."""
    monkeypatch.setattr(module, "LOOK", look)
    a = torch.arange(12, dtype=torch.int32).view(4, 3)
    b = a.clone()
    b.view(-1)[first:] += 1
    item = BlockMatch(block_of(a, 5, 10), 0, matched("I32", "I32", "bits"), 0)
    difference = difference_of(a, b, item)
    assert difference.count == 12 - first
    assert difference.first == 5 + first // 3 * 10 + first % 3
    assert (difference.a, difference.b, difference.max_abs) == (first, first + 1, 1)
    assert sum(difference.changes.values()) == 12 - first


def test_bytes_are_row_major() -> None:
    turned = torch.arange(4, dtype=torch.int16).view(2, 2).t()
    assert list(bytes_of(turned).cast("B").cast("h")) == [0, 2, 1, 3]
