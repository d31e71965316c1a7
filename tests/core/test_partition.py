"""Blocks of gathered buckets are the tensors, whatever the ranks, the processes and the memory."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from zckpt.core.fragments import Extent
from zckpt.core.partition import Member, Partitioned, buckets, share_of


def cut_flat(chosen: random.Random, ranks: int) -> tuple[Partitioned, list[Any], dict[str, Any]]:
    """Stages 1 and 2: one behind the other, padded at the end, cut into equal parts."""
    tensors, members, here = {}, [], 0
    for number in range(chosen.randint(1, 6)):
        shape = tuple(chosen.choice([1, 2, 3, 7, 19]) for _ in range(chosen.randint(0, 2)))
        name = f"p{number}/{chosen.random()}"
        tensors[name] = np.random.default_rng(number).integers(1, 1 << 30, shape, dtype="i4")
        members.append(Member(name, shape, here))
        here += prod(shape) + chosen.choice([0, 0, 3])
    width = -(-here // ranks)
    whole = np.zeros(width * ranks, "i4")
    for member in members:
        whole[member.first : member.first + member.numel] = tensors[member.name].reshape(-1)
    parts = list(whole.reshape(ranks, width))
    if chosen.random() < 0.5:  # masters are saved without the padding of the last ranks
        parts = [part[: max(0, min(width, here - rank * width))] for rank, part in enumerate(parts)]
    return described(parts, members, False), parts, tensors


def cut_each(chosen: random.Random, ranks: int) -> tuple[Partitioned, list[Any], dict[str, Any]]:
    """Stage 3: every tensor is padded and cut; padding is garbage."""
    tensors, members, here = {}, [], 0
    parts: list[list[Any]] = [[] for _ in range(ranks)]
    for number in range(chosen.randint(1, 6)):
        shape = tuple(chosen.choice([1, 2, 3, 7, 19]) for _ in range(chosen.randint(0, 2)))
        name = f"p{number}/{chosen.random()}"
        tensors[name] = np.random.default_rng(number).integers(1, 1 << 30, shape, dtype="i4")
        width = -(-prod(shape) // ranks)
        padded = np.full(width * ranks, -1, "i4")
        padded[: prod(shape)] = tensors[name].reshape(-1)
        for part, mine in zip(parts, padded.reshape(ranks, width), strict=True):
            part.append(mine)
        members.append(Member(name, shape, here))
        here += width
    joined = [np.concatenate(part) for part in parts]
    return described(joined, members, True), joined, tensors


def described(parts: list[Any], members: list[Member], interleaved: bool) -> Partitioned:
    extents = tuple(Extent(str(rank), 0, part.nbytes) for rank, part in enumerate(parts))
    return Partitioned("I32", extents, members, interleaved)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_the_tensors(seed: int) -> None:
    """Every element once, at its place, whatever the ranks, the processes and the memory."""
    chosen = random.Random(seed)
    ranks, processes = chosen.randint(1, 6), chosen.randint(1, 5)
    made = [chosen.choice([cut_flat, cut_each])(chosen, ranks) for _ in range(3)]
    data = {id(part): held for part, held, _ in made}
    expected = {name: tensor for _, _, tensors in made for name, tensor in tensors.items()}
    found = {name: np.zeros(tensor.size, "i4") for name, tensor in expected.items()}
    seen = {name: np.zeros(tensor.size, int) for name, tensor in expected.items()}
    room = chosen.choice([64, 200, 1000, 10**6])
    for bucket in buckets([part for part, _, _ in made], room, processes):
        assert bucket.rows * bucket.width * 4 <= max(room, 4 * ranks * processes)
        matrix = np.full((bucket.rows, bucket.width), -2, "i4")
        for segment in bucket.segments:
            for row, held in enumerate(data[id(segment.part)]):
                piece = held[segment.start : segment.stop]
                matrix[row, segment.at : segment.at + len(piece)] = piece
        shares = [list(share_of(bucket.blocks(), p, processes)) for p in range(processes)]
        for block in (block for share in shares for block in share):
            held = matrix[
                block.row : block.row + block.rows, block.column : block.column + block.columns
            ].reshape(-1)
            here = 0
            for start, stop in block.runs():
                found[block.member.name][start:stop] = held[here : here + stop - start]
                seen[block.member.name][start:stop] += 1
                here += stop - start
        sizes = [sum(block.numel for block in share) for share in shares]
        assert max(sizes) <= -(-sum(sizes) // processes) + max(
            (block.columns for share in shares for block in share), default=0
        )
    for name, tensor in expected.items():
        assert (seen[name] == 1).all()
        assert (found[name] == tensor.reshape(-1)).all()
