"""Fuses and splits tensors, such as q, k and v, between Hugging Face and Megatron-Core.

A function gets one program's tensors as views, and returns the other program's tensors. It opens no
file. These are the packings (ways to fuse), with the tensors in Hugging Face and in Megatron-Core:

    same                     one tensor, equal in both programs
    vocabulary               one tensor, which may have padding rows in one program
    rows                     gate, up                 [gate; up]
    attention                q, k, v                  per group of heads: [q ... q, k, v]
    whole attention          [q; k; v]                per group of heads: [q ... q, k, v]
    turned                   (in, out)                (out, in), the transposed matrix
    turned whole attention   (in, [q; k; v])          per group of heads, and transposed
    experts                  (experts, ...)           one tensor for each expert
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry
from ..views import View, cut, flattened, joined, parted, split, swapped, unstacked, view_of, zeros
from .rules import HUGGING_FACE, MEGATRON
from .sizes import Sizes

Views = Sequence[View]


class Misfit(Exception):
    """The error for tensors whose shapes do not fit a packing (a way to fuse tensors).

    `needs` lists sizes that are needed but unknown, such as `heads`.
    """

    def __init__(self, message: str, needs: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.needs = tuple(needs)


def _join_rows(views: Views, _: Sizes) -> Views:
    if len({view.shape for view in views}) > 1 or not views[0].shape:
        raise Misfit(f"gate and up have the shapes {_listed(views)}, which are not the same")
    return [joined(views, 0)]


def _split_rows(views: Views, _: Sizes) -> Views:
    (view,) = views
    if not view.shape or not view.shape[0] or view.shape[0] % 2:
        raise Misfit(
            f"the rows of {_listed(views)} cannot be cut into equal halves for gate and up"
        )
    return cut(view, 0, view.shape[0] // 2)


def _join_attention(views: Views, sizes: Sizes) -> Views:
    query, key, value = (view.shape for view in views)
    if not query or key != value or query[1:] != key[1:]:
        raise Misfit(
            f"q, k and v have the shapes {_listed(views)}, but k and v must have the same shape, "
            "and q may differ from them only in the number of rows"
        )
    groups = _groups([query[0], key[0], value[0]], sizes)
    return [flattened(joined([split(view, 0, groups) for view in views], 1), 0)]


def _split_attention(views: Views, sizes: Sizes) -> Views:
    (view,) = views
    rows = _rows_of_heads(view.shape, sizes)
    groups = _groups(rows, sizes)
    parts = parted(split(view, 0, groups), 1, [count // groups for count in rows])
    return [flattened(part, 0) for part in parts]


def _join_whole_attention(views: Views, sizes: Sizes) -> Views:
    (view,) = views
    return _join_attention(parted(view, 0, _rows_of_heads(view.shape, sizes)), sizes)


def _split_whole_attention(views: Views, sizes: Sizes) -> Views:
    parts = _split_attention(views, sizes)
    return [joined([view_of(part.fragments, part.shape, part.size) for part in parts], 0)]


def _turn(views: Views, _: Sizes) -> Views:
    (view,) = views
    if len(view.shape) != 2:
        raise Misfit(f"the shape {_listed(views)} is not that of a matrix")
    return [swapped(view, 0, 1)]


def _split_experts(views: Views, _: Sizes) -> Views:
    (view,) = views
    if len(view.shape) != 3 or 0 in view.shape:
        raise Misfit(f"the shape {_listed(views)} is not that of one stacked matrix per expert")
    return unstacked(view, 0)


def _join_experts(views: Views, _: Sizes) -> Views:
    shapes = {view.shape for view in views}
    if len(shapes) > 1 or len(views[0].shape) != 2:
        listed = " and ".join(str([*shape]) for shape in sorted(shapes))
        raise Misfit(f"experts must be matrices of the same shape, but have the shapes {listed}")
    return [split(joined(views, 0), 0, len(views))]


def _drop_rows(views: Views, sizes: Sizes) -> Views:
    (view,), rows = views, sizes.vocab_size
    if rows is None or view.shape[:1] == (rows,):
        return views
    if not view.shape or rows > view.shape[0]:
        raise Misfit(
            f"the shape {_listed(views)} has fewer rows than the vocabulary, which has {rows}"
        )
    return parted(view, 0, [rows, view.shape[0] - rows])[:1]


def _add_rows(views: Views, sizes: Sizes) -> Views:
    (view,), rows = views, sizes.vocab_size
    if rows is None or view.shape[:1] == (rows,):
        return views
    if not view.shape or rows < view.shape[0]:
        raise Misfit(f"the shape {_listed(views)} has more rows than vocab_size={rows}")
    return [joined([view, zeros((rows - view.shape[0], *view.shape[1:]), view.size)], 0)]


LAYOUTS: Mapping[str, Mapping[str, Callable[[Views, Sizes], Views]]] = {
    "same": dict.fromkeys((MEGATRON, HUGGING_FACE), lambda views, _: views),
    "vocabulary": {MEGATRON: _add_rows, HUGGING_FACE: _drop_rows},
    "rows": {MEGATRON: _join_rows, HUGGING_FACE: _split_rows},
    "attention": {MEGATRON: _join_attention, HUGGING_FACE: _split_attention},
    "whole attention": {MEGATRON: _join_whole_attention, HUGGING_FACE: _split_whole_attention},
    "turned": {MEGATRON: _turn, HUGGING_FACE: _turn},
    "turned whole attention": {
        MEGATRON: lambda views, sizes: _join_whole_attention(_turn(views, sizes), sizes),
        HUGGING_FACE: lambda views, sizes: _turn(_split_whole_attention(views, sizes), sizes),
    },
    "experts": {MEGATRON: _split_experts, HUGGING_FACE: _join_experts},
}
"""The functions that convert tensors: by packing (way to fuse them), and by target program."""


def with_rows(entry: Entry, rows: int) -> Entry:
    """Changes a vocabulary tensor to `rows` rows: adds rows of zeros, or removes padding rows."""
    side = MEGATRON if rows > entry.shape[0] else HUGGING_FACE
    whole = view_of(entry.fragments, entry.shape, SIZES[entry.dtype])
    (view,) = LAYOUTS["vocabulary"][side]([whole], Sizes(vocab_size=rows))
    return Entry(*entry.key, entry.dtype, view.shape, view.fragments)


def _listed(views: Views) -> str:
    return " and ".join(str(list(view.shape)) for view in views)


def _rows_of_heads(shape: Sequence[int], sizes: Sizes) -> list[int]:
    """The numbers of rows of q, k and v in a fused tensor; raises Misfit if a size is unknown."""
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
    """The number of query groups in fused attention weights: one per key-value head.

    `rows` are the numbers of rows of q, k and v. Raises Misfit if they cannot be divided evenly.
    """
    if sizes.kv_heads is None:
        raise Misfit("", ["kv_heads"])
    query, key, _ = rows
    groups = sizes.kv_heads
    fits = not key % groups and not query % groups and not query % max(1, key // groups)
    if not fits or (sizes.heads is not None and query * groups != key * sizes.heads):
        heads = "" if sizes.heads is None else f"{sizes.heads} heads and "
        raise Misfit(
            f"{query} rows of q and {key} rows of k do not match {heads}{groups} key-value heads"
        )
    return groups
