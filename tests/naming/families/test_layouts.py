"""Packed tensors against numpy: every element is where the packing has it, and the way back."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from zckpt.core.storage.fragments import Extent, solid
from zckpt.naming.families.layouts import LAYOUTS
from zckpt.naming.families.rules import HUGGING_FACE, MEGATRON
from zckpt.naming.families.sizes import Sizes
from zckpt.naming.views import View, view_of

SIZE = 4


def part(file: str, *shape: int) -> tuple[View, np.ndarray]:
    """A tensor in a file, and of every element its file and its number there."""
    table = np.empty(shape, object)
    for place in range(prod(shape)):
        table[np.unravel_index(place, shape)] = (file, place)
    return view_of(solid(prod(shape), Extent(file, 8, prod(shape) * SIZE)), shape, SIZE), table


def elements(view: View) -> np.ndarray:
    result = np.full(prod(view.shape), None, object)
    for fragment in view.fragments:
        for run in fragment.runs(0, prod(view.shape)):
            for place in range(run.stop - run.start):
                assert result[run.start + place] is None
                first = (run.extent.offset - 8) // SIZE
                result[run.start + place] = run.extent.file, first + place
    return result.reshape(view.shape)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 5])
@pytest.mark.parametrize("packing", ["attention", "whole attention", "turned whole attention"])
def test_dealt_rows(groups: int, inner: int, packing: str) -> None:
    rows, sizes = [12, 6, 6], Sizes(2 * groups, groups)
    if packing == "attention":
        pairs = [part(str(number), count, inner) for number, count in enumerate(rows)]
        tables = [table for _, table in pairs]
    else:
        turn = packing.startswith("turned")
        pairs = [part("0", inner, 24) if turn else part("0", 24, inner)]
        tables = np.split(pairs[0][1].T if turn else pairs[0][1], [12, 18])
    shares = [np.split(table, groups) for table in tables]
    expected = np.concatenate([share[group] for group in range(groups) for share in shares])
    (packed,) = LAYOUTS[packing][MEGATRON]([view for view, _ in pairs], sizes)
    assert (elements(packed) == expected).all()
    again = view_of(packed.fragments, packed.shape, SIZE)
    back = LAYOUTS[packing][HUGGING_FACE]([again], sizes)
    for view, (_, table) in zip(back, pairs, strict=True):
        assert (elements(view) == table).all()


def test_experts_are_taken_apart_and_stacked() -> None:
    stack, table = part("0", 3, 4, 5)
    apart = LAYOUTS["experts"][MEGATRON]([stack], Sizes())
    for view, expected in zip(apart, table, strict=True):
        assert (elements(view) == expected).all()
    (again,) = LAYOUTS["experts"][HUGGING_FACE](apart, Sizes())
    assert (elements(again) == table).all()
