"""Tensors that are cut over several ranks: each slice as blocks of the complete tensor.

    whole    [ q q q q | k k | v v ]      three sub-parameters, each of which is cut in two
    slice 0  [ q q | k | v ]
    slice 1  [ q q | k | v ]

A `Piece` is a block that lies in a slice and in the complete tensor. `cut` gives the pieces of a
cut along one axis. `joined` turns the fragments of slices into fragments of the complete tensor. No
byte is read, and a slice may itself be partitioned by ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from msgspec import Struct

from ..grouping import by_key
from ..storage.fragments import Box, Fragments, boxes, boxes_of, range_of_box, tile


class Piece(Struct, frozen=True):
    """A block of elements that lies in the slice of `rank` and in the complete tensor.

    It has the shape `sizes`, and begins at `inside` in the slice and at `offsets` in the complete
    tensor.
    """

    rank: int
    inside: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slicing(Struct, frozen=True):
    """How one tensor is cut into slices, one for each rank.

        whole     the shape of the complete tensor
        slices    the shape of each rank's slice
        pieces    the blocks that the ranks hold; several ranks may hold the same block

    All shapes have the same number of axes. Those that `cut` returns are (outer, width, inner): the
    axes before the cut one are merged, and so are those behind it.
    """

    whole: tuple[int, ...]
    slices: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return prod(self.whole)

    def covers(self) -> bool:
        """Whether the blocks (`pieces`) fill the tensor and each slice, without gaps or overlaps.

        A block of the tensor that several ranks hold counts once.
        """
        if not tile(self.whole, [(piece.offsets, piece.sizes) for piece in self.chosen(0)]):
            return False
        return all(
            tile(shape, [(p.inside, p.sizes) for p in self.pieces if p.rank == rank])
            for rank, shape in enumerate(self.slices)
        )

    @property
    def copies(self) -> int:
        """The largest number of ranks that hold the same element."""
        return max(map(len, self._holders().values()), default=1)

    def chosen(self, copy: int) -> list[Piece]:
        """Selects pieces that contain each block of the complete tensor once.

        If several ranks hold a block, the piece of rank number `copy` among them is selected, or of
        the last one if there are fewer.
        """
        return [ranks[min(copy, len(ranks) - 1)] for ranks in self._holders().values()]

    def _holders(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]]:
        return by_key(((piece.offsets, piece.sizes), piece) for piece in self.pieces)


def replicated(shape: Sequence[int], ranks: int) -> Slicing:
    """Makes the slicing of a replicated tensor: every rank's slice is the complete tensor."""
    whole, at = tuple(shape), (0,) * len(shape)
    pieces = tuple(Piece(rank, at, at, whole) for rank in range(ranks))
    return Slicing(whole, (whole,) * ranks, pieces)


def cut(outer: int, inner: int, widths: Sequence[Sequence[int]]) -> Slicing:
    """Cuts tensors, viewed as (outer, width, inner), along their middle axis.

    `widths[j][r]` is the width of sub-parameter j in slice r. In the complete tensor the
    sub-parameters follow each other; each slice has its parts of the sub-parameters in the same
    order.
    """
    ranks = len(widths[0])
    totals = [sum(part[rank] for part in widths) for rank in range(ranks)]
    pieces = []
    inside = [0] * ranks
    at = 0
    for part in widths:
        for rank, width in enumerate(part):
            if width:
                sizes = outer, width, inner
                pieces.append(Piece(rank, (0, inside[rank], 0), (0, at, 0), sizes))
            inside[rank] += width
            at += width
    return Slicing(
        (outer, at, inner), tuple((outer, width, inner) for width in totals), tuple(pieces)
    )


def dealt(part: int, ranks: int) -> tuple[int, ...]:
    """Deals `part` elements out to ranks as evenly as possible: 7 over 3 ranks gives (3, 2, 2)."""
    return tuple(part // ranks + (rank < part % ranks) for rank in range(ranks))


def even(part: int, ranks: int) -> tuple[int, ...] | None:
    """The width of each rank's slice if `part` can be divided evenly among the ranks, else None."""
    return None if part % ranks else dealt(part, ranks)


def even_parts(parts: Sequence[int], ranks: int) -> list[tuple[int, ...]] | None:
    """Divides each sub-parameter evenly among ranks: a tuple of widths for each, or None.

    None if one of the sub-parameters cannot be divided evenly.
    """
    return None if any(part % ranks for part in parts) else [dealt(part, ranks) for part in parts]


def joined(
    slicing: Slicing, slices: Sequence[Fragments | None], size: int, copy: int = 0
) -> Fragments:
    """Locates the elements of the complete tensor in the files of its slices.

    An item of `slices` is None if that rank's slice is empty. If several ranks hold an element, the
    rank number `copy` among them supplies it. `size` is bytes per element.
    """
    by_rank = by_key((piece.rank, piece) for piece in slicing.chosen(copy))
    parts: list[Box] = []
    for rank, pieces in by_rank.items():
        fragments, shape = slices[rank], slicing.slices[rank]
        whole_slice = len(pieces) == 1 and shape == slicing.whole
        if whole_slice and len(by_rank) == 1 and fragments is not None:
            return fragments
        for box in boxes_in(fragments, shape, size):
            for piece in pieces:
                if (part := _placed(box, piece, slicing.whole)) is not None:
                    parts.append(part)
    return boxes(parts)


def boxes_in(fragments: Fragments | None, shape: Sequence[int], size: int) -> Iterator[Box]:
    """Converts a slice's fragments to boxes: blocks with an offset and a size along every axis.

    `shape` is the shape of the slice, `size` is bytes per element.
    """
    if fragments is None:
        return
    parts = boxes_of(fragments)
    if parts and all(part.whole == tuple(shape) for part in parts):
        yield from parts
        return
    at, numel = (0,) * len(shape), prod(shape)
    for fragment in fragments:
        for run in fragment.runs(0, numel):
            yield from range_of_box(shape, at, shape, run.start, run.stop, size, run.extent)


def _placed(box: Box, piece: Piece, whole: Sequence[int]) -> Box | None:
    """The part of `box` that lies in `piece`, as a block of the complete tensor; None if empty.

    `box` is a block of one rank's slice, `whole` the shape of the complete tensor.
    """
    low = [max(pair) for pair in zip(box.offsets, piece.inside, strict=True)]
    ends = zip(box.offsets, box.sizes, piece.inside, piece.sizes, strict=True)
    high = [min(a + length, b + size) for a, length, b, size in ends]
    sizes = [stop - start for start, stop in zip(low, high, strict=True)]
    if min(sizes) <= 0:
        return None
    first = box.first + sum(
        (start - begin) * stride
        for start, begin, stride in zip(low, box.offsets, box.strides, strict=True)
    )
    offsets = [
        place + start - begin
        for place, start, begin in zip(piece.offsets, low, piece.inside, strict=True)
    ]
    return Box(
        whole=whole,
        offsets=offsets,
        sizes=sizes,
        strides=box.strides,
        first=first,
        size=box.size,
        extent=box.extent,
    )
