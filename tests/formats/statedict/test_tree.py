"""Pieces of one tensor: whether they have every element once."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path

import pytest

from zckpt import errors
from zckpt.core.storage.fragments import Extent
from zckpt.formats.statedict.tree import TensorPiece, assembled


def test_many_boxes_are_compared_in_time(tmp_path: Path) -> None:
    """As of a tensor that 20,000 ranks cut along its second axis; pairs would take minutes."""
    pieces = [TensorPiece((0, n), (2, 1), (1, 1), 0, Extent("f", 0, 8)) for n in range(20_000)]
    assembled("w", "F32", (2, 20_000), pieces)
    with pytest.raises(errors.InconsistentCheckpoint, match="overlap"):
        assembled("w", "F32", (2, 20_000), [*pieces[1:], pieces[1]])


@pytest.mark.parametrize("seed", range(40))
def test_boxes_overlap_where_elements_do(seed: int) -> None:
    generator = random.Random(seed)
    shape = [generator.randint(1, 3) for _ in range(generator.randint(1, 3))]
    pieces: list[TensorPiece] = []
    while (left := prod(shape) - sum(piece.numel for piece in pieces)) > 0:
        offsets = tuple(generator.randrange(size) for size in shape)
        sizes = tuple(generator.randint(1, n - o) for n, o in zip(shape, offsets, strict=True))
        sizes = sizes if prod(sizes) <= left else (1,) * len(shape)
        pieces.append(TensorPiece(offsets, sizes, sizes, 0, Extent("f", 0, 4)))
    elements = [
        place
        for piece in pieces
        for place in product(*map(lambda o, n: range(o, o + n), piece.offsets, piece.sizes))
    ]
    with suppress(errors.InconsistentCheckpoint):
        assembled("w", "F32", shape, pieces)
        assert len(set(elements)) == len(elements)
