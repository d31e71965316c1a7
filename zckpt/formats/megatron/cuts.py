"""How do tensor ranks cut the parameters of a GPTModel? No file of the older kind says it.

    column-parallel    rows: embeddings, output layer, linear_qkv, linear_fc1; their biases too
    row-parallel       columns: linear_proj, linear_fc2; every rank has the whole bias
    others             every rank has all: norms, positions, the router

The rows of a gated `linear_fc1` are [gate; up] on every rank, so the whole tensor has the gates of
all ranks first. It is gated if it has twice as many rows as `linear_fc2` has columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from ...core.slicing import Slicing, cut, even, replicated
from ...errors import UnsupportedCheckpoint
from .stages import HINT

BY_ROWS = re.compile(r".*\b(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
BY_COLUMNS = re.compile(r".*\b(linear_proj|linear_fc2)\.weight")
WHOLE = re.compile(
    r".*(\b(linear_proj|linear_fc2)\.bias|layernorm\.(weight|bias)|\blayer_norm_(weight|bias)|\bposition_embeddings\.weight"
    r"|\brouter\.\w+|\bgate_weight)"
)


def cut_of(name: str, shapes: Mapping[str, tuple[int, ...]], tp: int) -> Slicing:
    """How `tp` ranks cut a parameter; `shapes` are those of one rank's parameters.

    Raises UnsupportedCheckpoint for a module that is not a GPTModel's, unless there is one rank.
    """
    shape = shapes[name]
    if tp == 1 or WHOLE.fullmatch(name):
        return replicated(shape, tp)
    if BY_ROWS.fullmatch(name):
        parts = 2 if is_gated(name, shapes) else 1
        widths = [even(shape[0] // parts * tp, tp) or ()] * parts
        return cut(1, prod(shape[1:]), widths)
    if BY_COLUMNS.fullmatch(name) and len(shape) == 2:
        return cut(shape[0], 1, [even(shape[1] * tp, tp) or ()])
    raise UnsupportedCheckpoint(
        f"how tensor ranks cut {name} is not known: no module of a GPTModel is called so",
        hint="Megatron-Core's --ckpt-format torch_dist says how parameters are cut",
    )


def whole_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """The shape of the whole parameter, from that of a rank's part."""
    if tp == 1 or WHOLE.fullmatch(name):
        return shape
    if BY_ROWS.fullmatch(name):
        return (shape[0] * tp, *shape[1:])
    return (shape[0], shape[1] * tp)


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a `linear_fc1` has gates: twice as many rows as `linear_fc2` behind it has columns.

    Raises UnsupportedCheckpoint if neither fits.
    """
    if "linear_fc1" not in name:
        return False
    behind = shapes.get(f"{name.rpartition('linear_fc1')[0]}linear_fc2.weight")
    rows, columns = shapes[name][0], behind[1] if behind is not None and len(behind) == 2 else 0
    if rows not in (columns, 2 * columns):
        raise UnsupportedCheckpoint(
            f"{name} has {rows} rows on a rank, and linear_fc2 behind it {columns} columns",
            hint=HINT,
        )
    return rows == 2 * columns
