"""Finds the parameter and the slot (such as `exp_avg`) of each saved tensor, by torch's own keys.

This is the rule behind `verify --gather` for the formats `dcp` and `gathered`. It checks the
reader, so it shares no code with the other modules of this folder. torch keeps names in keys (torch
2.13, distributed/checkpoint/state_dict.py, optim/optimizer.py):

    nested    {"state": {NAME: {SLOT: tensor}}, "param_groups": [{"params": [NAME, ...], ...}]}
    flat      {"state.NAME.SLOT": tensor, "param_groups.NAME.lr": ...}
    numbers   {"state": {0: {SLOT: tensor}}, "param_groups": [{"params": [0, ...], ...}]}

With numbers, `param_names` of a group may state the names (torch >= 2.6). If nothing states them,
the tensors are `Nameless`. A tensor is `Nameless` too if only the program knows whether it belongs
to the model: several state dicts may be the model's, or there are several optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.manifest import slot_name
from ...core.ranks.partition import UNNAMED, BoxPart, Joined, Nameless, Partition, Whole
from ...files.safefile import SavedTensor
from ...files.torchfile import Tensor, TorchFile

Saved = Joined | Whole
"""A tensor as saved, before its name is known."""

TreePath = tuple[Any, ...]
MODELS = ("model", "state_dict", "module", "model_state_dict", "app.model")
"""Keys under which programs save a model's state dict, the most usual key first."""
ADAPTED = "base_model."
"""Prefix of PEFT's modules. PEFT's files omit an adapter's name (PEFT 0.21)."""
DEPTH = 4


def partitions(tree: Mapping[Any, Any], numbers: Sequence[str] = ()) -> list[Partition]:
    """Lists every tensor of a model and its optimizer in a tree of state dicts, each with its name.

    Tensors in the tree are `Saved` objects. A dictionary with integer keys stands for a list.
    `numbers` are the names of parameters that an optimizer numbers, if the files state them
    elsewhere.
    """
    tree = _apart(tree)
    optimizers = [(path, value) for path, value in _dicts(tree) if _is_optimizer(value)]
    state_dict = optimizers[0][1] if len(optimizers) == 1 else {}
    trained, _ = _optimizer(state_dict, numbers)
    candidates = {
        place: tensors
        for place, value in _dicts(tree)
        if not any(place[: len(path)] == path for path, _ in optimizers)
        if (tensors := {key: item for key, item in value.items() if isinstance(item, Saved)})
        and all(isinstance(key, str) for key in tensors)
    }
    model = _model(candidates, [*trained]) if len(optimizers) < 2 else None
    if model is None:
        every = [item for value in candidates.values() for item in value.values()]
        of_optimizers = [states(value, {}, numbers) for _, value in optimizers]
        return [*(Nameless("param", item) for item in every), *chain(*of_optimizers)]
    of_module = bool(trained) and trained.keys() <= model.keys()
    weights = [
        replace(item, key=(name, "param"))
        if of_module or name in trained or not name.startswith(ADAPTED)
        else Nameless("param", item)
        for name, item in model.items()
    ]
    return [*weights, *states(state_dict, model, numbers)]


def _apart(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Splits a dictionary that mixes the keys of model and optimizer into `model` and `optim`.

    Any other dictionary is returned unchanged.
    """
    optimizer = {
        key: tree[key] for key in tree if str(key).partition(".")[0] in ("state", "param_groups")
    }
    rest = {key: value for key, value in tree.items() if key not in optimizer}
    both = _is_optimizer(tree) and any(isinstance(value, Saved) for value in rest.values())
    return {"model": rest, "optim": optimizer} if both else tree


def states(
    state_dict: Mapping[Any, Any], model: Mapping[str, Saved], numbers: Sequence[str] = ()
) -> Iterator[Partition]:
    """Yields the tensors in an optimizer's state dict, each with its parameter's name.

    state_dict  the optimizer's state dict, nested or flat
    model       the model's tensors by name; other parameters' tensors get no name
    numbers     names of the parameters that the optimizer numbers, in order

    Of a named parameter, only tensors of its shape are yielded, such as `exp_avg`. Single numbers,
    such as `step`, are skipped.
    """
    by_name, nameless = _optimizer(state_dict, numbers)
    named = [(name, state) for name, state in by_name.items() if name in model]
    nameless = [*(state for name, state in by_name.items() if name not in model), *nameless]
    # keys of single numbers: some parameter has a number under the key, or one element in another
    # shape than its own (moments of a parameter with one element have one element too)
    values = {"step"} | {
        key
        for name, state in named
        for key, value in state.items()
        if _is_number(value, model[name].shape)
    }
    for name, state in named:
        for key, value in state.items():
            single = isinstance(value, Saved) and prod(value.shape) == 1
            if key == "step" or (key in values and single) or not isinstance(value, Saved):
                continue
            if isinstance(key, str) and value.shape == model[name].shape:
                yield replace(value, key=(name, slot_name(key)))
    for state in nameless:
        for key, value in state.items():
            if isinstance(key, str) and key != "step" and isinstance(value, Saved):
                yield Nameless(slot_name(key), value)


def _is_number(value: Any, shape: tuple[int, ...]) -> bool:
    if isinstance(value, Saved):
        return prod(value.shape) == 1 and value.shape != shape
    return type(value) in (bool, int, float, complex)


# -- parsing of keys


def _dicts(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, dict[Any, Any]]]:
    """Yields every dictionary in a tree with its path, down to `DEPTH` levels.

    Dictionaries inside an optimizer's state dict are skipped.
    """
    if isinstance(tree, dict):
        yield path, tree
    if len(path) < DEPTH and not (isinstance(tree, dict) and _is_optimizer(tree)):
        children = tree.items() if isinstance(tree, dict) else ()
        for key, value in enumerate(tree) if isinstance(tree, list) else children:
            yield from _dicts(value, (*path, key))


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    if "param_groups" in value:
        groups = _listed(value["param_groups"])
        return groups is not None and all(_members(group) is not None for group in groups)
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def _members(group: Mapping[Any, Any]) -> list[Any] | None:
    return _listed(group.get("params", group.get("param_names")))


def _listed(value: Any) -> list[Any] | None:
    """Returns a list as it is, and a dictionary with integer keys as a list.

    None for anything else.
    """
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return [value[key] for key in sorted(value)]
    return list(value) if isinstance(value, (list, tuple)) else None


States = dict[Any, Any]
"""One parameter's optimizer state, by key."""


def _optimizer(
    state_dict: Mapping[Any, Any], numbers: Sequence[str]
) -> tuple[dict[str, States], list[States]]:
    """Splits an optimizer's states by whether their parameter's name is known.

    Returns a dictionary from names to states, and a list of the other states. `numbers` are the
    names of the parameters that the optimizer numbers, in the order of the numbers.
    """
    if "param_groups" not in state_dict:
        return _flat(state_dict), []
    groups = _listed(state_dict["param_groups"]) or []
    members = [member for group in groups for member in _members(group) or ()]
    # planners of torch.distributed.checkpoint turn numbers into strings
    values = (state_dict.get("state") or {}).items()
    states = {str(key): value for key, value in values if isinstance(value, dict)}
    if any(type(member) is int for member in members):
        beside = [name for group in groups for name in _listed(group.get("param_names")) or ()]
        names = next((list(n) for n in (numbers, beside) if len(n) == len(members)), None)
        if names is None:
            return {}, [states.get(str(member), {}) for member in members]
        pairs = zip(names, members, strict=True)
        return {name: states.get(str(member), {}) for name, member in pairs}, []
    return {name: states.get(name, {}) for name in members}, []


def _flat(state_dict: Mapping[Any, Any]) -> dict[str, dict[Any, Any]]:
    """Converts a flat optimizer state dict to `{parameter: {state: value}}`.

    A flat key is `state.<parameter>.<state>`. Only the parameter's name may contain dots.
    """
    groups, state = "param_groups.", "state."
    keys = [key for key in state_dict if isinstance(key, str)]
    names = [key[len(groups) :].rpartition(".")[0] for key in keys if key.startswith(groups)]
    states: dict[str, dict[Any, Any]] = {name: {} for name in names}
    for key in keys:
        name, _, slot = key.rpartition(".")
        if name.startswith(state) and name[len(state) :] in states:
            states[name[len(state) :]][slot] = state_dict[key]
    return states


def _model(
    candidates: Mapping[TreePath, dict[str, Saved]], trained: Sequence[str]
) -> dict[str, Saved] | None:
    """Finds the model's state dict among several dictionaries of tensors.

    It is the only one that has all parameter names of the optimizer (`trained`). If several have
    them, or none, the one under a usual key such as `model`. None if there is no such key.
    """
    complete = [path for path, weights in candidates.items() if weights.keys() >= set(trained)]
    if trained and len(complete) == 1:
        return candidates[complete[0]]
    paths = complete if trained and complete else list(candidates)
    if len(paths) == 1:
        return candidates[paths[0]]
    for key in MODELS:
        for path in paths:
            if ".".join(map(str, path)) == key:
                return candidates[path]
    return None


# -- tensors in files


def whole(file: TorchFile, tensor: Tensor) -> Whole:
    """Describes a tensor that one file contains completely, for `verify --gather`."""
    box = box_of(file, tensor, (0,) * len(tensor.shape))
    return Whole(UNNAMED, tensor.dtype, tensor.shape, box.extent, box.strides)


def box_of(file: TorchFile, tensor: Tensor, offsets: tuple[int, ...]) -> BoxPart:
    """Describes a rank's shard of a tensor in a torch.save file; it begins at `offsets`."""
    extent, strides = file.reach(tensor)
    return BoxPart(offsets, tensor.shape, extent, strides=strides)


def stored_box(stored: SavedTensor, offsets: tuple[int, ...]) -> BoxPart:
    """Describes a rank's shard of a tensor in a safetensors file; it begins at `offsets`."""
    return BoxPart(offsets, stored.shape, stored.extent)


def all_stored(tensors: Iterable[SavedTensor]) -> dict[str, Saved]:
    """Maps the names of a safetensors file to its tensors, for `verify --gather`."""
    boxes = [(each, stored_box(each, (0,) * len(each.shape))) for each in tensors]
    return {each.name: joined(each.dtype, each.shape, [box]) for each, box in boxes}


def joined(dtype: str, shape: tuple[int, ...], boxes: Sequence[BoxPart]) -> Saved:
    """Describes a tensor by its shards (`boxes`); a single complete shard gives a `Whole`."""
    filled = [box for box in boxes if prod(box.sizes)]
    if len(filled) == 1 and filled[0].sizes == shape:
        return Whole(UNNAMED, dtype, shape, filled[0].extent, filled[0].strides)
    return Joined(UNNAMED, dtype, shape, tuple(filled))
