"""What do all ranks of a Megatron-Core run share? Its arguments, hyper-parameters and counters.

up to 0.18    common.pt
since 0.19    the item common_state/shard_0_1: a list of one dictionary
"""

from __future__ import annotations

import os
import re
from typing import Any

from ...core import sources
from ...core.inert import Foreign, TensorName, inside, map_values
from ...core.manifest import Entry
from ...errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint
from ...files.dcpfile import ItemTable
from ...files.dcpitems import ItemFiles
from ...files.torchfile import Tensor, TorchFile

FILE = "common.pt"
ITEM = "common_state/shard_0_1"
SHARDING = "distrib_optim_sharding_type"
READABLE = "fully_reshardable"
NOT_DISTRIBUTED = "none"
PREFIX = re.compile(r"chained_\d+\.(?=optimizer\.)")
HINTS = {
    "dp_reshardable": "save with --dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "load it in Megatron-Core and save with "
    "--dist-ckpt-optim-fully-reshardable",
    "fully_sharded_model_space": "Megatron-Core 0.14 and 0.15 load it and save "
    "with --dist-ckpt-optim-fully-reshardable",
}


def read_common(table: ItemTable, files: ItemFiles) -> tuple[TorchFile, dict[Any, Any]]:
    """The file of the common state, and its content. Megatron-Core too prefers `common.pt`."""
    path = os.path.join(table.folder, FILE)
    if sources.is_file(path):
        file = TorchFile(path)
        value = file.value
    elif ITEM in table.items:
        file = files.torch_file(table.location(ITEM))
        value = file.value[0] if isinstance(file.value, list) and len(file.value) == 1 else None
    else:
        raise IncompleteCheckpoint(
            f"{table.folder} has neither {FILE} nor an item {ITEM}",
            hint="rank 0 writes it: copy the whole directory",
        )
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{file.path}: the common state is not a dictionary")
    return file, value


def sharding_of(table: ItemTable, common: dict[Any, Any]) -> str:
    """How the optimizer's state was sharded; NOT_DISTRIBUTED for whole tensors.

    Raises UnsupportedCheckpoint for a type that zckpt does not read. The optimizer's own state says
    it (0.14 and later). `content_metadata` alone does not tell whether it is distributed.
    """
    stated = {
        item["param_state_sharding_type"]
        for item in optimizers_of(common)
        if isinstance(item.get("param_state_sharding_type"), str)
    }
    keys = {key: own for key in table.items if (own := of_optimizer(key))}
    if not stated and any(own.startswith("optimizer.distributed.") for own in keys.values()):
        content = common.get("content_metadata")
        kind = content.get(SHARDING) if isinstance(content, dict) else None
        stated = {kind if isinstance(kind, str) else "dp_zero_gather_scatter"}
    for key, own in keys.items():
        item = table.items[key]
        name = own.split(".", 3)[-1]
        model = table.items.get(name)
        if own.startswith("optimizer.state.") and item is not None and model is not None:
            if item.shape != model.shape:
                stated = {"fully_sharded_model_space"}
            break
    if not stated:
        return NOT_DISTRIBUTED
    kind = min(stated)
    if stated != {READABLE}:
        raise UnsupportedCheckpoint(
            f"{table.folder} has an optimizer state of type {kind[:80]}, which zckpt does not read",
            hint=f"{HINTS.get(kind, 'save it as fully_reshardable')}; --weights-only takes the "
            "weights alone",
        )
    return READABLE


def of_optimizer(key: str) -> str | None:
    """The key of something that an optimizer saved; None for a key of the model.

    If experts have an optimizer of their own, a program may put `chained_N.` before these keys:
    0.16.1 does so unless the metadata of the save has `chained_optim_avoid_prefix`.
    """
    own = PREFIX.sub("", key, count=1) if key.startswith("chained_") else key
    return own if own.startswith("optimizer.") else None


def optimizers_of(common: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The state of every optimizer: experts of several ranks have one of their own."""
    state = common.get("optimizer")
    if not isinstance(state, dict):
        return []
    numbered = [state[key] for key in sorted(key for key in state if type(key) is int)]
    return [item for item in (numbered or [state]) if isinstance(item, dict)]


def arguments(common: dict[Any, Any]) -> dict[str, Any]:
    """The values of Megatron's command line; empty if the program saved none."""
    namespace = common.get("args")
    state = namespace.state if isinstance(namespace, Foreign) else None
    return state if isinstance(state, dict) else {}


def kept(file: TorchFile, value: Any, path: str, entries: dict[str, Entry]) -> Any:
    """A value with its tensors as entries of slot `state`; 0-d ones by value."""
    if isinstance(value, Tensor):
        if not value.shape and value.dtype != "C64":
            return file.scalar(value)
        name = f"{path}/state"
        entries[name] = Entry(name, value.dtype, value.shape, file.fragments(value))
        return TensorName(path)
    return map_values(value, lambda item, key: kept(file, item, inside(path, key), entries))
