"""Which shapes and which fragments do tensors have once they are packed or unpacked?

A layout gets the shapes of the tensors of one side. It gives the shapes of the other side, and a
function for their fragments. It opens no file. These are the packings:

    same                     one tensor that both have alike
    vocabulary               the same; rows that only pad the vocabulary go or come
    rows                     gate, up                 [gate; up]
    attention                q, k, v                  per group of heads: [q ... q, k, v]
    whole attention          [q; k; v]                the same
    turned                   (in, out)                (out, in)
    turned whole attention   (in, [q; k; v])          the same, turned
    experts                  (experts, ...)           one tensor for each expert
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ...core.fragments import ZEROS, Extent, Fragments, solid
from ...core.slicing import Piece, Slicing, joined
from ..packing import packed, packing, turned, unpacked
from .rules import HUGGING_FACE, MEGATRON
from .sizes import Sizes

Shape = tuple[int, ...]
Move = Callable[[Sequence[Fragments], int], list[Fragments]]
Layout = tuple[list[Shape], Move]


class Misfit(Exception):
    """Shapes that cannot be those of the packing, in a sentence; `needs` are sizes not stated."""

    def __init__(self, message: str, needs: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.needs = tuple(needs)


def _same(shapes: Sequence[Shape], _: Sizes) -> Layout:
    return list(shapes), lambda parts, size: list(parts)


def _join_rows(shapes: Sequence[Shape], _: Sizes) -> Layout:
    if len(set(shapes)) > 1 or not shapes[0]:
        raise Misfit(f"gate and up have the shapes {_listed(shapes)}, which are not the same")
    return _joining(packing([shape[0] for shape in shapes], 1, _inner(shapes[0])), shapes[0])


def _split_rows(shapes: Sequence[Shape], _: Sizes) -> Layout:
    (shape,) = shapes
    if not shape or shape[0] % 2:
        raise Misfit(f"{_listed(shapes)} does not have the rows of gate and up: two equal halves")
    return _splitting(packing([shape[0] // 2] * 2, 1, _inner(shape)), shape)


def _join_attention(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    rows, inner = _rows(shapes)
    return _joining(packing(rows, _groups(rows, sizes), inner), shapes[0])


def _split_attention(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    (shape,) = shapes
    rows = _rows_of_heads(shape, sizes)
    return _splitting(packing(rows, _groups(rows, sizes), _inner(shape)), shape)


def _join_whole_attention(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    (shape,) = shapes
    rows = _rows_of_heads(shape, sizes)
    apart = packing(rows, 1, _inner(shape))
    dealt = packing(rows, _groups(rows, sizes), _inner(shape))
    return [shape], lambda parts, size: [packed(dealt, unpacked(apart, parts[0], size), size)]


def _split_whole_attention(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    (shape,) = shapes
    rows = _rows_of_heads(shape, sizes)
    apart = packing(rows, 1, _inner(shape))
    dealt = packing(rows, _groups(rows, sizes), _inner(shape))
    return [shape], lambda parts, size: [packed(apart, unpacked(dealt, parts[0], size), size)]


def _turn(shapes: Sequence[Shape], _: Sizes) -> Layout:
    (shape,) = shapes
    if len(shape) != 2:
        raise Misfit(f"{_listed(shapes)} is not a matrix")
    return [shape[::-1]], lambda parts, size: [turned(parts[0], shape, size)]


def _turn_then_join(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    between, turn = _turn(shapes, sizes)
    result, join = _join_whole_attention(between, sizes)
    return result, lambda parts, size: join(turn(parts, size), size)


def _split_then_turn(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    between, split = _split_whole_attention(shapes, sizes)
    result, turn = _turn(between, sizes)
    return result, lambda parts, size: turn(split(parts, size), size)


def _split_experts(shapes: Sequence[Shape], _: Sizes) -> Layout:
    (shape,) = shapes
    if len(shape) != 3 or not prod(shape):
        raise Misfit(f"{_listed(shapes)} is not a stack of the experts' matrices")
    return _splitting(packing([shape[1]] * shape[0], 1, shape[2]), shape[1:])


def _join_experts(shapes: Sequence[Shape], _: Sizes) -> Layout:
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise Misfit(f"experts have the shapes {_listed(sorted(set(shapes)))}")
    slicing = packing([shape[0] for shape in shapes], 1, shapes[0][1])
    whole = (len(shapes), *shapes[0])
    return [whole], lambda parts, size: [packed(slicing, parts, size)]


def _drop_rows(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    (shape,) = shapes
    rows = sizes.vocab_size
    if rows is None or shape[:1] == (rows,):
        return _same(shapes, sizes)
    if not shape or rows > shape[0]:
        raise Misfit(f"{_listed(shapes)} has fewer rows than the vocabulary, which has {rows}")
    inner = _inner(shape)
    piece = Piece(0, (0, 0), (0, 0), (rows, inner))
    slicing = Slicing((rows, inner), ((shape[0], inner),), (piece,))
    return [(rows, *shape[1:])], lambda parts, size: [joined(slicing, parts, size)]


def _add_rows(shapes: Sequence[Shape], sizes: Sizes) -> Layout:
    (shape,) = shapes
    rows = sizes.vocab_size
    if rows is None or shape[:1] == (rows,):
        return _same(shapes, sizes)
    if not shape or rows < shape[0]:
        raise Misfit(f"{_listed(shapes)} has more rows than vocab_size={rows}")
    slicing = packing([shape[0], rows - shape[0]], 1, _inner(shape))
    more = (rows - shape[0]) * _inner(shape)

    def move(parts: Sequence[Fragments], size: int) -> list[Fragments]:
        zeros = solid(more, Extent(ZEROS, 0, more * size))
        return [packed(slicing, [parts[0], zeros], size)]

    return [(rows, *shape[1:])], move


LAYOUTS: Mapping[tuple[str, str], Callable[[Sequence[Shape], Sizes], Layout]] = {
    ("same", MEGATRON): _same,
    ("same", HUGGING_FACE): _same,
    ("vocabulary", MEGATRON): _add_rows,
    ("vocabulary", HUGGING_FACE): _drop_rows,
    ("rows", MEGATRON): _join_rows,
    ("rows", HUGGING_FACE): _split_rows,
    ("attention", MEGATRON): _join_attention,
    ("attention", HUGGING_FACE): _split_attention,
    ("whole attention", MEGATRON): _join_whole_attention,
    ("whole attention", HUGGING_FACE): _split_whole_attention,
    ("turned", MEGATRON): _turn,
    ("turned", HUGGING_FACE): _turn,
    ("turned whole attention", MEGATRON): _turn_then_join,
    ("turned whole attention", HUGGING_FACE): _split_then_turn,
    ("experts", MEGATRON): _split_experts,
    ("experts", HUGGING_FACE): _join_experts,
}
"""By the packing, and the program that the target is for."""


# -- shapes


def _listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


def _inner(shape: Shape) -> int:
    return prod(shape[1:])


def _joining(slicing: Slicing, shape: Shape) -> Layout:
    whole = (slicing.whole[0], *shape[1:])
    return [whole], lambda parts, size: [packed(slicing, parts, size)]


def _splitting(slicing: Slicing, shape: Shape) -> Layout:
    shapes = [(rows, *shape[1:]) for rows, _ in slicing.slices]
    return shapes, lambda parts, size: unpacked(slicing, parts[0], size)


def _rows(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """The rows of q, k and v, and the elements of one."""
    first, key, value = shapes
    if not first or key != value or first[1:] != key[1:]:
        raise Misfit(f"q, k and v have the shapes {_listed(shapes)}")
    return [shape[0] for shape in shapes], _inner(first)


def _rows_of_heads(shape: Shape, sizes: Sizes) -> list[int]:
    """The rows of q, k and v in a packed tensor; raises Misfit."""
    if sizes.heads is None or sizes.kv_heads is None:
        names = ("heads", "kv_heads")
        raise Misfit("", [name for name in names if getattr(sizes, name) is None])
    heads = sizes.heads + 2 * sizes.kv_heads
    if not shape or shape[0] % heads:
        raise Misfit(
            f"the {shape[0] if shape else 1} rows cannot be those of {sizes.heads} heads and twice "
            f"{sizes.kv_heads} key-value heads"
        )
    size = shape[0] // heads
    return [sizes.heads * size, sizes.kv_heads * size, sizes.kv_heads * size]


def _groups(rows: Sequence[int], sizes: Sizes) -> int:
    """The number of key-value heads, to which q, k and v are dealt; raises Misfit."""
    if sizes.kv_heads is None:
        raise Misfit("", ["kv_heads"])
    query, key, _ = rows
    groups = sizes.kv_heads
    fits = not key % groups and not query % groups and not query % max(1, key // groups)
    if not fits or (sizes.heads is not None and query * groups != key * sizes.heads):
        heads = "" if sizes.heads is None else f"{sizes.heads} heads and "
        raise Misfit(
            f"{query} rows of q and {key} of k cannot be those of {heads}{groups} key-value heads"
        )
    return groups
