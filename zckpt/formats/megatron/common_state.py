"""Reads the state that all ranks of a Megatron-Core run share: arguments, groups, counters.

up to 0.18    the file common.pt
since 0.19    the key common_state/shard_0_1: a list of one dictionary
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from ...core.checkpoint.inert import Foreign
from ...core.storage import sources
from ...errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint
from ...files.dcpitems import ItemFiles
from ...files.dcptable import ItemTable
from ...files.torchfile import TorchFile
from ...training.options import DP, EP, PP, TP

OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.(?P<rest>.+)")
"""Keys of the optimizer's items; with a separate optimizer for experts, `chained_N.` precedes."""
FILE = "common.pt"
ITEM = "common_state/shard_0_1"
SHARDING = "distrib_optim_sharding_type"
READABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
FLAT = ("dp_reshardable", "dp_zero_gather_scatter")
DISTRIBUTED = "distrib_optim"  # flat buffers of mp_rank_* directories
NOT_DISTRIBUTED = "none"
FSDP = "fsdp_dtensor"
WEIGHTS_ONLY = "add --weights-only to read the weights without the optimizer"
"""The hint of errors in the optimizer's state."""
SIZES_OF_RUN = {
    DP: "data_parallel_size",
    TP: "tensor_model_parallel_size",
    PP: "pipeline_model_parallel_size",
    EP: "expert_model_parallel_size",
}
"""Megatron-LM's arguments for the sizes of a run."""


def read_common(table: ItemTable, files: ItemFiles) -> tuple[TorchFile, dict[Any, Any]]:
    """Reads the state that all ranks share; returns its file and its content.

    Raises IncompleteCheckpoint if the directory lacks this state, and CorruptCheckpoint if the
    state is not a dictionary.
    """
    path = os.path.join(table.folder, FILE)
    # Megatron-Core prefers this file to the key, too
    if sources.is_file(path):
        file = TorchFile(path)
        files.records += file.records.values()
        value = file.value
    elif ITEM in table.items:
        file = files.torch_file(table.location(ITEM))
        value = file.value[0] if isinstance(file.value, list) and len(file.value) == 1 else None
    else:
        raise IncompleteCheckpoint(
            "missing-file",
            f"{table.folder} has neither a file {FILE} nor a key {ITEM}",
            hint="rank 0 writes it: copy the whole directory",
            file=table.folder,
        )
    if not isinstance(value, dict):
        raise CorruptCheckpoint(
            "file-damaged", f"{file.path}: the common state is not a dictionary", file=file.path
        )
    return file, value


def sharding_of(table: ItemTable, common: dict[Any, Any]) -> str:
    """How the optimizer's state is sharded: "fully_reshardable", "dp_reshardable", ...

    NOT_DISTRIBUTED if its tensors are full. Raises UnsupportedCheckpoint for a way of sharding
    that zckpt does not read.
    """
    # Megatron-Core states the type in the optimizer's state since 0.14
    sharding_types: set[str] = {
        item["param_state_sharding_type"]
        for item in optimizers_of(common)
        if isinstance(item.get("param_state_sharding_type"), str)
    }
    keys = {key: match["rest"] for key in table.items if (match := OPTIMIZER.fullmatch(key))}
    if not sharding_types and any(rest.startswith("distributed.") for rest in keys.values()):
        # `content_metadata` alone does not show whether the optimizer is distributed
        content = common.get("content_metadata")
        kind = content.get(SHARDING) if isinstance(content, dict) else None
        sharding_types = {kind if isinstance(kind, str) else "dp_zero_gather_scatter"}
    for key, rest in keys.items():
        item = table.items[key]
        model = table.items.get(rest.split(".", 2)[-1])
        if rest.startswith("state.") and item is not None and model is not None:
            if item.shape != model.shape:
                sharding_types = {MODEL_SPACE}
            break
    if not sharding_types:
        return NOT_DISTRIBUTED
    kind = min(sharding_types)
    if len(sharding_types) > 1 or kind not in (READABLE, MODEL_SPACE, *FLAT):
        raise UnsupportedCheckpoint(
            "writer-unsupported",
            f"{table.folder} has an optimizer state of type {kind[:80]}, which zckpt does not read",
            hint=f"save it with --dist-ckpt-optim-fully-reshardable, or {WEIGHTS_ONLY}",
            file=table.folder,
        )
    return kind


def with_groups(
    common: dict[Any, Any],
    listed: Sequence[Sequence[Any]],
    beside: Sequence[dict[str, Any]],
) -> dict[Any, Any]:
    """Adds parameter groups to the common state, which lacks them if the run has flat buffers.

    `listed` has, for each optimizer, the groups that its ranks saved; of equal groups, one is kept.
    `beside` has, for each optimizer, further values of its state, such as the loss scale.
    """
    known_optimizers = optimizers_of(common)
    states: list[dict[Any, Any]] = []
    for number, groups in enumerate(listed):
        kept_once = [group for place, group in enumerate(groups) if group not in groups[:place]]
        other_values = known_optimizers[number] if number < len(known_optimizers) else {}
        more = beside[number] if number < len(beside) else {}
        states.append({**other_values, **more, "optimizer": {"param_groups": kept_once}})
    return {**common, "optimizer": states[0] if len(states) == 1 else dict(enumerate(states))}


def optimizers_of(common: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The state dicts of all optimizers.

    A run has a second optimizer for experts that are spread over ranks.
    """
    state = common.get("optimizer")
    states = state if isinstance(state, list) else [state]  # NeMo has a list of one
    result: list[dict[Any, Any]] = []
    for optimizer in states:
        if isinstance(optimizer, dict):
            numbered = [
                optimizer[key] for key in sorted(key for key in optimizer if type(key) is int)
            ]
            result += [item for item in (numbered or [optimizer]) if isinstance(item, dict)]
    return result


def arguments(common: Any) -> dict[str, Any]:
    """The arguments of Megatron's command line by name; empty if the program saved none."""
    namespace = common.get("args") if isinstance(common, dict) else None
    state = namespace.state if isinstance(namespace, Foreign) else None
    return state if isinstance(state, dict) else {}
