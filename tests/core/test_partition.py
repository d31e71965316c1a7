"""Lines of boxes: what is contiguous in a tensor and in each rank's part of it."""

from __future__ import annotations

import pytest

from zckpt.core.fragments import Extent
from zckpt.core.partition import BoxPart, Joined

Box = tuple[int, int, int]


def joined(shape: Box, *boxes: tuple[Box, Box]) -> Joined:
    """A tensor of boxes, each given by its offsets and sizes."""
    parts = [
        BoxPart(offsets, sizes, Extent("a", 0, 4 * sizes[0] * sizes[1] * sizes[2]))
        for offsets, sizes in boxes
    ]
    return Joined("w/param", "F32", shape, tuple(parts))


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
