"""What do optimizer files hold that DeepSpeed's engine does not write?

A program may put it there, or an optimizer whose `state_dict` has more than torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.inert import alike
from ...core.manifest import Entry, Unread
from ...core.states import BESIDE_STATE, OF_NO_GROUP
from ..strangers import Stranger, is_plain, sorted_out
from .states import FLAT_MASTERS, WHOLE_MASTERS, EngineStates, wrapper_of

OF_BASE = frozenset(("state", "param_groups"))
"""What the state of a torch optimizer has."""
OF_ENGINE = OF_BASE | {
    *("base_optimizer_state", "base_optimizer_state_step", "optimizer_state_dict"),
    *("single_partition_of_fp32_groups", "fp32_flat_groups", FLAT_MASTERS, WHOLE_MASTERS),
    *("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"),
    *("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
    *("zero_stage", "partition_count", "group_paddings", "groups_padding"),
    *("param_alignment_paddings", "param_slice_mappings", "ds_zero_partition_groups"),
    "universal_checkpoint_info",
    *("param_shapes", "ds_config", "ds_version"),
}
"""What the engine's wrappers of optimizers write (0.5.10 to 0.19.8); a converter leaves some."""
OF_ZCKPT = frozenset(("members", "other"))
"""What the reader adds in stage 0; keys that begin with `zckpt` are in files of zckpt's."""


def strangers_of(ranks: EngineStates) -> tuple[dict[str, Any], list[Unread]]:
    """The numbers of no parameter by their places, and the states that are not read.

    Each has the values of all ranks, unless they are one number.
    """

    def keep(values: Any, path: str, tensors: dict[str, Entry]) -> Any:
        return [
            file.kept(value, f"{path}.{rank}", tensors)
            for rank, (value, file) in enumerate(zip(values, ranks.optimizers, strict=True))
        ]

    return sorted_out(_strangers(ranks), keep)


def _strangers(ranks: EngineStates) -> Iterator[Stranger]:
    known = set(range(len(ranks.param_shapes())))
    for group in ranks.bases[0].get("param_groups") or ():
        known |= {*(group.get("params") or ())}
    states = [own if isinstance(own := base.get("state"), dict) else {} for base in ranks.bases]
    is_wrapped = not ranks.whole or wrapper_of(ranks.first) is not None
    files = [file.value for file in ranks.optimizers]
    has_files = not ranks.whole and files[0] is not ranks.first  # of their own
    for dictionaries, own, reason in (
        (states, known, OF_NO_GROUP),
        (ranks.bases if is_wrapped else (), OF_BASE, BESIDE_STATE),
        (ranks.states, OF_ENGINE, BESIDE_STATE),
        (files if has_files else (), OF_ENGINE, BESIDE_STATE),
    ):
        for key in dict.fromkeys(key for each in dictionaries for key in each):
            if key in own or key in OF_ZCKPT or str(key).startswith("zckpt"):
                continue
            values = [each.get(key) for each in dictionaries]
            is_one = all(is_plain(value) and alike(value, values[0]) for value in values)
            yield Stranger(key, values[0] if is_one else values, reason)
