"""Does every tensor have each of its elements once, whatever a reader makes of the files?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint import covering
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.storage.fragments import (
    Box,
    Boxes,
    Extent,
    Fragment,
    Fragments,
    Runs,
    Slices,
    solid,
)
from zckpt.errors import UnsupportedCheckpoint

SIZE = 4  # bytes of F32


def is_covered(fragments: Fragments, *shape: int) -> bool:
    return not [*covering.uncovered([Entry("w", "exp_avg", "F32", shape, fragments)])]


def test_runs() -> None:
    first, rest = Fragment(0, 4, Extent("f", 0, 16)), Fragment(4, 6, Extent("f", 16, 8))
    assert is_covered(Runs([first, rest]), 6)
    assert is_covered(Runs([first, rest]), 3, 2)
    assert not is_covered(Runs([first, rest]), 7)
    assert not is_covered(Runs([first]), 6)
    assert not is_covered(Runs([rest]), 6)
    assert not is_covered(Runs([first, Fragment(3, 6, Extent("f", 16, 12))]), 6)
    assert not is_covered(solid(6, Extent("f", 0, 23)), 6)
    assert not is_covered(solid(6, Extent("f", 0, 25)), 6)
    assert is_covered(Runs([]), 0)


# -- slices of flat buffers


def slices(numel: int, offset: int, *lengths: int, size: int = SIZE) -> Slices:
    flats = tuple(Extent(str(rank), 0, SIZE * length) for rank, length in enumerate(lengths))
    return Slices(flats, offset, numel, size)


@pytest.mark.parametrize(
    ("numel", "offset", "lengths", "fine"),
    [
        (6, 0, (3, 3), True),
        (5, 0, (3, 3), True),
        (7, 0, (3, 3), False),
        (12, 0, (6, 6), True),
        (11, 0, (6, 5), True),  # the last rank's buffer ends with the tensor
        (11, 0, (6, 4), False),
        (11, 0, (5, 6), False),
        (11, 2, (8, 7), True),
        (11, 2, (7, 7), False),
        (11, 2, (8, 6), False),
        (4, 0, (2, 2, 0), True),  # nothing of it is on the last rank
        (4, 0, (2, 1, 2), False),
        (1, 0, (1, 0, 0), True),
        (1, 0, (0, 1, 1), False),
    ],
)
def test_slices(numel: int, offset: int, lengths: tuple[int, ...], fine: bool) -> None:
    assert is_covered(slices(numel, offset, *lengths), numel) is fine


def test_slices_of_another_tensor() -> None:
    assert not is_covered(slices(5, 0, 3, 3), 6)
    assert not is_covered(slices(6, 0, 3, 3, size=2), 6)


class Counted(tuple[Extent, ...]):
    """Flat buffers that count how often they are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Extent]:
        Counted.walks += 1
        return super().__iter__()


def test_ranks_are_walked_once_for_all_tensors() -> None:
    flats = Counted(Extent(str(rank), 0, 1000 * SIZE) for rank in range(64))
    parts = [Slices(flats, n, 640, SIZE) for n in range(50)]
    entries = [Entry(str(n), "master", "F32", (640,), part) for n, part in enumerate(parts)]
    Counted.walks = 0
    assert not [*covering.uncovered(entries)]
    assert Counted.walks == 1


# -- boxes


def box(offset: int, width: int, rows: int = 4, **changed: Any) -> Box:
    """Columns of a tensor of 4 x 6."""
    words: dict[str, Any] = {
        "whole": (4, 6),
        "offsets": (0, offset),
        "sizes": (rows, width),
        "strides": (width, 1),
        "first": 0,
        "size": SIZE,
        "extent": Extent(str(offset), 0, SIZE * rows * width),
    }
    return Box(**(words | changed))


@pytest.mark.parametrize(
    ("parts", "fine"),
    [
        ([box(0, 6)], True),
        ([box(0, 2), box(2, 4)], True),
        ([box(2, 4), box(0, 2)], True),
        ([box(0, 2)], False),
        ([box(0, 2), box(3, 3)], False),
        ([box(0, 2), box(1, 4)], False),
        ([box(0, 2), box(2, 4, rows=3)], False),
        ([box(1, 6), box(0, 0)], False),
        ([], False),
        ([box(0, 6, size=2)], False),
        ([box(0, 6, first=1)], False),  # beyond its extent
        ([box(0, 6, strides=(1, 4))], True),  # transposed
        ([box(0, 6, strides=(1, 5))], False),
        ([box(0, 2), box(2, 4, whole=(8, 6))], False),
    ],
)
def test_boxes(parts: list[Box], fine: bool) -> None:
    fragments = parts[0] if len(parts) == 1 else Boxes(parts)
    assert is_covered(fragments, 4, 6) is fine


def test_boxes_of_another_tensor() -> None:
    assert is_covered(box(0, 6), 24)  # a view
    assert not is_covered(box(0, 6), 5, 6)
    assert not is_covered(box(0, 6), 0, 6)
    assert is_covered(Boxes(()), 0, 6)


# -- manifests


def test_every_tensor_of_a_manifest_is_asked() -> None:
    whole = Entry("w", "param", "F32", (6,), solid(6, Extent("f", 0, 24)))
    hole = replace(whole, parameter="h", slot="param", fragments=solid(3, Extent("f", 0, 12)))
    sound = Manifest("/run", "x", Run(), {whole.key: whole}, {})
    covering.refuse_holes(sound, "halves")
    rank = replace(sound, entries={hole.name: hole})
    for wrong in (
        rank,
        replace(sound, ranks=(sound, rank)),
        replace(sound, ranks=(sound,), models=(rank,)),
        replace(sound, replicas=(hole,)),
        sound.replace(sibling_weights=(hole,)),
        replace(sound, states=States((StateRow("Q", "unsupported", ("w",), tensors=(hole,)),))),
    ):
        with pytest.raises(UnsupportedCheckpoint, match=r"/run: .* halves reader .* h/param"):
            covering.refuse_holes(wrong, "halves")
