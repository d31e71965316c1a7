"""Where are the elements of several tensors, if another program keeps them as one?

    rows        [ a | b ]                  one after another, along the first axis
    dealt       [ a a b | a a b ]          dealt to groups, each of which has a share of every part
    turned      the two axes are swapped

`packing` says it as a `Slicing`: its slices are the parts, its whole is the packed tensor. The
other functions turn the fragments of one side into those of the other. No byte is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.fragments import Box, Fragments, boxes
from ..core.slicing import Piece, Slicing, boxes_of, joined


def packing(rows: Sequence[int], groups: int, inner: int) -> Slicing:
    """Parts that have `rows` each, of `inner` elements, dealt to `groups`; one group: rows.

    Every number of rows must be a multiple of `groups`.
    """
    assert all(not count % groups for count in rows), (rows, groups)
    pieces, at = [], 0
    for group in range(groups):
        for part, count in enumerate(rows):
            share = count // groups
            pieces.append(Piece(part, (group * share, 0), (at, 0), (share, inner)))
            at += share
    return Slicing((at, inner), tuple((count, inner) for count in rows), tuple(pieces))


def packed(slicing: Slicing, parts: Sequence[Fragments], size: int) -> Fragments:
    """The fragments of the packed tensor; `size` is bytes per element."""
    return joined(slicing, parts, size)


def unpacked(slicing: Slicing, whole: Fragments, size: int) -> list[Fragments]:
    """The fragments of every part; `size` is bytes per element."""
    parts = []
    for number, shape in enumerate(slicing.slices):
        pieces = tuple(
            Piece(0, piece.offsets, piece.inside, piece.sizes)
            for piece in slicing.pieces
            if piece.rank == number
        )
        parts.append(joined(Slicing(shape, (slicing.whole,), pieces), [whole], size))
    return parts


def turned(fragments: Fragments, shape: Sequence[int], size: int) -> Fragments:
    """The fragments of a tensor of two axes, for the same tensor with its axes swapped."""
    assert len(shape) == 2, shape
    return boxes(
        [
            Box(
                box.whole[::-1],
                box.offsets[::-1],
                box.sizes[::-1],
                box.strides[::-1],
                box.first,
                box.size,
                box.extent,
            )
            for box in boxes_of(fragments, shape, size)
        ]
    )
