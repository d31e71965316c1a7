"""How tensor-parallel ranks cut the parameters of a GPTModel in `mp_rank_*` directories.

No file of these directories states how, so this module has a rule for each kind of module.

    column-parallel    rows: embeddings, output layer, linear_qkv, linear_fc1; their biases too;
                       linear_q_proj, linear_q_up_proj, linear_kv_up_proj of latent attention
    row-parallel       columns: linear_proj, linear_fc2; every rank has the full bias
    others             every rank has all: norms, positions, the router

Specs differ in linear_q_down_proj and linear_kv_down_proj: the arguments state their full number of
rows. The rows of a gated `linear_fc1` are [gate; up] on every rank, so the full tensor has the
gates of all ranks first. A `linear_fc1` is gated if it has twice as many rows as `linear_fc2` has
columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ....core.checkpoint.placement import Cut, Placement, Replicated, Shapes, Sliced
from ....core.checkpoint.slicing import replicated
from ....errors import UnsupportedCheckpoint
from ....naming.tensor_rules import TensorRule, TensorRules, decide
from ..common_state import WEIGHTS_ONLY
from ..manifest import size_of

BY_ROWS = re.compile(
    r".*\b(word_embeddings|output_layer|eh_proj|linear_(?:qkv|q_proj|q_up_proj|kv_up_proj|fc1))"
    r"\.(weight|bias)"
)
BY_COLUMNS = re.compile(r".*\b(linear_proj|linear_fc2)\.weight")
WHOLE = re.compile(
    r".*(\b(linear_proj|linear_fc2)\.bias|layernorm\.(weight|bias)|\blayer_norm_(weight|bias)"
    r"|\bposition_embeddings\.weight|\brouter\.\w+|\bgate_weight|\b[eh]norm\.(weight|bias))"
)
BY_SPEC = re.compile(r".*\blinear_(?P<kind>q|kv)_down_proj\.(weight|bias)")


class ModuleRules(Struct, frozen=True):
    """The rules by which tensor ranks cut the parameters of a GPTModel, for one model.

    `shapes` are the shapes of one rank's parameters, `args` the run's arguments.
    """

    shapes: Mapping[str, tuple[int, ...]]
    args: Mapping[str, Any]

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        """How tensor ranks cut a parameter; None for a module that a GPTModel does not have.

        `shapes` has the parameter's shape on every rank.
        """
        placement: Placement | None = None
        if match := BY_SPEC.fullmatch(name):
            whole, rows = self._latent_rows(match["kind"]), self.shapes[name][0]
            if whole == rows:
                placement = Replicated()
            elif whole == rows * len(shapes):
                placement = Cut(0)
        elif WHOLE.fullmatch(name):
            placement = Replicated()
        elif BY_ROWS.fullmatch(name):
            placement = Cut(0, equal=2 if is_gated(name, self.shapes) else 0)
        elif BY_COLUMNS.fullmatch(name) and len(self.shapes[name]) == 2:
            placement = Cut(1)
        return None if placement is None else TensorRule(name, placement).sliced(name, shapes)

    def _latent_rows(self, kind: str) -> int | None:
        """The number of rows of a full linear_q_down_proj or linear_kv_down_proj.

        None if the arguments do not state it.
        """
        rank = size_of(self.args, f"{kind}_lora_rank")
        positions = size_of(self.args, "qk_pos_emb_head_dim") if kind == "kv" else 0
        return None if rank is None or positions is None else rank + positions


def cuts_of(
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    tp: int,
    args: Mapping[str, Any],
    given: TensorRules | None,
) -> dict[str, Sliced]:
    """How `tp` tensor ranks cut each parameter, by name; `shapes` are the shapes on a rank.

    `given` are the rules of --tp-rules, which come first. Raises MissingData for modules that no
    rule covers, and UnsupportedCheckpoint if a given rule makes a parameter the sum of the ranks'
    tensors.
    """
    if tp == 1:
        return {
            name: Sliced(shape, replicated(shape, 1), Replicated())
            for name, shape in shapes.items()
        }
    rules: list[TensorRules] = [ModuleRules(shapes, args)]
    if given is not None:
        rules.insert(0, given)
    decided = decide(folder, {name: [shape] * tp for name, shape in shapes.items()}, rules, tp)
    for name, sliced in decided.items():
        if sliced.placement.is_sum:
            raise UnsupportedCheckpoint(
                "grid-unsupported",
                f"{folder}: --tp-rules makes {name} the sum of the tensor ranks' values, which "
                "zckpt does not compute",
                hint=f"give another rule for {name} in --tp-rules",
                file=folder,
                subject=name,
            )
    return decided


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a `linear_fc1` is gated: it has twice as many rows as `linear_fc2` has columns.

    False for other parameters. Raises UnsupportedCheckpoint if its rows are neither once nor twice
    the number of columns.
    """
    if "linear_fc1" not in name:
        return False
    behind = shapes.get(f"{name.rpartition('linear_fc1')[0]}linear_fc2.weight")
    rows, columns = shapes[name][0], behind[1] if behind is not None and len(behind) == 2 else 0
    if rows not in (columns, 2 * columns):
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{name} has {rows} rows on a rank, but its linear_fc2.weight has {columns} columns: "
            "zckpt expected once or twice as many rows",
            hint=WEIGHTS_ONLY,
            subject=name,
        )
    return rows == 2 * columns
