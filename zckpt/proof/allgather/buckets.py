"""Packs blocks of tensors into buckets, each of which one all-gather returns.

A bucket is a matrix with a row of elements for each rank. A block is a piece of one tensor: a
rectangle of this matrix. A box is a rectangular slice of a tensor, such as a rank's shard. Its
geometry is computed here again, independently of `fragments.py`, because `verify --gather` checks
readers that use that module. This module does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.ranks.partition import BoxPart, FlatMember, Joined, Partitioned
from ...core.storage.fragments import Extent


class Spread(Partitioned, frozen=True):
    """A complete tensor, divided into equal parts: each process reads and compares one of them."""


class Beside(Struct, frozen=True):
    """Shards (boxes) of one tensor that lie side by side along `axis`, and together fill this axis.

    For example, ranks have columns of a matrix (`axis` is 1). A line is the part of a row that one
    shard has; it is contiguous in the tensor. `widths` has the number of elements in a line, for
    each shard.
    """

    apart: Joined
    axis: int
    widths: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.apart.dtype

    @property
    def ranks(self) -> tuple[BoxPart, ...]:
        return self.apart.parts

    def extent(self, rank: int) -> Extent:
        """The file, offset and length of the bytes of a rank's box (shard)."""
        return self.apart.extent(rank)

    def length(self, rank: int) -> int:
        """The number of elements in a rank's box (shard)."""
        return self.apart.length(rank)

    def own_range(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Converts an element range of the widest shard to the same lines of the shard of `rank`.

        The range must have complete lines. If lines have 5 elements in the widest shard and 4 in
        this one, [10, 25) becomes [8, 20).
        """
        width, widest = self.widths[rank], max(self.widths)
        return start // widest * width, stop // widest * width

    def blocks(self, start: int, stop: int, column: int) -> Iterator[Block]:
        """Yields the tensor's blocks for some lines; a line is the part of a row in one shard.

        In the widest shard, these lines are the elements [start, stop). In the bucket, which has a
        row for each rank, a rank's lines follow each other from `column` on.
        """
        member, shape = FlatMember(self.apart.key, self.apart.shape, 0), self.apart.shape
        line, end = start // max(self.widths), stop // max(self.widths)
        outer, length = self.apart.parts[0], prod(shape[self.axis :])
        first, size = line, even_lines(outer.sizes[: self.axis], shape)
        while line < end:
            rest, element = line, 0
            for axis in reversed(range(self.axis)):
                rest, coordinate = divmod(rest, outer.sizes[axis])
                element += (outer.offsets[axis] + coordinate) * prod(shape[axis + 1 :])
            rows = min(size - line % size, end - line)
            pieces = tuple(
                (rank, column + (line - first) * width, width)
                for rank, width in enumerate(self.widths)
            )
            # a row of the block joins the lines that all shards have of one row
            yield Block(member, 0, rows, 0, length, element, length, pieces)
            line += rows


def side_by_side(tensor: Joined) -> Iterator[Joined | Beside]:
    """Groups a tensor's shards (boxes) so that one all-gather can move the shards of a group.

    Shards that lie side by side and fill an axis become one `Beside`. All others are grouped by
    similar length.
    """
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[BoxPart]] = {}
    other_boxes: list[BoxPart] = []
    for part in tensor.parts:
        axis = tensor.inner(part)
        if axis and part.extent.length == prod(part.sizes) * SIZES[tensor.dtype]:
            rows.setdefault((part.offsets[:axis], part.sizes[:axis]), []).append(part)
        else:
            other_boxes.append(part)
    for (offsets, _), row in rows.items():
        axis = len(offsets)
        row.sort(key=lambda part: part.offsets[axis])
        ends = list(accumulate(part.sizes[axis] for part in row))
        if [0, *ends] == [*(part.offsets[axis] for part in row), tensor.shape[axis]]:
            widths = tuple(prod(part.sizes[axis:]) for part in row)
            yield Beside(replace(tensor, parts=tuple(row)), axis, widths)
        else:
            other_boxes += row
    # an all-gather moves rows that are all as wide as the longest shard
    other_boxes.sort(key=lambda part: part.extent.length.bit_length())
    for _, alike in groupby(other_boxes, key=lambda part: part.extent.length.bit_length()):
        yield replace(tensor, parts=tuple(alike))


def even_lines(sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """How many consecutive lines of a shard begin at equal distances in the tensor.

    A line is a part of the shard that is contiguous in the tensor. For a shard (2, 3, 5) of a
    tensor of the `shape` (4, 6, 8), a line has 5 elements, `sizes` is (2, 3), and the result is 3.
    """
    # lines 0 to 2 begin 8 elements apart, and line 3 begins 32 elements after line 2
    count = 1
    for size, whole in zip(reversed(sizes), reversed(shape[: len(sizes)]), strict=True):
        count *= size
        if size != whole:
            break
    return count


Cut = Partitioned | Joined | Beside
"""A tensor or buffer that several ranks or processes hold in parts."""


class Segment(Struct, frozen=True):
    """One range of elements of every rank's shard, and its place in a bucket.

    part           the tensor or flat buffer that has the shards
    start, stop    the range in the longest shard; `part.own_range` converts it for a rank
    at             the column of the bucket (a row for each rank) where the range begins
    """

    part: Cut
    start: int
    stop: int
    at: int


class Block(Struct, frozen=True):
    """A matrix of elements of one tensor, and its place in a bucket (a matrix with a row per rank).

    start          the tensor's element at which row 0 of the block begins
    stride         tensor elements from the beginning of a row to that of the next row
    row, column    where the block begins in the bucket, if it has no `pieces`
    pieces         vertical strips of the block, from left to right: (row of the bucket, first
                   column there, width of the strip)

    The bucket has a strip in one of its rows: first row 0 of the strip, then row 1, and so on.
    """

    member: FlatMember
    row: int
    rows: int
    column: int
    columns: int
    start: int
    stride: int
    pieces: tuple[tuple[int, int, int], ...] = ()

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def runs(self) -> list[tuple[int, int]]:
        """The tensor's elements in the block, as ranges [start, stop)."""
        if self.stride == self.columns or self.rows == 1:
            return [(self.start, self.start + self.numel)]
        firsts = range(self.start, self.start + self.rows * self.stride, self.stride)
        return [(first, first + self.columns) for first in firsts]

    def cut(self, count: int) -> tuple[Block, Block]:
        """Cuts the block in two, with about `count` elements in the first part.

        It cuts between rows, or within a single row. The block has more than `count` elements.
        """
        if self.rows > 1:
            rows = max(1, count // self.columns)
            first = replace(self, rows=rows)
            start, rest = self.start + rows * self.stride, self.rows - rows
            if self.pieces:
                below = tuple((row, at + rows * width, width) for row, at, width in self.pieces)
                return first, replace(self, rows=rest, start=start, pieces=below)
            return first, replace(self, row=self.row + rows, rows=rest, start=start)
        left, right, done = [], [], 0
        for row, at, width in self.pieces:
            taken = min(max(0, count - done), width)
            left += [(row, at, taken)] if taken else []
            right += [(row, at + taken, width - taken)] if taken < width else []
            done += width
        first = replace(self, columns=count, pieces=tuple(left))
        column, columns = self.column + count, self.columns - count
        start = self.start + count
        return first, replace(
            self, column=column, columns=columns, start=start, pieces=tuple(right)
        )


class Bucket(Struct, frozen=True):
    """What one all-gather moves: a matrix with a row of `width` elements for each rank.

    If `apart` is True, nothing is gathered: each process reads and compares only its own rows.
    """

    dtype: str
    rows: int
    apart: bool
    width: int
    segments: Sequence[Segment]

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    def blocks(self) -> Iterator[Block]:
        """Yields all pieces of tensors in the bucket; the engine's rule tells where they lie."""
        for segment in self.segments:
            if isinstance(segment.part, Joined):
                yield from _joined(segment, segment.part)
            elif isinstance(segment.part, Beside):
                yield from segment.part.blocks(segment.start, segment.stop, segment.at)
            elif segment.part.interleaved:
                yield from _interleaved(segment, segment.part)
            else:
                yield from _flattened(segment, segment.part)


def lines_of(tensor: Joined, rank: int, start: int, stop: int, column: int = 0) -> Iterator[Block]:
    """Yields the blocks that make up elements [start, stop) of a rank's shard (box) of a tensor.

    In the bucket (a matrix with a row for each rank), they begin at `column` of the rank's row.
    """
    part, member = tensor.parts[rank], FlatMember(tensor.key, tensor.shape, 0)
    sizes, inner = part.sizes, tensor.inner(part)
    steps = [prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    length, even = prod(sizes[inner:]), even_lines(sizes[:inner], tensor.shape)
    place, end = part.first + start, part.first + stop
    while place < end:
        line, begin = divmod(place, length)
        element, rest = begin, line
        for axis in reversed(range(inner)):
            rest, coordinate = divmod(rest, sizes[axis])
            element += coordinate * steps[axis]
        element += sum(map(int.__mul__, part.offsets, steps))
        # a part of a line is a block of its own; complete lines at equal distances form one block
        rows, columns, stride = 1, min(length - begin, end - place), 0
        if inner and columns == length:
            rows = min(even - line % even, (end - place) // length)
            stride = steps[inner - 1]
        pieces = ((rank, column, columns),)
        yield Block(member, rank, rows, column, columns, element, stride, pieces)
        place += rows * columns
        column += rows * columns


def _joined(segment: Segment, part: Joined) -> Iterator[Block]:
    """Yields the blocks of a segment, which is one range of elements in each rank's shard.

    A shard that ends before the range does has fewer blocks or none.
    """
    for rank in range(len(part.parts)):
        stop = min(segment.stop, part.length(rank))
        yield from lines_of(part, rank, segment.start, stop, segment.at)


def _interleaved(segment: Segment, part: Partitioned) -> Iterator[Block]:
    """Yields the pieces of tensors in one range of elements of every rank's shard of a flat buffer.

    Here, each tensor in the buffer is divided among all ranks. The shards of the last ranks may end
    with padding, which belongs to no piece.
    """
    ranks = len(part.ranks)
    for member in part.members:
        width = -(-member.numel // ranks)
        start, stop = max(segment.start, member.first), min(segment.stop, member.first + width)
        if start >= stop:
            continue
        first, columns = start - member.first, stop - start
        column = segment.at + start - segment.start
        full = (member.numel - first - columns) // width + 1  # rows that end inside the tensor
        yield Block(member, 0, full, column, columns, first, width)
        rest = member.numel - full * width - first
        if rest > 0:
            yield Block(member, full, 1, column, rest, full * width + first, width)


def _flattened(segment: Segment, part: Partitioned) -> Iterator[Block]:
    """Yields the pieces of tensors in one range of elements of every rank's shard of a flat buffer.

    Here, the shards follow each other in the order of ranks. A tensor may lie in one shard or in
    several, so it may have pieces of several ranks.
    """
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


def kind_of(part: Cut) -> tuple[str, int, bool]:
    """A key that is equal for tensors or buffers which one all-gather can move together.

    It is (type, number of ranks, whether gathering is unnecessary).
    """
    return part.dtype, len(part.ranks), isinstance(part, Spread)


LINES = 1 << 16
"""The approximate largest number of lines (contiguous parts of shards) in a bucket.

Each line costs a read request to the other checkpoint.
"""


def buckets(parts: Sequence[Cut], room: int, processes: int) -> Iterator[Bucket]:
    """Packs tensors and flat buffers into buckets of at most `room` bytes, one per all-gather.

    `parts` of one kind (`kind_of`) must follow each other. A bucket has a row for each rank, and
    `processes` is the number of processes that read these rows.
    """
    segments: list[Segment] = []
    end, kind, width, lines = 0, ("", 0, False), 0, 0
    for part in parts:
        if not part.ranks:  # a tensor without elements, which no file contains
            continue
        if kind_of(part) != kind:
            if segments:
                yield Bucket(*kind, end, tuple(segments))
            segments, end, lines, kind = [], 0, 0, kind_of(part)
            rows = -(-kind[1] // processes) * processes
            width = max(1, room // (rows * SIZES[part.dtype]))
        ranks = range(len(part.ranks))
        length, start = max(map(part.length, ranks)), 0
        unit = max(part.widths) if isinstance(part, Beside) else 1
        if isinstance(part, Beside) and unit > width:
            part, unit = part.apart, 1
        line = part.line if isinstance(part, Joined) and length else 0
        while start < length:
            if width - end < unit:
                yield Bucket(*kind, end, tuple(segments))
                segments, end, lines = [], 0, 0
            stop = min(length, start + (width - end) // unit * unit)
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


def share_of(bucket: Bucket, rank: int, size: int) -> Iterator[Block]:
    """Yields the blocks (pieces of tensors) of a bucket that one process compares.

    It is process `rank` of `size`. All processes get similar numbers of elements.
    """
    listed = list(bucket.blocks())
    if bucket.apart:
        yield from (block for block in listed if block.row == rank)
        return
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
