"""What ranks have of a tensor: lines of boxes that are contiguous, parts of a segment."""

from __future__ import annotations

import pytest

from zckpt.core.ranks.partition import BoxPart, Joined, Partitioned
from zckpt.core.storage.fragments import Extent

Box = tuple[int, int, int]


def joined(shape: Box, *boxes: tuple[Box, Box]) -> Joined:
    """A tensor of boxes, each given by its offsets and sizes."""
    parts = [
        BoxPart(offsets, sizes, Extent("a", 0, 4 * sizes[0] * sizes[1] * sizes[2]))
        for offsets, sizes in boxes
    ]
    return Joined(("w", "param"), "F32", shape, tuple(parts))


@pytest.mark.parametrize(
    ("boxes", "line"),
    [
        ([((0, 0, 0), (2, 3, 4))], 24),
        ([((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 3, 4))], 12),
        ([((0, 0, 0), (2, 1, 4)), ((0, 1, 0), (2, 2, 4))], 4),
        ([((0, 0, 0), (2, 3, 1)), ((0, 0, 1), (2, 3, 3))], 1),
        ([((0, 0, 0), (2, 2, 4)), ((0, 2, 0), (2, 0, 4)), ((0, 2, 0), (2, 1, 4))], 4),
        ([((0, 0, 0), (0, 3, 4))], 0),
    ],
)
def test_the_shortest_line(boxes: list[tuple[Box, Box]], line: int) -> None:
    """Of parts that have elements."""
    assert joined((2, 3, 4), *boxes).line == line


@pytest.mark.parametrize(("rank", "stop", "end"), [(0, 5, 5), (0, 12, 8), (1, 12, 12), (1, 99, 16)])
def test_a_rank_has_as_much_of_a_segment_as_its_part_reaches(
    rank: int, stop: int, end: int
) -> None:
    parts = joined((2, 3, 4), ((0, 0, 0), (2, 1, 4)), ((0, 1, 0), (2, 2, 4)))
    flat = Partitioned("F32", (Extent("a", 0, 32), Extent("b", 0, 64)), ())
    assert parts.own_range(rank, 3, stop) == flat.own_range(rank, 3, stop) == (3, end)
