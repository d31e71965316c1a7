"""Blocks of gathered buckets are the tensors, whatever the ranks, the processes and the memory."""

from __future__ import annotations

import random
from itertools import islice, pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import key_of, name_of
from zckpt.core.ranks.partition import BoxPart, FlatMember, Joined, Partitioned
from zckpt.core.storage.fragments import Extent
from zckpt.proof.allgather import buckets as module
from zckpt.proof.allgather.buckets import (
    Beside,
    Block,
    Cut,
    Segment,
    buckets,
    lines_of,
    share_of,
    side_by_side,
)


def cut_flat(chosen: random.Random, ranks: int) -> tuple[Partitioned, list[Any], dict[str, Any]]:
    """Stages 1 and 2: one behind the other, padded at the end, cut into equal parts."""
    tensors: dict[str, Any] = {}
    members, end = [], chosen.choice([0, 0, 3])
    for number in range(chosen.randint(1, 6)):
        shape = tuple(chosen.choice([1, 2, 3, 7, 19]) for _ in range(chosen.randint(0, 2)))
        name = f"p{number}/{chosen.random()}"
        tensors[name] = np.random.default_rng(number).integers(1, 1 << 30, shape, dtype="i4")
        members.append(FlatMember(key_of(name), shape, end))
        end += prod(shape) + chosen.choice([0, 0, 3])
    width = -(-end // ranks)
    whole = np.zeros(width * ranks, "i4")
    for member in members:
        whole[member.first : member.first + member.numel] = tensors[name_of(member.key)].reshape(-1)
    parts = list(whole.reshape(ranks, width))
    if chosen.random() < 0.5:  # masters are saved without the padding of the last ranks
        parts = [part[: max(0, min(width, end - rank * width))] for rank, part in enumerate(parts)]
    return described(parts, members, False), parts, tensors


def cut_each(chosen: random.Random, ranks: int) -> tuple[Partitioned, list[Any], dict[str, Any]]:
    """Stage 3: every tensor is padded and cut; padding is garbage."""
    tensors, members, end = {}, [], 0
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
        members.append(FlatMember(key_of(name), shape, end))
        end += width
    joined = [np.concatenate(part) for part in parts]
    return described(joined, members, True), joined, tensors


def cut_boxes(chosen: random.Random, ranks: int) -> tuple[Joined, list[Any], dict[str, Any]]:
    """A tensor that is cut along any axes in uneven sizes; some boxes are cut into ranges again."""
    shape = tuple(chosen.choice([1, 2, 3, 7]) for _ in range(chosen.randint(0, 4)))
    name = f"joined/{chosen.random()}"
    tensor = np.random.default_rng(ranks).integers(1, 1 << 30, shape, dtype="i4")
    cuts = [
        sorted([0, size, *(chosen.randint(0, size) for _ in range(chosen.randint(0, 2)))])
        for size in shape
    ]
    boxes, parts = [], []
    for corner in product(*map(pairwise, cuts)):
        offsets, sizes = tuple(a for a, _ in corner), tuple(b - a for a, b in corner)
        elements = tensor[tuple(slice(a, b) for a, b in corner)].reshape(-1)
        bounds = [chosen.randint(0, elements.size) for _ in range(chosen.randint(0, 2))]
        for start, stop in pairwise(sorted([0, elements.size, *bounds])):
            extent = Extent(f"{name} {len(parts)}", 0, 4 * (stop - start))
            boxes.append(BoxPart(offsets, sizes, extent, start))
            parts.append(elements[start:stop])
    order = chosen.sample(range(len(boxes)), len(boxes))
    joined = Joined(key_of(name), "I32", shape, tuple(boxes[place] for place in order))
    return joined, [parts[place] for place in order], {name: tensor}


def described(parts: list[Any], members: list[FlatMember], interleaved: bool) -> Partitioned:
    name = name_of(members[0].key)
    extents = tuple(Extent(f"{name} {rank}", 0, part.nbytes) for rank, part in enumerate(parts))
    return Partitioned("I32", extents, members, interleaved)


def elements_of(block: Block, matrix: Any) -> Any:
    pieces = [
        matrix[row, column : column + block.rows * columns].reshape(block.rows, columns)
        for row, column, columns in block.pieces
    ]
    rows = matrix[block.row : block.row + block.rows]
    whole = np.concatenate(pieces, 1) if pieces else rows[:, block.column :][:, : block.columns]
    assert whole.shape == (block.rows, block.columns)
    return whole.reshape(-1)


@pytest.mark.parametrize("seed", range(200))
def test_blocks_are_the_tensors(seed: int) -> None:
    """Every element once, at its place, whatever the ranks, the processes and the memory."""
    chosen = random.Random(seed)
    ranks, processes = chosen.randint(1, 6), chosen.randint(1, 5)
    rules = [cut_flat, cut_each, cut_boxes]
    cuts: list[Any] = [chosen.choice(rules)(chosen, ranks) for _ in range(3)]
    data = {
        part.extent(rank).file: values for part, rows, _ in cuts for rank, values in enumerate(rows)
    }
    parts: list[Cut] = []
    for part, _, _ in cuts:
        parts += side_by_side(part) if isinstance(part, Joined) else [part]
    expected = {name: tensor for _, _, tensors in cuts for name, tensor in tensors.items()}
    rebuilt = {name: np.zeros(tensor.size, "i4") for name, tensor in expected.items()}
    seen = {name: np.zeros(tensor.size, int) for name, tensor in expected.items()}
    room = chosen.choice([64, 200, 1000, 10**6])
    for bucket in buckets(parts, room, processes):
        assert bucket.rows * bucket.width * 4 <= max(room, 4 * bucket.rows * processes)
        matrix = np.full((bucket.rows, bucket.width), -2, "i4")
        for segment in bucket.segments:
            for row in range(len(segment.part.ranks)):
                start, stop = segment.part.own_range(row, segment.start, segment.stop)
                piece = data[segment.part.extent(row).file][start:stop]
                matrix[row, segment.at : segment.at + len(piece)] = piece
        shares = [list(share_of(bucket, p, processes)) for p in range(processes)]
        for block in (block for share in shares for block in share):
            elements = elements_of(block, matrix)
            done = 0
            for start, stop in block.runs():
                rebuilt[name_of(block.member.key)][start:stop] = elements[
                    done : done + stop - start
                ]
                seen[name_of(block.member.key)][start:stop] += 1
                done += stop - start
        sizes = [sum(block.numel for block in share) for share in shares]
        assert max(sizes) <= -(-sum(sizes) // processes) + max(
            (block.columns for share in shares for block in share), default=0
        )
    for name, tensor in expected.items():
        assert (seen[name] == 1).all()
        assert (rebuilt[name] == tensor.reshape(-1)).all()


def test_a_bucket_has_not_too_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ranks have one column each of a long matrix: every line is one element."""
    monkeypatch.setattr(module, "LINES", 100)
    parts = tuple(BoxPart((0, place), (1000, 1), Extent("a", 0, 4000)) for place in range(2))
    several = [Joined((f"w{number}", "param"), "F32", (1000, 2), parts) for number in range(3)]
    listed = list(buckets(several, 1 << 20, 1))
    assert len(listed) == 60
    assert all(sum(len(block.runs()) for block in bucket.blocks()) == 100 for bucket in listed)


def test_columns_that_lie_side_by_side_are_one_block() -> None:
    """Tensor parallel: ranks have one and two of three columns; together they have whole lines."""

    def part(offset: int, columns: int) -> BoxPart:
        return BoxPart((0, offset), (4, columns), Extent("a", 0, 16 * columns))

    (row,) = side_by_side(Joined(("w", "param"), "F32", (4, 3), (part(1, 2), part(0, 1))))
    assert isinstance(row, Beside)
    (block,) = row.blocks(2, 8, 5)  # of the wider part: lines 1 to 3
    assert block.runs() == [(3, 12)]
    assert block.pieces == ((0, 5, 1), (1, 5, 2))
    (apart,) = side_by_side(Joined(("w", "param"), "F32", (4, 3), (part(1, 2),)))
    assert isinstance(apart, Joined)


def test_lines_that_begin_inside_of_a_box() -> None:
    """Of 2 x 4 lines, the two boxes have 2 x 2: after every second one is a gap."""
    parts = tuple(BoxPart((0, 0, at), (2, 2, 2), Extent("a", 0, 32)) for at in (0, 2))
    (row,) = side_by_side(Joined(("w", "param"), "F32", (2, 4, 4), parts))
    assert isinstance(row, Beside)
    assert [block.runs() for block in row.blocks(2, 8, 0)] == [[(4, 8)], [(16, 24)]]


def test_an_empty_range_of_a_box_is_apart() -> None:
    """The others lie side by side from end to end."""
    left, right = (BoxPart((0, at), (4, 2), Extent("a", 0, 32)) for at in (0, 2))
    empty = replace(left, extent=Extent("a", 0, 0), first=8)
    tensor = Joined(("w", "param"), "F32", (4, 4), (left, empty, right))
    row, rest = side_by_side(tensor)
    assert isinstance(row, Beside)
    assert row.ranks == (left, right)
    assert rest == replace(tensor, parts=(empty,))


def test_a_line_is_cut_into_shares() -> None:
    """Of one, two and three columns: a share has parts of some pieces, and none without columns."""
    parts = [
        BoxPart((0, offset), (1, size), Extent("a", 0, 4 * size))
        for offset, size in ((0, 1), (1, 2), (3, 3))
    ]
    (row,) = side_by_side(Joined(("w", "param"), "F32", (1, 6), tuple(parts)))
    assert isinstance(row, Beside)
    (bucket,) = buckets([row], 1 << 20, 3)
    shares = [[block.pieces for block in share_of(bucket, rank, 3)] for rank in range(3)]
    assert shares == [[((0, 0, 1), (1, 0, 1))], [((1, 1, 1), (2, 0, 1))], [((2, 1, 2),)]]


@pytest.mark.parametrize(
    ("room", "processes", "width"), [(64, 1, 5), (64, 2, 4), (64, 3, 5), (64, 4, 4), (1, 1, 1)]
)
def test_rows_fill_the_room(room: int, processes: int, width: int) -> None:
    """Three ranks have as many rows, or four if two or four processes share them."""
    flat = Partitioned("F32", (Extent("a", 0, 400),) * 3, [FlatMember(("w", "param"), (300,), 0)])
    listed = list(buckets([flat], room, processes))
    assert {bucket.width for bucket in listed[:-1]} == {width}
    assert sum(bucket.width for bucket in listed) == 100


def test_lines_that_do_not_fit_into_a_bucket() -> None:
    """Boxes that lie side by side go element by element then."""
    parts = tuple(BoxPart((0, at), (4, 2), Extent("a", 0, 32)) for at in (0, 2))
    (row,) = side_by_side(Joined(("w", "param"), "F32", (4, 4), parts))
    assert isinstance(row, Beside)
    listed = list(islice(buckets([row], 1, 1), 9))
    assert [segment for bucket in listed for segment in bucket.segments] == [
        Segment(row.apart, start, start + 1, 0) for start in range(8)
    ]


def test_a_tensor_that_no_file_has_a_part_of() -> None:
    """It has no elements, and takes no room between others."""
    empty = Partitioned("F32", (), [FlatMember(("empty", "param"), (0, 4), 0)])
    flat = Partitioned("F32", (Extent("a", 0, 8),), [FlatMember(("w", "param"), (2,), 0)])
    (bucket,) = buckets([flat, empty, flat], 1 << 20, 1)
    assert [segment.at for segment in bucket.segments] == [0, 2]


def test_columns_of_a_matrix_are_one_block_of_each_rank() -> None:
    """Tensor parallel: two ranks have two and one of three columns, the first in two ranges."""

    def part(offset: int, columns: int, first: int, numel: int) -> BoxPart:
        return BoxPart((0, offset), (4, columns), Extent("a", 0, 4 * numel), first)

    joined = Joined(
        ("w", "param"), "F32", (4, 3), (part(0, 2, 0, 3), part(0, 2, 3, 5), part(2, 1, 0, 4))
    )
    found = [
        [(block.start, block.rows, block.columns, block.stride, block.column) for block in blocks]
        for rank in range(3)
        for blocks in [lines_of(joined, rank, 0, joined.length(rank))]
    ]
    assert found == [
        [(0, 1, 2, 3, 0), (3, 1, 1, 0, 2)],
        [(4, 1, 1, 0, 0), (6, 2, 2, 3, 1)],
        [(2, 4, 1, 3, 0)],
    ]


def test_lines_go_on_over_axes_that_are_not_cut() -> None:
    """A middle axis of one element does not make a block of every line."""

    def part(offset: int) -> BoxPart:
        return BoxPart((0, 0, offset), (1000, 1, 4), Extent("a", 0, 16_000))

    tensor = Joined(("w", "param"), "F32", (1000, 1, 8), (part(0), part(4)))
    (row,) = side_by_side(tensor)
    assert isinstance(row, Beside)
    (block,) = row.blocks(0, 4000, 0)
    assert block.runs() == [(0, 8000)]
    (block,) = lines_of(tensor, 1, 0, 4000)
    assert (block.rows, block.start, block.stride) == (1000, 4, 8)


def test_short_boxes_are_apart_from_long_ones() -> None:
    """A bucket has rows as long as its longest part, for every part."""
    long = BoxPart((0, 0), (1000, 4), Extent("a", 0, 16_000))
    short = [BoxPart((1000 + n, 0), (1, 4), Extent("b", 16 * n, 16)) for n in range(500)]
    parts = (*short[:250], long, *short[250:])
    pieces = list(side_by_side(Joined(("w", "param"), "F32", (1500, 4), parts)))
    assert sorted(len(piece.ranks) for piece in pieces) == [1, 500]
    rows = sum(bucket.rows * bucket.width for bucket in buckets(pieces, 1 << 20, 1))
    assert rows == 1500 * 4
