"""Slices of tensors against brute force: every element of the whole is where the slice has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.checkpoint.slicing import (
    Piece,
    Slicing,
    boxes_in,
    cut,
    dealt,
    even,
    even_parts,
    joined,
    replicated,
)
from zckpt.core.storage.fragments import Box, Extent, Fragment, Fragments, Runs, Slices, boxes

SIZE = 4


def places(fragments: Fragments) -> dict[int, tuple[str, int]]:
    """Element -> file and byte."""
    found: dict[int, tuple[str, int]] = {}
    for fragment in fragments:
        count = fragment.stop - fragment.start
        for run in range(fragment.count):
            for place in range(count):
                element = fragment.start + run * fragment.stride + place
                assert element not in found, "an element stands in two fragments"
                at = fragment.extent.offset + (run * count + place) * SIZE
                found[element] = fragment.extent.file, at
    return found


def partitioned(rank: int, numel: int, dp: int, each: bool) -> Fragments:
    """A slice that ZeRO has cut over `dp` files: as stages 1 and 2 do, or as stage 3 does."""
    if each and numel:
        width = -(-numel // dp)
        flats = tuple(Extent(f"{rank}.{part}", 8, width * SIZE) for part in range(dp))
        return Slices(flats, 0, numel, SIZE)
    cuts = sorted({0, numel, *(numel * part // dp for part in range(1, dp))})
    pairs = enumerate(pairwise(cuts))
    return Runs(
        [
            Fragment(start, stop, Extent(f"{rank}.{part}", 8, (stop - start) * SIZE))
            for part, (start, stop) in pairs
        ]
    )


@given(
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    widths=st.integers(1, 3).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3
        )
    ),
    dp=st.integers(1, 3),
    each=st.booleans(),
)
def test_cut_along_any_axis(
    outer: int, inner: int, widths: list[list[int]], dp: int, each: bool
) -> None:
    slicing = cut(outer, inner, widths)
    assert slicing.covers()
    slices = [partitioned(r, prod(s), dp, each) for r, s in enumerate(slicing.slices)]
    held = [places(fragments) for fragments in slices]
    expected = {}
    total = sum(map(sum, widths))
    for before in range(outer):
        at = 0
        inside = [0] * len(held)
        for part in widths:
            for rank, width in enumerate(part):
                own = sum(each[rank] for each in widths)
                for step in range(width):
                    for behind in range(inner):
                        whole = (before * total + at + step) * inner + behind
                        of_slice = (before * own + inside[rank] + step) * inner + behind
                        expected[whole] = held[rank][of_slice]
                at += width
                inside[rank] += width
    assert places(joined(slicing, slices, SIZE)) == expected


def test_copies_are_chosen_by_number() -> None:
    slicing = replicated((2, 3), 3)
    slices = [partitioned(rank, 6, 2, False) for rank in range(3)]
    assert slicing.copies == 3
    assert slicing.covers()
    for copy in range(3):
        assert joined(slicing, slices, SIZE, copy) is slices[copy]
    assert joined(slicing, slices, SIZE) is slices[0]


def test_an_element_that_fewer_ranks_hold_comes_from_the_last_of_them() -> None:
    pieces = Piece(0, (0,), (0,), (2,)), Piece(1, (0,), (0,), (2,)), Piece(0, (2,), (2,), (1,))
    slicing = Slicing((3,), ((3,), (2,)), pieces)
    assert slicing.copies == 2
    assert [piece.rank for piece in slicing.chosen(1)] == [1, 0]
    assert Slicing((0,), ((0,),), ()).copies == 1


def test_pieces_of_one_slice_may_stand_in_another_order() -> None:
    """Blocks of one element, which the slice has transposed."""
    grid = list(product(range(3), range(3)))
    pieces = tuple(Piece(0, (row, column), (column, row), (1, 1)) for row, column in grid)
    elements = Runs([Fragment(n, n + 1, Extent("a", n * SIZE, SIZE)) for n in range(9)])
    found = places(joined(Slicing((3, 3), ((3, 3),), pieces), [elements], SIZE))
    assert found == {3 * column + row: ("a", (3 * row + column) * SIZE) for row, column in grid}


def test_padding_of_a_slice_is_left_out() -> None:
    slicing = Slicing((2, 2), ((3, 2),), (Piece(0, (0, 0), (0, 0), (2, 2)),))
    found = places(joined(slicing, [partitioned(0, 6, 1, False)], SIZE))
    assert found == {n: ("0.0", 8 + n * SIZE) for n in range(4)}


def test_slices_as_large_as_the_whole_that_hold_a_part_each() -> None:
    pieces = Piece(0, (0,), (0,), (1,)), Piece(1, (1,), (1,), (1,))
    slices = [partitioned(rank, 2, 1, False) for rank in range(2)]
    found = places(joined(Slicing((2,), ((2,), (2,)), pieces), slices, SIZE))
    assert found == {0: ("0.0", 8), 1: ("1.0", 8 + SIZE)}


def test_a_slice_that_holds_nothing() -> None:
    assert list(joined(replicated((0, 2), 1), [None], SIZE)) == []


def test_boxes_of_a_slice_are_taken_as_they_are() -> None:
    columns = [
        Box(
            whole=(4, 2),
            offsets=(0, column),
            sizes=(4, 1),
            strides=(1, 1),
            first=0,
            size=SIZE,
            extent=Extent(str(column), 0, 4 * SIZE),
        )
        for column in range(2)
    ]
    assert list(boxes_in(boxes(columns), (4, 2), SIZE)) == columns
    assert list(boxes_in(columns[0], (4, 2), SIZE)) == columns[:1]
    assert [box.whole for box in boxes_in(columns[0], (8,), SIZE)] == [(8,)] * 4


def test_a_part_that_two_ranks_share() -> None:
    """Heads of keys that are fewer than ranks: ranks 0 and 1 hold the same rows."""
    pieces = [Piece(r, (0, 0), (r // 2 * 2, 0), (2, 3)) for r in range(4)]
    slicing = Slicing((4, 3), ((2, 3),) * 4, tuple(pieces))
    slices = [partitioned(rank, 6, 1, False) for rank in range(4)]
    assert slicing.covers()
    assert slicing.copies == 2
    files = [
        {file for file, _ in places(joined(slicing, slices, SIZE, n)).values()} for n in (0, 1)
    ]
    assert files == [{"0.0", "2.0"}, {"1.0", "3.0"}]


def test_a_slice_that_is_transposed_in_its_file() -> None:
    slicing = cut(1, 2, [[2, 1]])
    extent = Extent("0", 0, 4 * SIZE)
    transposed = boxes(
        [
            Box(
                whole=(2, 2),
                offsets=(0, 0),
                sizes=(2, 2),
                strides=(1, 2),
                first=0,
                size=SIZE,
                extent=extent,
            )
        ]
    )
    found = places(joined(slicing, [transposed, partitioned(1, 2, 1, False)], SIZE))
    assert [found[n] for n in range(4)] == [("0", 0), ("0", 8), ("0", 4), ("0", 12)]
    assert [found[n][0] for n in (4, 5)] == ["1.0", "1.0"]


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(0, (0,), (0,), (2,))],
        [Piece(0, (0,), (0,), (2,)), Piece(1, (0,), (1,), (2,))],
        [Piece(0, (0,), (0,), (2,)), Piece(1, (1,), (2,), (2,))],
    ],
)
def test_pieces_that_miss_or_repeat_elements(pieces: Sequence[Piece]) -> None:
    assert not Slicing((4,), ((2,), (2,)), tuple(pieces)).covers()


def test_even_widths() -> None:
    assert even(6, 3) == (2, 2, 2)
    assert even(7, 3) is None
    assert [dealt(part, 3) for part in (7, 2, 6)] == [(3, 2, 2), (1, 1, 0), (2, 2, 2)]
    assert even_parts([6, 2], 2) == [(3, 3), (1, 1)]
    assert even_parts([6, 3], 2) is None
    assert [*accumulate(even(6, 2) or ())] == [3, 6]
