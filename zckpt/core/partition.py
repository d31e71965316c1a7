"""How an engine cuts what it holds over its ranks: what an all-gather puts together again. No I/O.

A format that has `partitions(path)` says so by the engine's own rule, beside and independent of the
fragments of its manifest: `verify --gather` proves one against the other. What is gathered at once
is a bucket, a (rank x element) matrix; a tensor in it is blocks of that matrix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from .dtypes import SIZES
from .fragments import Extent


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor, `parameter/slot`, which begins at element `first` of a flat buffer."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A flat buffer of which every rank holds a part, in the order of the ranks.

    Either the parts one behind the other are the buffer, and `first` counts in it; or, with
    `interleaved`, every member is cut into equal slices, padded at its end, one for each rank, and
    `first` counts in every rank's part.
    """

    dtype: str
    ranks: tuple[Extent, ...]
    members: Sequence[Member]
    interleaved: bool = False

    def length(self, rank: int) -> int:
        """Elements of a rank's part."""
        return self.ranks[rank].length // SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that one file holds whole; `extent` is from its first element to its last.

    `strides` count elements; None where it is row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None


Partition = Partitioned | Whole


# -- what is gathered together


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of every rank's part, at element `at` of a bucket's rows."""

    part: Partitioned
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of a tensor in a gathered bucket: `rows` x `columns` of them, from a corner on.

    Row i of the block is elements [start + i * stride, ... + columns) of the tensor.
    """

    member: Member
    row: int
    rows: int
    column: int
    columns: int
    start: int
    stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def runs(self) -> list[tuple[int, int]]:
        """The elements, in ranges."""
        if self.stride == self.columns or self.rows == 1:
            return [(self.start, self.start + self.numel)]
        firsts = range(self.start, self.start + self.rows * self.stride, self.stride)
        return [(first, first + self.columns) for first in firsts]

    def cut(self, count: int) -> tuple[Block, Block]:
        """In two, about `count` elements in the first: between rows, or within the only one."""
        if self.rows > 1:
            rows = min(max(1, count // self.columns), self.rows - 1)
            first = replace(self, rows=rows)
            start = self.start + rows * self.stride
            return first, replace(self, row=self.row + rows, rows=self.rows - rows, start=start)
        first = replace(self, columns=count)
        column, columns = self.column + count, self.columns - count
        return first, replace(self, column=column, columns=columns, start=self.start + count)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one all-gather brings: `width` elements of each of `rows` ranks."""

    dtype: str
    rows: int
    width: int
    segments: Sequence[Segment]

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    def blocks(self) -> Iterator[Block]:
        """All tensors in it, by the engine's rule."""
        for segment in self.segments:
            rule = _interleaved if segment.part.interleaved else _flattened
            yield from rule(segment)


def _interleaved(segment: Segment) -> Iterator[Block]:
    """Every member is cut over all ranks, the last of which are padded."""
    part, ranks = segment.part, len(segment.part.ranks)
    for member in part.members:
        width = -(-member.numel // ranks)
        start, stop = max(segment.start, member.first), min(segment.stop, member.first + width)
        if start >= stop:
            continue
        first, columns = start - member.first, stop - start
        column = segment.at + start - segment.start
        full = (member.numel - first - columns) // width + 1  # rows that end inside the tensor
        if full > 0:
            yield Block(member, 0, full, column, columns, first, width)
        row = max(full, 0)
        rest = member.numel - row * width - first
        if rest > 0:
            yield Block(member, row, 1, column, rest, row * width + first, width)


def _flattened(segment: Segment) -> Iterator[Block]:
    """Ranks' parts one behind the other are the flat buffer."""
    part = segment.part
    firsts = [member.first for member in part.members]
    base = 0
    for row in range(len(part.ranks)):
        begin, end = base + segment.start, base + min(segment.stop, part.length(row))
        base += part.length(row)
        for member in part.members[max(0, bisect_right(firsts, begin) - 1) :]:
            if member.first >= end:
                break
            start, stop = max(begin, member.first), min(end, member.first + member.numel)
            if start < stop:
                column = segment.at + start - begin
                yield Block(member, row, 1, column, stop - start, start - member.first, 0)


def buckets(parts: Sequence[Partitioned], room: int, processes: int) -> Iterator[Bucket]:
    """Parts of equal type and number of ranks together, in pieces of at most `room` bytes."""
    held: list[Segment] = []
    here, kind, width = 0, ("", 0), 0
    for part in parts:
        if (part.dtype, len(part.ranks)) != kind:
            if held:
                yield Bucket(*kind, here, tuple(held))
            held, here, kind = [], 0, (part.dtype, len(part.ranks))
            rows = -(-kind[1] // processes) * processes
            width = max(1, room // (rows * SIZES[part.dtype]))
        length, start = max(map(part.length, range(len(part.ranks)))), 0
        while start < length:
            stop = min(length, start + width - here)
            held.append(Segment(part, start, stop, here))
            here += stop - start
            start = stop
            if here == width:
                yield Bucket(*kind, here, tuple(held))
                held, here = [], 0
    if held:
        yield Bucket(*kind, here, tuple(held))


def share_of(blocks: Iterable[Block], rank: int, size: int) -> Iterator[Block]:
    """What one of `size` processes compares: about as many elements as every other."""
    listed = list(blocks)
    most = -(-sum(block.numel for block in listed) // size)
    here = 0
    for whole in listed:
        rest: Block | None = whole
        while rest is not None:
            left = most - here % most
            block, rest = rest.cut(left) if rest.numel > left else (rest, None)
            if here // most == rank:
                yield block
            here += block.numel
