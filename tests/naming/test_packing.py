"""Packed tensors against numpy: every element is where the packing has it, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from zckpt.core.fragments import Extent, Fragments, solid
from zckpt.naming.packing import packed, packing, turned, unpacked

SIZE = 4


def part(number: int, rows: int, inner: int) -> Fragments:
    return solid(rows * inner, Extent(str(number), 8, rows * inner * SIZE))


def elements(fragments: Fragments, numel: int) -> list[tuple[str, int]]:
    """Of every element its file and its number there."""
    result: dict[int, tuple[str, int]] = {}
    for fragment in fragments:
        for run in fragment.runs(0, numel):
            for place in range(run.stop - run.start):
                assert run.start + place not in result
                result[run.start + place] = run.extent.file, (run.extent.offset - 8) // SIZE + place
    return [result[place] for place in range(numel)]


def array(file: str, rows: int, inner: int) -> np.ndarray:
    table = np.empty((rows, inner), object)
    for place in range(rows * inner):
        table[place // inner, place % inner] = (file, place)
    return table


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 5])
@pytest.mark.parametrize("turn", [False, True])
def test_dealt_rows(groups: int, inner: int, turn: bool) -> None:
    """With `turn`, the parts are columns of one tensor, as gpt2 has them."""
    rows = [12, 6, 6]
    slicing = packing(rows, groups, inner)
    if turn:
        apart = packing(rows, 1, inner)
        columns = turned(part(0, inner, 24), (inner, 24), SIZE)
        parts = unpacked(apart, columns, SIZE)
        tables = np.split(array("0", inner, 24).T, [12, 18])
    else:
        parts = [part(number, count, inner) for number, count in enumerate(rows)]
        tables = [array(str(number), count, inner) for number, count in enumerate(rows)]
    shares = [np.split(table, groups) for table in tables]
    expected = np.concatenate([share[group] for group in range(groups) for share in shares])
    fragments = packed(slicing, parts, SIZE)
    assert elements(fragments, 24 * inner) == list(expected.reshape(-1))
    for count, back, table in zip(rows, unpacked(slicing, fragments, SIZE), tables, strict=True):
        assert elements(back, count * inner) == list(table.reshape(-1))
