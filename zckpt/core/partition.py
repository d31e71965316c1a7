"""How does an engine cut its tensors over ranks, and which blocks does an all-gather bring back?

The function `partitions(path)` of a format answers by the engine's own rule. It does not use the
fragments of the format's manifest: `verify --gather` proves one against the other. One all-gather
brings a bucket, a matrix of (rank x element); a tensor is blocks of that matrix. No I/O here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from .dtypes import SIZES
from .fragments import Extent


@dataclass(frozen=True, slots=True)
class FlatMember:
    """One tensor, `parameter/slot`, that begins at element `first` of a flat buffer."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A flat buffer; every rank holds a part of it, in the order of the ranks.

    Without `interleaved`, the buffer is the concatenation of the parts, and a member's `first`
    counts in the buffer. With `interleaved`, every member is padded and cut into one equal slice
    per rank, and `first` counts in each rank's part.
    """

    dtype: str
    ranks: tuple[Extent, ...]
    members: Sequence[FlatMember]
    interleaved: bool = False

    def length(self, rank: int) -> int:
        """Elements of a rank's part."""
        return self.ranks[rank].length // SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that one file holds whole; `extent` reaches from its first element to its last.

    `strides` count elements; they are None if the tensor is row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None


Partition = Partitioned | Whole


# -- what one all-gather brings


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of every rank's part; in a bucket's rows they begin at `at`."""

    part: Partitioned
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` x `columns` elements of a tensor in a bucket, from (`row`, `column`) on.

    Row i of the block holds `columns` elements of the tensor, from start + i * stride on.
    """

    member: FlatMember
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
        """The elements as ranges [start, stop)."""
        if self.stride == self.columns or self.rows == 1:
            return [(self.start, self.start + self.numel)]
        firsts = range(self.start, self.start + self.rows * self.stride, self.stride)
        return [(first, first + self.columns) for first in firsts]

    def cut(self, count: int) -> tuple[Block, Block]:
        """Cuts in two, with about `count` elements first: between rows, or within a single row."""
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
    """The result of one all-gather: `width` elements from each of `rows` ranks."""

    dtype: str
    rows: int
    width: int
    segments: Sequence[Segment]

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    def blocks(self) -> Iterator[Block]:
        """The blocks of all tensors in the bucket, by the engine's rule."""
        for segment in self.segments:
            rule = _interleaved if segment.part.interleaved else _flattened
            yield from rule(segment)


def _interleaved(segment: Segment) -> Iterator[Block]:
    """The blocks of members that are cut over all ranks each; the last ranks are padded."""
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
    """The blocks of a flat buffer that is the concatenation of all ranks' parts."""
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
    """Packs parts of equal type and equal number of ranks into buckets of at most `room` bytes."""
    segments: list[Segment] = []
    end, kind, width = 0, ("", 0), 0
    for part in parts:
        if (part.dtype, len(part.ranks)) != kind:
            if segments:
                yield Bucket(*kind, end, tuple(segments))
            segments, end, kind = [], 0, (part.dtype, len(part.ranks))
            rows = -(-kind[1] // processes) * processes
            width = max(1, room // (rows * SIZES[part.dtype]))
        length, start = max(map(part.length, range(len(part.ranks)))), 0
        while start < length:
            stop = min(length, start + width - end)
            segments.append(Segment(part, start, stop, end))
            end += stop - start
            start = stop
            if end == width:
                yield Bucket(*kind, end, tuple(segments))
                segments, end = [], 0
    if segments:
        yield Bucket(*kind, end, tuple(segments))


def share_of(blocks: Iterable[Block], rank: int, size: int) -> Iterator[Block]:
    """The blocks that one of `size` processes compares; each gets about as many elements."""
    listed = list(blocks)
    most = -(-sum(block.numel for block in listed) // size)
    counted = 0
    for whole in listed:
        rest: Block | None = whole
        while rest is not None:
            left = most - counted % most
            block, rest = rest.cut(left) if rest.numel > left else (rest, None)
            if counted // most == rank:
                yield block
            counted += block.numel
