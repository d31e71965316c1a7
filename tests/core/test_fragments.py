"""Where elements live: every kind of fragments against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.core.storage.fragments import (
    Box,
    Boxes,
    Extent,
    Fragment,
    Fragments,
    Runs,
    Slices,
    boxes,
    boxes_of,
    corners_of_range,
    range_of_box,
    solid,
    tile,
)

SIZE = 4


def elements(fragment: Fragment) -> dict[int, tuple[str, int]]:
    """Element -> file and byte of each element of a fragment."""
    count = fragment.stop - fragment.start
    assert fragment.extent.length == count * fragment.count * SIZE
    return {
        fragment.start + run * fragment.stride + place: (
            fragment.extent.file,
            fragment.extent.offset + (run * count + place) * SIZE,
        )
        for run in range(fragment.count)
        for place in range(count)
    }


def ranges(numel: int) -> st.SearchStrategy[tuple[int, int]]:
    """[start, stop) of elements, empty only where there are none."""
    pairs = st.tuples(st.integers(0, numel), st.integers(0, numel)).map(sorted)
    return pairs.filter(lambda pair: pair[0] < pair[1] or not numel).map(lambda pair: (*pair,))


def places(fragments: Fragments) -> dict[int, tuple[str, int]]:
    positions: dict[int, tuple[str, int]] = {}
    for fragment in fragments:
        of_fragment = elements(fragment)
        assert not of_fragment.keys() & positions.keys(), "an element stands in two fragments"
        positions |= of_fragment
    return positions


def check(fragments: Fragments, numel: int, draw: st.DataObject) -> None:
    """Length, items, `overlapping` and `part` agree with the whole list."""
    whole = list(fragments)
    assert len(fragments) == len(whole)
    assert [fragments[place] for place in range(len(whole))] == whole
    with pytest.raises(IndexError):
        fragments[len(whole)]
    start, stop = draw.draw(ranges(numel))
    expected = [
        item for item in whole if any(start <= element < stop for element in elements(item))
    ]
    assert list(fragments.overlapping(start, stop)) == expected
    own = {n - start: place for n, place in places(fragments).items() if start <= n < stop}
    assert places(fragments.part(start, stop, SIZE)) == own


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_runs_overlap_as_their_elements_do(sizes: list[int], draw: st.DataObject) -> None:
    starts = list(accumulate(sizes, initial=0))
    listed = [
        Fragment(start, start + size, Extent(f"file {place % 3}", 64 * place, size * SIZE))
        for place, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]
    runs = Runs(listed)
    assert list(runs) == [item for item in listed if item.stop > item.start]
    check(runs, starts[-1], draw)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=8), st.data())
def test_runs_may_have_holes(sizes: list[tuple[int, int]], draw: st.DataObject) -> None:
    listed, end = [], 0
    for hole, size in sizes:
        listed.append(Fragment(end + hole, end + hole + size, Extent("a", end, size * SIZE)))
        end += hole + size
    check(Runs(listed), end, draw)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 3), st.data())
def test_slices_are_even_cuts(dp: int, numel: int, offset: int, draw: st.DataObject) -> None:
    flats = tuple(Extent(f"rank {rank}", 100 * rank, 1000) for rank in range(dp))
    slices = Slices(flats, offset, numel, SIZE)
    width = -(-numel // dp)
    assert places(slices) == {
        element: (
            f"rank {element // width}",
            100 * (element // width) + (offset + element % width) * SIZE,
        )
        for element in range(numel)
    }
    check(slices, numel, draw)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(shapes, st.integers(0, 5), st.data())
def test_a_box_is_the_strided_elements(
    shape: tuple[int, ...], first: int, draw: st.DataObject
) -> None:
    order = draw.draw(st.permutations(range(len(shape))))
    gap = draw.draw(st.integers(1, 3))
    strides, step = [0] * len(shape), gap
    for axis in order:  # the first varies fastest
        strides[axis] = step
        step *= shape[axis] * draw.draw(st.integers(1, 2))
    expanded = draw.draw(st.sets(st.integers(0, len(shape) - 1), max_size=1))
    strides = [0 if axis in expanded else stride for axis, stride in enumerate(strides)]
    extent = Extent("a", 1000, 10_000_000)
    box = Box(
        whole=shape,
        offsets=(0,) * len(shape),
        sizes=shape,
        strides=strides,
        first=first,
        size=SIZE,
        extent=extent,
    )
    numel = prod(shape)
    expected = {
        element: ("a", 1000 + (first + sum(map(int.__mul__, place, strides))) * SIZE)
        for element, place in enumerate(product(*map(range, shape)))
    }
    assert places(box) == expected
    assert len(box) == len(list(box))
    assert [box[place] for place in range(len(box))] == list(box)
    assert [item.start for item in box] == sorted(item.start for item in box)
    with pytest.raises(IndexError):
        box[len(box)]
    start, stop = draw.draw(ranges(numel))
    needed = [item for item in box if any(start <= element < stop for element in elements(item))]
    overlapping = list(box.overlapping(start, stop))
    assert [item for item in overlapping if item in needed] == needed
    # a line with gaps may be named where only its gaps lie in the range; none beside the range
    for item in overlapping:
        assert min(elements(item)) < stop
        assert max(elements(item)) >= start


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (0, 0)])
def test_an_empty_box_has_no_fragments(sizes: tuple[int, int]) -> None:
    extent = Extent("a", 100, 48)
    box = Box(
        whole=(4, 5), offsets=(1, 2), sizes=sizes, strides=(3, 1), first=6, size=SIZE, extent=extent
    )
    assert (len(box), list(box), list(box.overlapping(0, 20))) == (0, [], [])
    assert (box.start, box.stop, box.reach) == (7, 7, Extent("a", 100, 0))
    assert len(Boxes(())) == 0


def test_a_query_looks_at_few_fragments_of_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragment n has two runs: elements 0, 1, 4, 5 from `120 * (n // 5) + 12 * (n % 5)` on."""
    strides = (20, 4, 2, 1)
    box = Box(
        whole=(10, 10, 3, 4),
        offsets=(0,) * 4,
        sizes=(10, 5, 2, 2),
        strides=strides,
        first=0,
        size=SIZE,
        extent=Extent("a", 0, 800),
    )
    asked: list[int] = []
    right = Box.__getitem__

    def counting(self: Box, place: int) -> Fragment:
        asked.append(place)
        return right(self, place)

    monkeypatch.setattr(Box, "__getitem__", counting)

    def found(start: int, stop: int) -> tuple[list[int], list[int]]:
        asked.clear()
        starts = [item.start for item in box.overlapping(600 + start, 600 + stop)]
        return [start - 600 for start in starts], [*asked]

    row = [25, 26, 27, 28, 29]
    assert found(0, 1) == ([0], row)
    assert found(5, 13) == ([0, 12], row)
    assert found(18, 24) == ([], row)  # behind one fragment, and before the next one
    assert found(53, 120) == ([48], row)
    assert found(54, 120) == ([], [])
    assert found(119, 121) == ([120], [30, 31, 32, 33, 34])


def test_a_long_axis_is_not_listed() -> None:
    box = Box(
        whole=(1 << 40, 2),
        offsets=(0, 0),
        sizes=(1 << 40, 2),
        strides=(0, 2),
        first=0,
        size=SIZE,
        extent=Extent("a", 0, 100),
    )
    first = next(iter(box))
    assert (first.start, first.stop) == (0, 1)


def test_runs_of_a_fragment_are_those_in_the_range() -> None:
    fragment = Fragment(2, 5, Extent("a", 100, 60), 5, 10)
    runs = [Fragment(10 * n + 2, 10 * n + 5, Extent("a", 100 + 12 * n, 12)) for n in range(5)]
    for start, stop in combinations(range(1, 52), 2):
        expected = [run for run in runs if run.start < stop and run.stop > start]
        assert list(fragment.runs(start, stop)) == expected


def test_a_transposed_matrix_has_a_line_for_each_column() -> None:
    box = Box(
        whole=(3, 4),
        offsets=(0, 0),
        sizes=(3, 4),
        strides=(1, 3),
        first=0,
        size=SIZE,
        extent=Extent("a", 0, 48),
    )
    assert list(box) == [Fragment(i, i + 1, Extent("a", 12 * i, 12), 3, 4) for i in range(4)]


@given(shapes, st.data())
def test_boxes_that_tile_a_tensor_hold_every_element_once(
    shape: tuple[int, ...], draw: st.DataObject
) -> None:
    cuts = [
        sorted({0, size, *draw.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    parts, expected = [], {}
    for number, corner in enumerate(product(*map(pairwise, cuts))):
        offsets = [start for start, _ in corner]
        sizes = [stop - start for start, stop in corner]
        strides, step = [0] * len(shape), 1
        for axis in draw.draw(st.permutations(range(len(shape)))):
            strides[axis] = step
            step *= sizes[axis]
        extent = Extent(f"rank {number}", 100, prod(sizes) * SIZE)
        parts.append(
            Box(
                whole=shape,
                offsets=offsets,
                sizes=sizes,
                strides=strides,
                first=0,
                size=SIZE,
                extent=extent,
            )
        )
        for place in product(*map(range, sizes)):
            element = 0
            for coordinate, offset, size in zip(place, offsets, shape, strict=True):
                element = element * size + offset + coordinate
            at = 100 + sum(map(int.__mul__, place, strides)) * SIZE
            expected[element] = (extent.file, at)
    fragments = boxes(draw.draw(st.permutations(parts)))
    assert places(fragments) == expected
    check_overlaps(fragments, prod(shape), draw)


@given(shapes, st.data())
def test_boxes_tile_if_they_have_every_element_once(
    shape: tuple[int, ...], draw: st.DataObject
) -> None:
    """Boxes of a grid, one of which may be lost, moved or made larger."""
    cuts = [
        sorted({0, size, *draw.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    parts = [
        ([a for a, _ in corner], [b - a for a, b in corner])
        for corner in product(*map(pairwise, cuts))
    ]
    for _ in range(draw.draw(st.integers(0, 2))):
        box, side = draw.draw(st.sampled_from(parts)), draw.draw(st.integers(0, 1))
        box[side][draw.draw(st.integers(0, len(shape) - 1))] += draw.draw(st.integers(-1, 1))
    if draw.draw(st.booleans()):
        parts.remove(draw.draw(st.sampled_from(parts)))
    parts = [part for part in parts if min(part[1]) >= 0]
    elements_of = [
        place
        for offsets, sizes in parts
        for place in product(*(range(a, a + b) for a, b in zip(offsets, sizes, strict=True)))
    ]
    assert tile(shape, parts) == (sorted(elements_of) == sorted(product(*map(range, shape))))


@pytest.mark.parametrize(
    ("shape", "parts", "whole"),
    [
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], True),
        ((2, 2), [((0, 0), (2, 2)), ((1, 0), (0, 2)), ((9, 9), (0, 1))], True),
        ((2, 2), [((0, 0), (1, 2)), ((0, 0), (1, 2))], False),
        ((2, 2), [((0, 0), (2, 1))], False),
        ((0, 2), [], True),
        ((), [((), ())], True),
    ],
)
def test_rows_may_be_cut_otherwise(
    shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: bool
) -> None:
    """An empty box has no element, wherever it is."""
    assert tile(shape, parts) is whole


def test_a_query_looks_at_few_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 ranks have rows of two columns each: a row of the tensor is in two boxes."""
    parts = [
        Box(
            whole=(1000, 4),
            offsets=(row, column),
            sizes=(1, 2),
            strides=(2, 1),
            first=0,
            size=SIZE,
            extent=Extent(f"{row} {column}", 0, 8),
        )
        for column in (0, 2)
        for row in range(1000)
    ]
    fragments = Boxes(parts)
    asked: list[int] = []
    right = Box.overlapping

    def counting(self: Box, start: int, stop: int) -> Iterator[Fragment]:
        asked.append(start)
        return right(self, start, stop)

    monkeypatch.setattr(Box, "overlapping", counting)
    overlapping = [fragment.extent.file for fragment in fragments.overlapping(4 * 500, 4 * 501)]
    assert overlapping == ["500 0", "500 2"]
    assert len(asked) == 2


@given(shapes, st.data())
def test_where_a_box_begins_and_ends(shape: tuple[int, ...], draw: st.DataObject) -> None:
    """In the tensor, and in the file."""
    offsets = [draw.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    strides = [draw.draw(st.integers(1, 50)) for _ in shape]
    box = Box(
        whole=shape,
        offsets=offsets,
        sizes=sizes,
        strides=strides,
        first=3,
        size=SIZE,
        extent=Extent("a", 100, 1 << 20),
    )
    runs = [run for fragment in box for run in fragment.runs(0, prod(shape))]
    assert box.start == min(run.start for run in runs)
    assert box.stop == max(run.stop for run in runs)
    assert box.reach.offset == min(run.extent.offset for run in runs)
    ends = [run.extent.offset + run.extent.length for run in runs]
    assert box.reach.offset + box.reach.length == max(ends)


def check_overlaps(fragments: Fragments, numel: int, draw: st.DataObject) -> None:
    """Length, items and `overlapping` agree; the runs of a range hold all elements of it."""
    assert len(fragments) == len(list(fragments))
    assert [fragments[place] for place in range(len(fragments))] == list(fragments)
    start, stop = draw.draw(ranges(numel))
    needed = [
        item for item in fragments if any(start <= element < stop for element in elements(item))
    ]
    assert [item for item in fragments.overlapping(start, stop) if item in needed] == needed
    for item in needed:
        in_runs = {
            element: where
            for run in item.runs(start, stop)
            for element, where in elements(run).items()
        }
        wanted = {key: where for key, where in elements(item).items() if start <= key < stop}
        assert wanted.items() <= in_runs.items() <= elements(item).items()


@settings(deadline=None)  # a slow machine is not a failure
@given(st.lists(st.integers(0, 3), max_size=4).map(tuple), st.data())
def test_ranges_of_boxes_hold_every_element_once(
    shape: tuple[int, ...], draw: st.DataObject
) -> None:
    """Every box of a tensor is cut into ranges, each in a file of its own."""
    cuts = [
        sorted({0, size, *draw.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    parts: list[Box] = []
    expected: dict[int, tuple[str, int]] = {}
    for number, corner in enumerate(product(*map(pairwise, cuts))):
        offsets = [start for start, _ in corner]
        sizes = [stop - start for start, stop in corner]
        inside = []
        for place in product(*map(range, sizes)):
            element = 0
            for coordinate, offset, length in zip(place, offsets, shape, strict=True):
                element = element * length + offset + coordinate
            inside.append(element)
        bounds = st.lists(st.integers(0, len(inside)), max_size=3)
        for start, stop in pairwise(sorted({0, len(inside), *draw.draw(bounds)})):
            extent = Extent(f"rank {number} from {start}", 100, (stop - start) * SIZE)
            ranged = list(range_of_box(shape, offsets, sizes, start, stop, SIZE, extent))
            assert len(ranged) <= max(1, 2 * len(shape) - 1)
            parts += ranged
            for position, element in enumerate(inside[start:stop]):
                expected[element] = extent.file, 100 + position * SIZE
    fragments = boxes(draw.draw(st.permutations(parts)))
    assert places(fragments) == expected
    check_overlaps(fragments, prod(shape), draw)


def test_a_range_of_a_slice_of_columns() -> None:
    """Rank 1 of two holds columns 2 and 3 of a 3 x 4 matrix; its second partition is 3 elements."""
    parts = list(range_of_box((3, 4), (0, 2), (3, 2), 3, 6, SIZE, Extent("a", 0, 12)))
    assert [list(part) for part in parts] == [
        [Fragment(7, 8, Extent("a", 0, 4))],
        [Fragment(10, 12, Extent("a", 4, 8))],
    ]
    assert list(range_of_box((3, 4), (0, 2), (3, 2), 2, 2, SIZE, Extent("a", 0, 0))) == []


def test_corners_of_a_range_of_rows() -> None:
    assert list(corners_of_range((3, 2), 2, 5)) == [([1, 0], [1, 2]), ([2, 0], [1, 1])]
    assert list(corners_of_range((), 0, 1)) == [([], [])]


def test_boxes_are_kept_unless_they_are_runs() -> None:
    extent = Extent("a", 0, 100)
    row, empty, scattered = (
        Box(
            whole=(2, 2),
            offsets=(0, 0),
            sizes=sizes,
            strides=strides,
            first=0,
            size=SIZE,
            extent=extent,
        )
        for sizes, strides in (((1, 2), (2, 1)), ((0, 2), (2, 1)), ((2, 2), (5, 3)))
    )
    assert isinstance(boxes([row, empty]), Runs)
    assert boxes([scattered]) is scattered
    assert len(boxes([scattered])) == 4
    assert boxes_of(scattered) == (scattered,)
    assert [*boxes_of(Boxes([row, scattered]))] == [row, scattered]
    assert boxes_of(Runs([])) == ()


def test_rows_of_a_tensor_are_runs_and_columns_are_one_fragment_each() -> None:
    def part(offsets: tuple[int, int], sizes: tuple[int, int]) -> Box:
        extent = Extent("a", 0, prod(sizes) * SIZE)
        return Box(
            whole=(6, 4),
            offsets=offsets,
            sizes=sizes,
            strides=(sizes[1], 1),
            first=0,
            size=SIZE,
            extent=extent,
        )

    rows = boxes([part((3, 0), (3, 4)), part((0, 0), (3, 4))])
    assert isinstance(rows, Runs)
    assert [(item.start, item.stop) for item in rows] == [(0, 12), (12, 24)]
    columns = boxes([part((0, 0), (6, 3)), part((0, 3), (6, 1))])
    assert isinstance(columns, Boxes)
    assert [(f.start, f.stop, f.count, f.stride) for f in columns] == [(0, 3, 6, 4), (3, 4, 6, 4)]


def test_a_solid_tensor_is_one_fragment() -> None:
    assert list(solid(3, Extent("a", 5, 12))) == [Fragment(0, 3, Extent("a", 5, 12))]
    assert list(solid(0, Extent("a", 5, 0))) == []


def test_a_part_of_an_extent() -> None:
    assert Extent("a", 100, 50).part(10, 30) == Extent("a", 110, 20)
