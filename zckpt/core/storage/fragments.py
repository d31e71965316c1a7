"""Maps the elements of one tensor to bytes in files.

    Fragment    a run of row-major elements of one tensor, in an extent
    Extent      a range of bytes in one file
    Record      an extent for which the file may state a checksum

The fragments of a tensor are a sequence of one of these kinds:

    Runs        a list of fragments
    Slices      ZeRO-3's arithmetic: rank r owns elements [r * ceil(n / dp), ...). Nothing is stored
                per rank.
    Box         a block of a tensor that is cut along any axes, or whose order in the file is not
                row-major (a transposed buffer)
    Boxes       several boxes

A ZeRO partition of a tensor-parallel slice is a range of a box's elements. `range_of_box` converts
such a range to boxes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from math import prod
from operator import attrgetter
from typing import Any, Protocol

from msgspec import Struct

from .sequences import Made

ZEROS = ""
"""The file name of an extent of zeros that lies in no file."""


class Extent(Struct, frozen=True):
    """A byte range: `length` bytes of `file` (a path) from `offset` on."""

    file: str
    offset: int
    length: int

    def part(self, start: int, stop: int) -> Extent:
        """Bytes [start, stop) of this extent."""
        return Extent(self.file, self.offset + start, stop - start)


class Planned(Protocol):
    """Returns the CRC-32 that a file states for a byte range; only the first call opens the file.

    The range was computed without opening the file. The first call raises an error if the range is
    wrong.
    """

    @property
    def is_open(self) -> bool: ...

    def __call__(self) -> int | None: ...


class Record(Struct, frozen=True):
    """A byte range whose file may state its CRC-32, such as a zip member.

    `crc` is the CRC-32, or None if the file states none. The range may have been computed without
    opening the file: see `Planned`. Code that reads the bytes must read `crc` too, which opens the
    file and checks the range.
    """

    extent: Extent
    stated_crc: int | Planned | None

    @property
    def crc(self) -> int | None:
        stated = self.stated_crc
        return stated if stated is None or type(stated) is int else stated()  # type: ignore[operator]

    @property
    def is_unopened(self) -> bool:
        """Whether the file that states the CRC-32 has not been opened yet."""
        return callable(self.stated_crc) and not self.stated_crc.is_open


class Fragment(Struct, frozen=True):
    """Elements [start, stop) of a tensor, in row-major order, in the byte range `extent`.

    If `count` is above one, the byte range has that many runs of equal length, without gaps. Run i
    holds elements [start + i * stride, stop + i * stride).
    """

    start: int
    stop: int
    extent: Extent
    count: int = 1
    stride: int = 0

    def element_at(self, offset: int, size: int) -> int:
        """The row-major index of the element to which a byte of the file belongs.

        `offset` is the byte's position in the file; `size` is bytes per element.
        """
        run, within = divmod(offset - self.extent.offset, self.extent.length // self.count)
        return self.start + run * self.stride + within // size

    def runs(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yields the runs of this fragment that overlap [start, stop).

        A run is a range of consecutive elements.
        """
        if self.count == 1:
            yield self
            return
        low = max(0, (start - self.stop) // self.stride + 1)
        high = min(self.count, -((self.start - stop) // self.stride))
        length = self.extent.length // self.count
        for number in range(low, high):
            shift = number * self.stride
            part = self.extent.part(number * length, (number + 1) * length)
            yield Fragment(self.start + shift, self.stop + shift, part)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape, in elements."""
    return tuple([prod(shape[axis + 1 :]) for axis in range(len(shape))])


_start = attrgetter("start")


class Fragments(Sequence[Fragment]):
    """All fragments of one tensor: which elements lie in which bytes of which files."""

    __slots__ = ()

    def overlapping(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yields the fragments that hold any of the elements [start, stop)."""
        raise NotImplementedError

    def runs(self, start: int, stop: int, size: int) -> Iterator[Fragment]:
        """Yields the elements [start, stop) as fragments of one run each.

        A run is a range of row-major elements that are contiguous in the file. The first and the
        last run are cut at `start` and `stop`. `size` is bytes per element.
        """
        for fragment in self.overlapping(start, stop):
            for run in fragment.runs(start, stop):
                low, high = max(start, run.start), min(stop, run.stop)
                extent = run.extent.part((low - run.start) * size, (high - run.start) * size)
                yield Fragment(low, high, extent)

    def part(self, start: int, stop: int, size: int) -> Runs:
        """Makes elements [start, stop) a new tensor: returns its fragments.

        `size` is bytes per element.
        """
        runs = sorted(self.runs(start, stop, size), key=_start)
        return Runs([Fragment(run.start - start, run.stop - start, run.extent) for run in runs])


class Runs(Fragments):
    """The fragments of a tensor as a list sorted by `start`; each has one range of elements."""

    __slots__ = ("listed",)

    listed: Sequence[Fragment]

    def __init__(self, listed: Sequence[Fragment]) -> None:
        self.listed = tuple([fragment for fragment in listed if fragment.stop > fragment.start])

    def __getitem__(self, place: Any) -> Any:
        return self.listed[place]

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)

    def _first(self, start: int) -> int:
        return bisect_right(self.listed, start, key=_start) - 1 if len(self.listed) > 1 else 0

    def overlapping(self, start: int, stop: int) -> Iterator[Fragment]:
        listed, first = self.listed, self._first(start)
        for place in range(max(0, first), len(listed)):
            fragment = listed[place]
            if fragment.start >= stop:
                return
            if fragment.stop > start:
                yield fragment


class RunColumns(Runs):
    """A sequence of fragments that stores two arrays; a fragment is made when it is read.

    Fragment i has the elements from `starts[i]` to `starts[i + 1]`, in the bytes `extents[i]`. The
    last one ends at element `numel`. `starts` has no duplicates.
    """

    __slots__ = ("extents", "numel", "starts")

    def __init__(self, starts: Sequence[int], numel: int, extents: Sequence[Extent]) -> None:
        self.starts, self.numel, self.extents = starts, numel, extents
        self.listed = Made(self._fragment, range(len(starts)))

    def _fragment(self, place: int) -> Fragment:
        is_last = place + 1 == len(self.starts)
        stop = self.numel if is_last else self.starts[place + 1]
        return Fragment(self.starts[place], stop, self.extents[place])

    def _first(self, start: int) -> int:
        return bisect_right(self.starts, start) - 1


def solid(numel: int, extent: Extent) -> Runs:
    """The fragments of a tensor of `numel` elements that lie contiguous in one byte range."""
    return Runs([Fragment(0, numel, extent)])


class Slices(Fragments):
    """The fragments of a tensor that ZeRO-3 cuts evenly over ranks; the last slices are padded.

    flats     each rank's flat buffer, with slices of many tensors
    offset    the element at which this tensor's slice begins in every buffer
    size      bytes per element
    width     the number of elements in a slice, with padding
    filled    the number of ranks that hold elements; the others have only padding
    """

    __slots__ = ("filled", "flats", "numel", "offset", "size", "width")

    def __init__(self, flats: Sequence[Extent], offset: int, numel: int, size: int) -> None:
        self.flats, self.offset, self.numel, self.size = flats, offset, numel, size
        self.width = -(-numel // len(flats))
        self.filled = -(-numel // self.width) if self.width else 0

    def __len__(self) -> int:
        return self.filled

    def slice_of(self, rank: int) -> tuple[int, int, int]:
        """One rank's slice: its first byte in the file, and its elements [start, stop)."""
        start = rank * self.width
        stop = min(start + self.width, self.numel)
        return self.flats[rank].offset + self.offset * self.size, start, stop

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < self.filled:
            raise IndexError(place)
        offset, start, stop = self.slice_of(place)
        extent = Extent(self.flats[place].file, offset, (stop - start) * self.size)
        return Fragment(start, stop, extent)

    def __iter__(self) -> Iterator[Fragment]:
        return map(self.__getitem__, range(self.filled))

    def overlapping(self, start: int, stop: int) -> Iterator[Fragment]:
        if not self.numel:
            return
        for rank in self.ranks(start, stop):
            yield self[rank]

    def ranks(self, start: int, stop: int) -> range:
        """The ranks whose slices hold any of the elements [start, stop); the range is not empty."""
        return range(start // self.width, min(-(-stop // self.width), self.filled))


class Box(Fragments):
    """A block of shape `sizes`, which begins at `offsets` in a tensor of shape `whole`.

    extent     the byte range that holds the block
    first      the number of elements in `extent` before the block's first element
    strides    the steps along the axes in the file, in elements
    size       bytes per element

    A fragment is a part of the block that is contiguous in the file.
    """

    __slots__ = (
        "_axes", "_count", "_run", "_stride",
        "extent", "first", "offsets", "size", "sizes", "start", "strides", "whole",
    )  # fmt: skip

    def __init__(
        self,
        *,
        whole: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        first: int,
        size: int,
        extent: Extent,
    ) -> None:
        self.whole, self.offsets = tuple(whole), tuple(offsets)
        self.sizes, self.strides = tuple(sizes), tuple(strides)
        self.first, self.size, self.extent = first, size, extent
        steps = row_major(whole)
        self.start = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
        axes = _joined([axis for axis in zip(sizes, steps, strides, strict=True) if axis[0] != 1])
        inner = next((axis for axis in reversed(axes) if axis[2] == 1), None)
        self._run, self._count, self._stride = 1, 1, 0
        if inner is not None:
            axes.remove(inner)
            count, step, _ = inner
            if step != 1:
                self._count, self._stride = count, step
            else:
                self._run = count
                behind = next((axis for axis in reversed(axes) if axis[2] == count), None)
                if behind is not None:
                    axes.remove(behind)
                    self._count, self._stride = behind[:2]
        self._axes = sorted(axes, key=lambda axis: -axis[1])

    @property
    def stop(self) -> int:
        """The row-major index of the box's last element plus one; `start` for an empty box."""
        if not prod(self.sizes):
            return self.start
        ends = [offset + size - 1 for offset, size in zip(self.offsets, self.sizes, strict=True)]
        last = 0
        for end, length in zip(ends, self.whole, strict=True):
            last = last * length + end
        return last + 1

    @property
    def reach(self) -> Extent:
        """The bytes from the first element of the box (block) in the file to its last element.

        In a damaged checkpoint these bytes may exceed `extent`.
        """
        if not prod(self.sizes):
            return self.extent.part(0, 0)
        pairs = zip(self.sizes, self.strides, strict=True)
        last = self.first + sum((size - 1) * stride for size, stride in pairs)
        return self.extent.part(self.first * self.size, (last + 1) * self.size)

    def __len__(self) -> int:
        return prod(count for count, _, _ in self._axes) if prod(self.sizes) else 0

    def __iter__(self) -> Iterator[Fragment]:
        # itertools.product would list every axis, and an expanded axis may have any length
        for place in range(prod(count for count, _, _ in self._axes) if prod(self.sizes) else 0):
            yield self[place]

    def __getitem__(self, place: Any) -> Any:
        start, first = self.start, self.first
        for count, step, stride in reversed(self._axes):
            place, coordinate = divmod(place, count)
            start += coordinate * step
            first += coordinate * stride
        if place:
            raise IndexError(place)
        stop = first + self._run * self._count
        extent = self.extent.part(first * self.size, stop * self.size)
        return Fragment(start, start + self._run, extent, self._count, self._stride)

    def overlapping(self, start: int, stop: int) -> Iterator[Fragment]:
        if not prod(self.sizes):
            return
        (count, step, _), *inner_axes = self._axes or [(1, 1, 0)]
        reach = sum((number - 1) * width for number, width, _ in inner_axes)
        reach += (self._count - 1) * self._stride + self._run
        before = self.start + reach - 1
        low, high = max(0, -((before - start) // step)), -((self.start - stop) // step)
        inner_count = prod(number for number, _, _ in inner_axes)
        for place in range(low * inner_count, min(high, count) * inner_count):
            fragment: Fragment = self[place]
            end = fragment.stop + (fragment.count - 1) * fragment.stride
            if fragment.start < stop and end > start:
                yield fragment


def _joined(axes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merges axes that are contiguous both in the tensor and in the file.

    Each axis is (size, step in the tensor, stride in the file).
    """
    joined: list[tuple[int, int, int]] = []
    for count, step, stride in axes:
        if joined and joined[-1][1:] == (count * step, count * stride):
            joined[-1] = (joined[-1][0] * count, step, stride)
        else:
            joined.append((count, step, stride))
    return joined


class Boxes(Fragments):
    """The fragments of a tensor that is stored as several boxes (blocks), in any order.

    `parts` are the boxes. The sequence may make a box only when the box is read.
    """

    __slots__ = ("_ends", "_order", "_starts", "_stops", "parts")

    def __init__(self, parts: Sequence[Box]) -> None:
        self.parts = parts
        places = [(part.start, part.stop, len(part)) for part in parts]
        self._ends = array("q", accumulate(count for _, _, count in places))
        order = sorted(range(len(places)), key=lambda place: places[place][0])
        self._order = array("q", order)
        self._starts = array("q", (places[place][0] for place in order))
        # the largest end of the boxes so far: it never decreases, although boxes overlap
        self._stops = array("q", accumulate((places[place][1] for place in order), max))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Fragment]:
        return chain.from_iterable(self.parts)

    def __getitem__(self, place: Any) -> Any:
        part = bisect_right(self._ends, place)
        return self.parts[part][place - (self._ends[part - 1] if part else 0)]

    def overlapping(self, start: int, stop: int) -> Iterator[Fragment]:
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        for place in sorted(self._order[low:high]):
            yield from self.parts[place].overlapping(start, stop)


def tile(whole: Sequence[int], parts: Iterable[Sequence[Sequence[int]]]) -> bool:
    """Whether boxes, given as (offsets, sizes), hold every element of a tensor exactly once."""
    # Every element is in an odd number of boxes if each corner belongs to an even number of boxes,
    # and only the tensor's own corners to an odd one. That number is 1 if all boxes together have
    # as many elements as the tensor. To compare all pairs of 100,000 boxes would take hours.
    filled = [(offsets, sizes) for offsets, sizes in parts if prod(sizes)]
    inside = all(
        0 <= offset <= offset + size <= length
        for offsets, sizes in filled
        for offset, size, length in zip(offsets, sizes, whole, strict=True)
    )
    if not inside or sum(prod(sizes) for _, sizes in filled) != prod(whole):
        return False
    cut = [axis for axis in range(len(whole)) if any(s[axis] != whole[axis] for _, s in filled)]
    odd: set[tuple[int, ...]] = set()
    for offsets, sizes in filled:
        ends = ((offsets[axis], offsets[axis] + sizes[axis]) for axis in cut)
        odd.symmetric_difference_update(product(*ends))
    corners = set(product(*((0, whole[axis]) for axis in cut))) if filled else set()
    return odd == corners


def range_of_box(
    whole: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    start: int,
    stop: int,
    size: int,
    extent: Extent,
) -> Iterator[Box]:
    """Converts a ZeRO partition of a tensor-parallel slice to boxes (blocks) of the whole tensor.

    whole             the shape of the tensor
    offsets, sizes    the place and the shape of the slice in the tensor
    start, stop       the partition, as a range of the slice's row-major elements
    size              bytes per element
    extent            the bytes of the partition, without gaps
    """
    assert 0 <= start <= stop <= prod(sizes), (start, stop, sizes)
    place = start
    for corner, lengths in corners_of_range(sizes, start, stop):
        at = [offset + inner for offset, inner in zip(offsets, corner, strict=True)]
        yield Box(
            whole=whole,
            offsets=at,
            sizes=lengths,
            strides=row_major(lengths),
            first=place - start,
            size=size,
            extent=extent,
        )
        place += prod(lengths)


def corners_of_range(
    sizes: Sequence[int], start: int, stop: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Splits row-major elements [start, stop) of a tensor into blocks; yields corners and sizes.

    A range begins and ends inside of rows, planes, ..., so n axes give up to 2 * n - 1 blocks.
    """
    steps = row_major(sizes)
    place = start
    while place < stop:
        # the outermost axis along which a box can begin here and end within the range
        axis = next(
            (n for n, step in enumerate(steps) if not place % step and place + step <= stop), 0
        )
        corner = [place // step % length for step, length in zip(steps, sizes, strict=True)]
        lengths = [*(1 for _ in sizes[:axis]), *sizes[axis:]]
        if sizes:
            lengths[axis] = min(sizes[axis] - corner[axis], (stop - place) // steps[axis])
        yield corner, lengths
        place += prod(lengths)


def strided(
    shape: Sequence[int], *, strides: Sequence[int], first: int, size: int, extent: Extent
) -> Box:
    """Describes a complete tensor, whose elements may be in any order in the file, as one `Box`."""
    return Box(
        whole=shape,
        offsets=(0,) * len(shape),
        sizes=shape,
        strides=strides,
        first=first,
        size=size,
        extent=extent,
    )


def boxes(parts: Iterable[Box]) -> Fragments:
    """Makes the fragments of a tensor from its boxes; empty boxes are left out.

    The result is `Runs` if each box is one range of elements, else `Boxes`, or the box itself if
    there is only one.
    """
    filled = tuple([part for part in parts if prod(part.sizes)])
    listed = [part[0] for part in filled if len(part) == 1]
    if len(listed) == len(filled) and all(fragment.count == 1 for fragment in listed):
        return Runs(sorted(listed, key=lambda fragment: fragment.start))
    return filled[0] if len(filled) == 1 else Boxes(filled)


def boxes_of(fragments: Fragments) -> Sequence[Box]:
    """The boxes in which a tensor is stored; empty if it is stored as `Runs` or `Slices`."""
    if isinstance(fragments, Boxes):
        return fragments.parts
    return (fragments,) if isinstance(fragments, Box) else ()
