"""How does an engine cut its tensors over ranks, and which blocks does an all-gather bring back?

The function `partitions(path)` of a format answers by the engine's own rule. It does not use the
fragments of the format's manifest: `verify --gather` proves one against the other. That is why the
geometry of boxes is here, apart from that in `fragments.py`. One all-gather brings a bucket, a
matrix of (rank x element); a tensor is blocks of that matrix. No I/O here.
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

    def extent(self, rank: int) -> Extent:
        """A rank's part."""
        return self.ranks[rank]

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


@dataclass(frozen=True, slots=True)
class BoxPart:
    """One rank's elements of a tensor: of the box [offset, offset + size) along every axis.

    `extent` has the elements of the box in row-major order, from element `first` of the box on: all
    of them, or a range. If `strides` are given, which count elements, the box is not row-major:
    `extent` reaches from its first element to its last, and has all of them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent
    first: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor whose ranks have a box of it each, cut along any axes, in any sizes.

    The parts follow each other in any order. Together they have every element once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[BoxPart, ...]

    @property
    def ranks(self) -> tuple[BoxPart, ...]:
        return self.parts

    def extent(self, rank: int) -> Extent:
        """A rank's part."""
        return self.parts[rank].extent

    def length(self, rank: int) -> int:
        """Elements of a rank's part."""
        return self.parts[rank].extent.length // SIZES[self.dtype]

    @property
    def line(self) -> int:
        """Elements of the shortest line: what is contiguous in the tensor and in a part."""
        filled = (part for part in self.parts if part.extent.length)
        return min((prod(part.sizes[self._inner(part) :]) for part in filled), default=0)

    def _inner(self, part: BoxPart) -> int:
        """The last axis along which a box is cut."""
        axes = range(len(self.shape))
        return max((axis for axis in axes if part.sizes[axis] != self.shape[axis]), default=0)

    def blocks(self, rank: int, start: int, stop: int, column: int = 0) -> Iterator[Block]:
        """Elements [start, stop) of a rank's part; they begin at `column` of the rank's row.

        Lines of the box are contiguous in the tensor. A range of elements begins and ends inside of
        lines; between them, lines at equal distances make one block.
        """
        part, member = self.parts[rank], FlatMember(self.name, self.shape, 0)
        sizes, inner = part.sizes, self._inner(part)
        steps = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        length = prod(sizes[inner:])
        place, end = part.first + start, part.first + stop
        while place < end:
            line, begin = divmod(place, length)
            element, rest = begin, line
            for axis in reversed(range(inner)):
                rest, coordinate = divmod(rest, sizes[axis])
                element += coordinate * steps[axis]
            element += sum(map(int.__mul__, part.offsets, steps))
            rows, columns, stride = 1, min(length - begin, end - place), 0
            if inner and columns == length:
                rows = min(sizes[inner - 1] - line % sizes[inner - 1], (end - place) // length)
                stride = steps[inner - 1]
            yield Block(member, rank, rows, column, columns, element, stride, packed=True)
            place += rows * columns
            column += rows * columns


@dataclass(frozen=True, slots=True)
class Nameless:
    """A tensor of slot `slot` whose parameter no file names: an optimizer knows it by number.

    It gets the name that the format's reader gives to the tensor of this slot, type and shape which
    begins at the same byte. The rule proves its elements then, and not its name.
    """

    slot: str
    tensor: Joined | Whole


Cut = Partitioned | Joined
"""What several ranks have parts of."""
Named = Partitioned | Joined | Whole
Partition = Named | Nameless


# -- what one all-gather brings


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of every rank's part; in a bucket's rows they begin at `at`."""

    part: Cut
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` x `columns` elements of a tensor in a bucket, from (`row`, `column`) on.

    Row i of the block holds `columns` elements of the tensor, from start + i * stride on. The rows
    lie in as many rows of the bucket; or, if `packed`, without gaps in one row of it.
    """

    member: FlatMember
    row: int
    rows: int
    column: int
    columns: int
    start: int
    stride: int
    packed: bool = False

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
            start, rest = self.start + rows * self.stride, self.rows - rows
            if self.packed:
                column = self.column + rows * self.columns
                return first, replace(self, column=column, rows=rest, start=start)
            return first, replace(self, row=self.row + rows, rows=rest, start=start)
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
            if isinstance(segment.part, Joined):
                yield from _joined(segment, segment.part)
            elif segment.part.interleaved:
                yield from _interleaved(segment, segment.part)
            else:
                yield from _flattened(segment, segment.part)


def _joined(segment: Segment, part: Joined) -> Iterator[Block]:
    """The blocks of boxes; a rank whose part is shorter than others' has none at the end."""
    for rank in range(len(part.parts)):
        stop = min(segment.stop, part.length(rank))
        yield from part.blocks(rank, segment.start, stop, segment.at)


def _interleaved(segment: Segment, part: Partitioned) -> Iterator[Block]:
    """The blocks of members that are cut over all ranks each; the last ranks are padded."""
    ranks = len(part.ranks)
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


def _flattened(segment: Segment, part: Partitioned) -> Iterator[Block]:
    """The blocks of a flat buffer that is the concatenation of all ranks' parts."""
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


LINES = 1 << 16
"""A bucket has about as many lines of boxes at most: the other side is read line by line."""


def buckets(parts: Sequence[Cut], room: int, processes: int) -> Iterator[Bucket]:
    """Packs parts of equal type and equal number of ranks into buckets of at most `room` bytes."""
    segments: list[Segment] = []
    end, kind, width, lines = 0, ("", 0), 0, 0
    for part in parts:
        if (part.dtype, len(part.ranks)) != kind:
            if segments:
                yield Bucket(*kind, end, tuple(segments))
            segments, end, lines, kind = [], 0, 0, (part.dtype, len(part.ranks))
            rows = -(-kind[1] // processes) * processes
            width = max(1, room // (rows * SIZES[part.dtype]))
        ranks = range(len(part.ranks))
        length, start = max(map(part.length, ranks)), 0
        line = part.line if isinstance(part, Joined) and length else 0
        while start < length:
            stop = min(length, start + width - end)
            if line:
                stop = min(stop, start + max(1, (LINES - lines) // len(ranks)) * line)
                lines += -(-(stop - start) // line) * len(ranks)
            segments.append(Segment(part, start, stop, end))
            end += stop - start
            start = stop
            if end == width or lines + len(ranks) > LINES:
                yield Bucket(*kind, end, tuple(segments))
                segments, end, lines = [], 0, 0
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
