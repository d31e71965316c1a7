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
    """Boxes (shards) of one tensor that lie side by side along `axis` and together fill this axis.

    For example, the columns of a matrix are divided among ranks (`axis` is 1). All boxes have the
    same ranges along the axes before `axis`, and are complete along the axes after it. A line is
    the part of a row that one box has: its elements have equal indices on the axes before `axis`.
    The lines of all boxes for one row follow each other in the tensor, without gaps. `widths` has,
    for each box, the number of elements in a line.
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
        """The lines in elements [start, stop) of the widest box, as elements of the box of `rank`.

        A line is the part of a row that one box has. For example, a line has 5 elements in the
        widest box and 4 in the box of `rank`. Then [10, 25), which is lines 2 to 4, becomes
        [8, 20).
        """
        width, widest = self.widths[rank], max(self.widths)
        return start // widest * width, stop // widest * width

    def blocks(self, start: int, stop: int, column: int) -> Iterator[Block]:
        """Yields the tensor's blocks for the lines in elements [start, stop) of the widest box.

        A line is the part of a row that one box has. A row of a block joins the lines that all
        boxes have of one row. The bucket is a matrix with a row for each rank: there, the lines of
        a rank's box follow each other, from `column` on.
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
            yield Block(member, 0, rows, 0, length, element, length, pieces)
            line += rows


def side_by_side(tensor: Joined) -> Iterator[Joined | Beside]:
    """Groups the boxes (ranks' shards) of a tensor; one all-gather can move the boxes of a group.

    Boxes that lie side by side and together fill an axis of the tensor become one `Beside`. All
    other boxes are grouped by similar length, to save memory: an all-gather moves a matrix with a
    row for each box, and all rows are as wide as the longest box.
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
    other_boxes.sort(key=lambda part: part.extent.length.bit_length())
    for _, alike in groupby(other_boxes, key=lambda part: part.extent.length.bit_length()):
        yield replace(tensor, parts=tuple(alike))


def even_lines(sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The number of consecutive lines of a box (shard) that begin at equal distances in the tensor.

    One `Block` can describe all these lines. A line is a part of the box that is contiguous in the
    tensor. `shape` is the shape of the tensor. `sizes` are the sizes of the box along the axes
    before a line. For example, a tensor has shape (4, 6, 8), and a box in it has shape (2, 3, 5):
    lines have 5 elements, and `sizes` are (2, 3). Lines 0, 1 and 2 begin 8 elements apart, but line
    3 begins 32 elements after line 2. So the result is 3. For a box of shape (2, 6, 5) it is 12.
    """
    count = 1
    for size, whole in zip(reversed(sizes), reversed(shape[: len(sizes)]), strict=True):
        count *= size
        if size != whole:
            break
    return count


Cut = Partitioned | Joined | Beside
"""A tensor or buffer that several ranks or processes hold in parts."""


class Segment(Struct, frozen=True):
    """One range of elements of all ranks' shards of a tensor or flat buffer (`part`), in a bucket.

    A bucket is a matrix with a row for each rank: the elements begin at column `at` of each row.
    The range [start, stop) counts elements of the longest shard. `part.own_range` converts it to
    the range of a rank whose shard is shorter.
    """

    part: Cut
    start: int
    stop: int
    at: int


class Block(Struct, frozen=True):
    """A matrix of elements of one tensor, and where they are in a bucket.

    Row i of the block has the tensor's elements from start + i * stride on, `columns` in number.
    The bucket is itself a matrix, with a row for each rank. Without `pieces`, the block is the
    rectangle of the bucket that begins at (`row`, `column`). With `pieces`, the block's columns
    come from one or more boxes (shards). A piece (row, column, columns) gives the next `columns`
    columns of the block. Its elements begin at (row, column) of the bucket, and all its rows follow
    each other in that one row of the bucket.
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
    """Yields the blocks that make up elements [start, stop) of a rank's box (shard) of a tensor.

    A line is a part of the box that is contiguous in the tensor. Complete lines that begin at equal
    distances in the tensor form one block. If the range begins or ends inside a line, this part of
    the line is a block of its own. In the bucket (a matrix with a row for each rank), the elements
    begin at `column` of the rank's row.
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
        rows, columns, stride = 1, min(length - begin, end - place), 0
        if inner and columns == length:
            rows = min(even - line % even, (end - place) // length)
            stride = steps[inner - 1]
        pieces = ((rank, column, columns),)
        yield Block(member, rank, rows, column, columns, element, stride, pieces)
        place += rows * columns
        column += rows * columns


def _joined(segment: Segment, part: Joined) -> Iterator[Block]:
    """Yields the pieces of a tensor in one range of elements of every rank's box (shard) of it.

    Ranks with shorter boxes have fewer pieces or none.
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
"""The approximate largest number of lines in a bucket.

A line is a part of a box (shard) that is contiguous in the tensor. For each line there is a read
request to the checkpoint with which the gathered tensors are compared.
"""


def buckets(parts: Sequence[Cut], room: int, processes: int) -> Iterator[Bucket]:
    """Packs tensors and flat buffers into buckets of at most `room` bytes, one per all-gather.

    A bucket has a row for each rank that saved the checkpoint. Its rows are divided among the
    `processes` processes that compare now. `parts` must be sorted: parts with an equal key
    `kind_of` (type, number of ranks, whether to gather) follow each other.
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
