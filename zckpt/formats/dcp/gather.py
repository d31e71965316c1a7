"""How torch's planner joins what ranks saved: the rule behind `verify --gather`.

For every key, `.metadata` states the tensor's shape, its shards with their bytes in a file, and the
path of the key in the state dict (torch 2.13, distributed/checkpoint/planner.py and metadata.py).
Hugging Face's storage states the offsets of every tensor in a rank's file; the full tensor ends
where its last shard ends (hf_storage.py). This module does not use the reader's modules, because
`verify --gather` checks the reader.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from ...core.ranks.partition import BoxPart, Partition
from ...core.storage import sources
from ...errors import MALFORMED, UnsupportedCheckpoint, not_understood
from ...files import safefile
from ...files.dcpfile import read_table
from ...files.dcpitems import ItemFiles
from ...files.dcptable import ItemBox, ItemTable, TensorItem
from ...files.torchfile import Tensor
from ..statedict import gather
from .files import MODEL, OPTIMIZERS, adapter_of, has_items, locate, place_in

STATE = re.compile(r"(?:.+\.)?state\.(?P<owner>.+)\.(?P<slot>[^.]+)")
OF_RANK = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def partitions(path: str, _tp_rules: str | None = None) -> list[Partition]:
    """Returns every tensor of model and optimizer, joined from shards by torch's own rule.

    `path` is the checkpoint's directory. A `Partition` is one full tensor, as the byte ranges of
    its shards. Raises UnsupportedCheckpoint for a shard that is not a tensor, and the errors of
    `read_table`.
    """
    try:
        return _partitions(*locate(path))
    except MALFORMED as error:
        raise not_understood(path, error) from error


def _partitions(root: str, folders: Sequence[str]) -> list[Partition]:
    if not folders:
        return gather.partitions(_with_states(_hugging_face(root)))
    tree: dict[Any, Any] = {}
    numbers: Sequence[str] = ()
    for folder in folders:
        if not has_items(folder):
            file = adapter_of(folder)
            adapter = gather.all_stored(safefile.read(file)) if sources.is_file(file) else None
            tree[MODEL] = _hugging_face(folder) if adapter is None else adapter
            continue
        name = os.path.basename(folder)
        front = (name,) if name in (MODEL, *OPTIMIZERS) and folder != root else ()
        table, files = read_table(folder), ItemFiles()
        for key, item in table.items.items():
            place = (*front, *place_in(folder, table.paths.get(key) or (key,)))
            if item is not None:
                _put(tree, place, _tensor(table, files, key, item))
            else:
                is_asked = _lists_parameters(place) or _is_state_but_step(place)
                value = files.torch_file(table.location(key)).value if is_asked else None
                _put(tree, place, value)
        record = table.others.get("zckpt")
        if isinstance(record, dict):  # zckpt wrote the directory, and stated the names
            numbers = record.get("numbers") or numbers
    return gather.partitions(tree, numbers)


def _lists_parameters(path: tuple[Any, ...]) -> bool:
    return "param_groups" in path and ("params" in path or "param_names" in path)


def _is_state_but_step(path: tuple[Any, ...]) -> bool:
    last = str(path[-1])
    inside = "state" in path[:-1] or last.startswith("state.")
    return inside and last.rpartition(".")[2] != "step"


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Sets the value at a path of nested dictionaries; a list becomes a dictionary by index."""
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _tensor(table: ItemTable, files: ItemFiles, key: str, item: TensorItem) -> gather.Saved:
    boxes = [_box(table, files, key, box) for box in item.boxes if not box.is_empty]
    return gather.joined(item.dtype, item.shape, boxes)


def _box(table: ItemTable, files: ItemFiles, key: str, box: ItemBox) -> BoxPart:
    location = table.location(key, box)
    stored = files.stored(location, key)
    if stored is not None:
        return gather.stored_box(stored, box.offsets)
    file = files.torch_file(location)
    if not isinstance(file.value, Tensor):
        raise UnsupportedCheckpoint(
            "proof-unsupported",
            f"{location.file} has something else than a tensor under the key {key}",
            file=location.file,
        )
    return gather.box_of(file, file.value, box.offsets)


def _hugging_face(folder: str) -> dict[str, gather.Saved]:
    boxes: dict[str, list[BoxPart]] = {}
    dtypes: dict[str, str] = {}
    for name in sorted(filter(OF_RANK.fullmatch, os.listdir(folder))):
        tensors, metadata = safefile.read_with_metadata(os.path.join(folder, name))
        info = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        for stored in tensors:
            zeros = [0] * len(stored.shape)
            offsets = tuple(info.get(stored.name, {}).get("saved_offsets", zeros))
            boxes.setdefault(stored.name, []).append(gather.stored_box(stored, offsets))
            dtypes[stored.name] = stored.dtype
    return {
        name: gather.joined(dtypes[name], _full_shape(parts), parts)
        for name, parts in boxes.items()
    }


def _with_states(tensors: dict[str, gather.Saved]) -> dict[str, Any]:
    """Splits tensors by their names into two state dicts: {"model": {...}, "optim": {...}}.

    `optim.state.fc.weight.exp_avg` is an optimizer state if `fc.weight` is a weight. Without such
    states, the tensors are returned as they are.
    """
    state: dict[str, dict[str, gather.Saved]] = {}
    fronts: set[str] = set()
    for name in tensors:
        match = STATE.fullmatch(name)
        if match is None or (owner := match["owner"]) in state:
            continue
        if weight := next((each for each in tensors if f".{each}".endswith(f".{owner}")), None):
            fronts.add(weight.removesuffix(owner))
            state[owner] = {}
    if len(fronts) != 1:
        return dict(tensors)
    model: dict[str, gather.Saved] = {}
    for name, tensor in tensors.items():
        match = STATE.fullmatch(name)
        if match and match["owner"] in state:
            state[match["owner"]][match["slot"]] = tensor
        else:
            model[name.removeprefix(*fronts)] = tensor
    return {"model": model, "optim": {"state": state, "param_groups": [{"params": list(state)}]}}


def _full_shape(boxes: Sequence[BoxPart]) -> tuple[int, ...]:
    axes = range(len(boxes[0].sizes))
    return tuple(max(box.offsets[axis] + box.sizes[axis] for box in boxes) for axis in axes)
