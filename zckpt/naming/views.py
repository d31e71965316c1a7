"""Views of tensors in files: slicing, joining, transposing and reordering without reading a byte.

A view has a shape, and boxes: strided slices of the files' bytes that contain its elements. An axis
may be folded into several lengths (like a reshape), and these can be permuted. So the rows of two
halves can be interleaved without splitting a box into single rows:

    axis of 6 rows         [ 0 1 2 3 4 5 ]
    folded into (2, 3)     [[0 1 2] [3 4 5]]
    permuted to (3, 2)     [[0 3] [1 4] [2 5]]     rows 0 3 1 4 2 5
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TypeVar

from msgspec import Struct

from ..core.checkpoint.slicing import boxes_in
from ..core.storage.fragments import (
    ZEROS,
    Box,
    Extent,
    Fragments,
    boxes,
    corners_of_range,
    row_major,
    strided,
)
from ..errors import listed

T = TypeVar("T")

Lengths = tuple[int, ...]


class View(Struct, frozen=True):
    """A tensor as boxes (strided slices) of bytes in files.

    `axes` has a tuple for each axis. For an axis of 6 it is (6,) or, if the axis was folded as by
    a reshape, (2, 3). `size` is the number of bytes of an element.
    """

    axes: tuple[Lengths, ...]
    boxes: tuple[Box, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(prod, self.axes))

    @property
    def fragments(self) -> Fragments:
        """The tensor as fragments of a manifest (byte ranges of files), in row-major order."""
        return boxes(self.boxes)

    def place(self, axis: int) -> int:
        """The index of an axis's first length in the list of all axes' lengths.

        A folded axis has several lengths. For `axes` ((6,), (2, 3), (4,)), the list is 6, 2, 3, 4,
        and the result for axis 2 is 3.
        """
        return sum(len(lengths) for lengths in self.axes[:axis])


def view_of(fragments: Fragments, shape: Sequence[int], size: int) -> View:
    """Makes a view of a full tensor from its byte ranges in files; elements have `size` bytes."""
    axes = tuple((length,) for length in shape)
    return View(axes, tuple(boxes_in(fragments, shape, size)), size)


def zeros(shape: Sequence[int], size: int) -> View:
    """A view of a tensor of zeros, which needs no bytes of a file."""
    extent = Extent(ZEROS, 0, prod(shape) * size)
    box = strided(shape, strides=row_major(shape), first=0, size=size, extent=extent)
    return View(tuple((length,) for length in shape), (box,), size)


def cut(view: View, axis: int, length: int) -> list[View]:
    """Cuts a view along an axis into parts of `length`; the last part may be shorter.

    The axis must not be folded: `view.axes` has one length for it, such as (6,), not (2, 3).
    """
    whole = view.shape[axis]
    return parted(view, axis, [min(length, whole - start) for start in range(0, whole, length)])


def parted(view: View, axis: int, lengths: Sequence[int]) -> list[View]:
    """Cuts a view along an axis into parts of these `lengths`, whose sum is the axis's length.

    The axis must not be folded: `view.axes` has one length for it, such as (6,), not (2, 3).
    """
    place = view.place(axis)
    starts = list(accumulate(lengths, initial=0))[:-1]
    parts: list[list[Box]] = [[] for _ in starts]
    for box in view.boxes:
        first, stop = box.offsets[place], box.offsets[place] + box.sizes[place]
        for number in range(bisect_right(starts, first) - 1, bisect_left(starts, stop)):
            start, length = starts[number], lengths[number]
            low, high = max(first, start), min(stop, start + length)
            if low < high:
                parts[number].append(
                    _box(
                        box,
                        _with_replaced(box.whole, place, length),
                        _with_replaced(box.offsets, place, low - start),
                        _with_replaced(box.sizes, place, high - low),
                        box.strides,
                        later=(low - first) * box.strides[place],
                    )
                )
    return [
        View(_with_replaced(view.axes, axis, (length,)), tuple(part), view.size)
        for length, part in zip(lengths, parts, strict=True)
    ]


def unstacked(view: View, axis: int) -> list[View]:
    """Returns one view for each index along an axis, without that axis (like torch.unbind)."""
    place = view.place(axis)
    parts = cut(view, axis, 1)
    inner = [
        [_with_each_changed(box, lambda values: _with_replaced(values, place)) for box in p.boxes]
        for p in parts
    ]
    axes = _with_replaced(view.axes, axis)
    return [View(axes, tuple(own), view.size) for own in inner]


def joined(views: Sequence[View], axis: int) -> View:
    """Concatenates tensors along an axis.

    If one tensor's axis is folded, such as 6 into (2, 3), all are folded in the same way: 12 into
    (4, 3), and the result into (6, 3). Raises ValueError if the shapes do not fit.
    """
    finest = max((view.axes[axis] for view in views), key=len)
    views = [
        view if len(view.axes[axis]) == len(finest) else folded(view, axis, finest[1:])
        for view in views
    ]
    first, place = views[0], views[0].place(axis)
    if len({_with_replaced(view.axes, axis, view.axes[axis][1:]) for view in views}) > 1:
        shapes = listed([list(shape) for shape in dict.fromkeys(view.shape for view in views)], 4)
        raise ValueError(
            f"tensors of the shapes {shapes} cannot be joined along axis {axis}, because they "
            "differ along another axis than this one"
        )
    length = sum(view.axes[axis][0] for view in views)
    parts: list[Box] = []
    start = 0
    for view in views:
        for box in view.boxes:
            offsets = _with_replaced(box.offsets, place, box.offsets[place] + start)
            whole = _with_replaced(box.whole, place, length)
            parts.append(_box(box, whole, offsets, box.sizes, box.strides))
        start += view.axes[axis][0]
    return View(_with_replaced(first.axes, axis, (length, *finest[1:])), tuple(parts), first.size)


def swapped(view: View, one: int, other: int) -> View:
    """The tensor with two axes exchanged."""
    order = list(range(len(view.axes)))
    order[one], order[other] = order[other], order[one]
    places = [view.place(axis) + number for axis in order for number in range(len(view.axes[axis]))]
    return _ordered(view, tuple(view.axes[axis] for axis in order), places)


def folded(view: View, axis: int, inner: Sequence[int]) -> View:
    """Folds an axis into several lengths, as a reshape does; `inner` are all lengths but the first.

    Raises ValueError if the axis's length is no multiple of the product of `inner`.
    """
    ((whole,), place) = view.axes[axis], view.place(axis)
    lengths = (whole // max(1, prod(inner)), *inner)
    if prod(lengths) != whole:
        raise ValueError(f"{whole} rows are no multiple of {prod(inner)}")
    parts = [part for box in view.boxes for part in _folded(box, place, lengths)]
    return View(_with_replaced(view.axes, axis, lengths), tuple(parts), view.size)


def dealt(view: View, axis: int, order: Sequence[int]) -> View:
    """Reorders the elements along an axis that was folded into several lengths.

    The lengths are transposed: `order` has the old index of each. With `order` (1, 0), lengths
    (2, 3) become (3, 2), and rows 0 1 2 3 4 5 become 0 3 1 4 2 5.
    """
    lengths, place = view.axes[axis], view.place(axis)
    places = [*range(sum(map(len, view.axes)))]
    places[place : place + len(lengths)] = [place + number for number in order]
    axes = _with_replaced(view.axes, axis, tuple(lengths[number] for number in order))
    return _ordered(view, axes, places)


def split(view: View, axis: int, count: int) -> View:
    """Splits an axis into two: an axis of 6 with `count` 2 becomes axes of 2 and 3."""
    inner = folded(view, axis, (view.shape[axis] // count,))
    outer, length = inner.axes[axis]
    return View(_with_replaced(inner.axes, axis, (outer,), (length,)), inner.boxes, view.size)


def flattened(view: View, axis: int) -> View:
    """Merges an axis and the axis after it into one axis."""
    together = (*view.axes[axis], *view.axes[axis + 1])
    return View((*view.axes[:axis], together, *view.axes[axis + 2 :]), view.boxes, view.size)


def _ordered(view: View, axes: tuple[Lengths, ...], places: Sequence[int]) -> View:
    """Reorders the axes of a view, or the lengths of a folded axis; the result has the `axes`.

    An axis of 6 rows may be folded into lengths such as (2, 3). `places` has, for each length in
    the new order, its index in the old list of all axes' lengths.
    """

    def order(values: Lengths) -> Lengths:
        return tuple(values[place] for place in places)

    return View(axes, tuple(_with_each_changed(box, order) for box in view.boxes), view.size)


def _folded(box: Box, place: int, lengths: Lengths) -> Iterator[Box]:
    """Folds one axis of a box: its length at index `place` becomes several `lengths`.

    Yields several boxes if the result is not rectangular.
    """
    steps = row_major(lengths)
    start, stride = box.offsets[place], box.strides[place]
    at = start
    for corner, sizes in corners_of_range(lengths, start, start + box.sizes[place]):
        yield _box(
            box,
            _with_replaced(box.whole, place, *lengths),
            _with_replaced(box.offsets, place, *corner),
            _with_replaced(box.sizes, place, *sizes),
            _with_replaced(box.strides, place, *(step * stride for step in steps)),
            later=(at - start) * stride,
        )
        at += prod(sizes)


def _box(
    box: Box,
    whole: Lengths,
    offsets: Lengths,
    sizes: Lengths,
    strides: Lengths,
    *,
    later: int = 0,
) -> Box:
    """Makes a box in the same byte range of a file as `box`, with another place in a tensor.

    Its first element is `later` elements after the first one of `box` in the file. The other
    arguments are fields of `Box`.
    """
    return Box(
        whole=whole,
        offsets=offsets,
        sizes=sizes,
        strides=strides,
        first=box.first + later,
        size=box.size,
        extent=box.extent,
    )


def _with_each_changed(box: Box, change: Callable[[Lengths], Lengths]) -> Box:
    return _box(box, *map(change, (box.whole, box.offsets, box.sizes, box.strides)))


def _with_replaced(values: tuple[T, ...], place: int, *new: T) -> tuple[T, ...]:
    return (*values[:place], *new, *values[place + 1 :])
