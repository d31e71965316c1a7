"""Finds the state dicts of the model and the optimizer in a tree of dictionaries.

Programs choose the keys (`model`, `state_dict`, `app.model`, none; `optim`, `optimizer`), so state
dicts are recognized by their content. An optimizer's state dict has one of three layouts (torch
2.13):

    nested    {"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}
    flat      {"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}: groups are lost
    raw       as nested, with numbers instead of names; numbers run through all groups

torch_checkpointing's `optimizer_transform_pre` turns a raw state dict into a nested one. Its groups
list their parameters under `param_names` instead of `params` (0.1.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...core.checkpoint.dtypes import FLOATS
from ...core.checkpoint.inert import PLAIN, map_values, to_json, types_in
from ...errors import MissingData, Notice
from ...training.lightning import LIGHTNING, TRAINED, WHOLE
from ..extra_states import ExtraState
from .equal_tensors import is_float
from .tree import Leaf, SavedTree, TreePath, dotted

MODELS = ("model", "state_dict", "module", "model_state_dict", "app.model")  # the likeliest first
MEMBERS = ("params", "param_names")  # keys of a group's members; the first one that it has
DEPTH = 4
BUFFERS = re.compile(  # usual names of buffers in modules of torch and transformers
    r"(?:.*\.)?(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|attn_bias|masked_bias|causal_mask)"
)


class OptimizerState(Struct, frozen=True):
    """An optimizer's state dict: the states of each parameter, and the parameter groups.

    layout        "nested", "flat" or "raw"; the module explains these
    state         {parameter's name or number: {"exp_avg": tensor, ...}}
    groups        the hyper-parameters of each group
    members       the parameters of each group
    other_values  values under `state` that belong to no parameter
    """

    layout: str
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]
    members: list[list[Any]] = field(default_factory=list)
    other_values: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_numbered(self) -> bool:
        return any(type(member) is int for members in self.members for member in members)

    def renamed(self, names: Mapping[Any, str]) -> OptimizerState:
        return replace(
            self,
            state={names[key]: state for key, state in self.state.items() if key in names},
            members=[[names[member] for member in members] for members in self.members],
        )


class NamedModel(Struct, eq=False):
    """A model and its optimizers, whose parameters have the names that the manifest uses.

    weights       the model's tensors by name
    facts         what zckpt wrote beside the model (own_facts.py), or None
    has_adapter   whether the files lack the adapter's name in the names of PEFT's weights
    prefix        the start of all names if several models are read: "generator."
    optimizers    the optimizers, by the paths of their state dicts
    extra_states  values in these state dicts that are no parameter's state
    inferred      names that no file states
    bare          whether the optimizers' names lack PEFT's prefix, `base_model.model.`
    """

    weights: Mapping[str, Any]
    facts: dict[str, Any] | None
    has_adapter: bool  # `lora_A.weight` in a file is `lora_A.default.weight` in `weights`
    prefix: str
    optimizers: dict[TreePath, OptimizerState] = field(default_factory=dict)
    extra_states: list[ExtraState] = field(default_factory=list)
    inferred: list[str] = field(default_factory=list)
    bare: bool = False
    warnings: list[Notice] = field(default_factory=list)


def merged(optimizers: Sequence[OptimizerState]) -> OptimizerState:
    """Joins several optimizers, which share no parameter, into one with the groups of all."""
    return OptimizerState(
        optimizers[0].layout if optimizers else "",
        {name: state for each in optimizers for name, state in each.state.items()},
        [group for each in optimizers for group in each.groups],
        [members for each in optimizers for members in each.members],
    )


def find_optimizers(tree: Any, path: TreePath = ()) -> Iterator[TreePath]:
    """Yields the path of every optimizer's state dict in a tree of dictionaries."""
    if isinstance(tree, dict) and is_optimizer(tree):
        yield path
    elif len(path) < DEPTH and isinstance(tree, (dict, list)):
        if isinstance(tree, list) and types_in(tree) <= PLAIN:
            return
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, (dict, list)):
                yield from find_optimizers(value, (*path, key))


def is_optimizer(value: dict[Any, Any]) -> bool:
    """Whether a dictionary has the keys of an optimizer's state dict."""
    groups = value.get("param_groups")
    if isinstance(groups, list):
        return all(
            isinstance(group, dict) and not group.keys().isdisjoint(MEMBERS) for group in groups
        )
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def has_groups(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value contains an optimizer's groups, at most `depth` dictionaries deep."""
    if not isinstance(value, dict) or not depth:
        return False
    return "param_groups" in value or any(has_groups(item, depth - 1) for item in value.values())


def read_optimizer(state_dict: dict[Any, Any]) -> OptimizerState:
    if "param_groups" not in state_dict:
        return _flat(state_dict)
    values = state_dict.get("state") or {}
    values = values if isinstance(values, dict) else {"state": values}
    state = {key: own for key, own in values.items() if isinstance(own, dict)}
    other_values = {key: own for key, own in values.items() if key not in state}
    keys = [next(key for key in MEMBERS if key in group) for group in state_dict["param_groups"]]
    pairs = list(zip(keys, state_dict["param_groups"], strict=True))
    members = [list(group[key]) for key, group in pairs]
    groups = [{name: value for name, value in group.items() if name != key} for key, group in pairs]
    optimizer = OptimizerState("nested", state, groups, members, other_values)
    if not optimizer.is_numbered:
        return optimizer
    # planners of torch.distributed.checkpoint turn the numbers into strings
    state, other_values = (
        {int(key) if str(key).isdecimal() else key: own for key, own in values_by_key.items()}
        for values_by_key in (state, other_values)
    )
    return replace(optimizer, layout="raw", state=state, other_values=other_values)


def _flat(state_dict: dict[Any, Any]) -> OptimizerState:
    """Reads a flat state dict, whose keys are such as `state.fc1.weight.exp_avg`.

    It has hyper-parameters for every parameter instead of groups. Parameters with equal
    hyper-parameters become a group.
    """
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in state_dict.items():
        kind, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        (state if kind == "state" else hyper).setdefault(name, {})[option] = value
    groups: dict[str, dict[str, Any]] = {}
    members: dict[str, list[str]] = {}
    for name, group in hyper.items():
        text = json.dumps(to_json(_plain(group)), sort_keys=True)
        groups.setdefault(text, group)
        members.setdefault(text, []).append(name)
    return OptimizerState("flat", dict(state), list(groups.values()), list(members.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value.number() if not value.shape else repr(value.memory or value.twin or id(value))
    return map_values(value, lambda item, _: _plain(item))


def find_models(tree: Any, optimizers: Collection[TreePath]) -> dict[TreePath, dict[Any, Any]]:
    """Finds all dictionaries of named tensors outside of the optimizers, by path.

    Dictionaries in lists count only if there are no others, since programs keep other things in
    lists.
    """
    return dict(_models_in(tree, optimizers, (dict,)) or _models_in(tree, optimizers, (dict, list)))


def _models_in(
    tree: Any, optimizers: Collection[TreePath], kinds: tuple[type, ...], path: TreePath = ()
) -> list[tuple[TreePath, dict[Any, Any]]]:
    if path in optimizers or not isinstance(tree, kinds) or len(path) > DEPTH:
        return []
    models = []
    if isinstance(tree, dict):
        keys = [key for key, value in tree.items() if isinstance(value, Leaf)]
        if keys and all(isinstance(key, str) for key in keys):
            models.append((path, tree))
    values: Any = tree
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(values):
        models += _models_in(value, optimizers, kinds, (*path, key))
    return models


def lists_in(
    tree: Any, excluded: Collection[TreePath], path: TreePath = ()
) -> Iterator[tuple[TreePath, list[Any]]]:
    """Yields every list that contains tensors, with its path; skips the paths in `excluded`."""
    if (path and path in excluded) or not isinstance(tree, (dict, list)) or len(path) > DEPTH:
        return
    if isinstance(tree, list) and any(isinstance(item, Leaf) for item in tree):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if type(value) not in PLAIN:
                yield from lists_in(value, excluded, (*path, key))


def choose_models(
    saved: SavedTree,
    models: Mapping[TreePath, dict[Any, Any]],
    optimizers: Sequence[OptimizerState],
    asked: str,
) -> list[TreePath]:
    """Chooses which dictionaries of named tensors are the trained models; returns their paths.

    Returns one path if the optimizer's names or a usual key such as `model` show it. Otherwise
    returns all possible models. `asked` is the model that `--root` names, or "". Raises MissingData
    if `models` is empty.
    """
    if not models:
        if not optimizers:
            raise MissingData(
                "weights-missing",
                f"{saved.root} has no state dict of a model: no dictionary of named tensors",
                hint="save model.state_dict(), alone or under a key",
                file=saved.root,
            )
        raise MissingData(
            "other-folder-needed",
            f"{saved.root} has the state dict of an optimizer, but not of a model",
            hint="give the folder that contains both: zckpt needs the model's names and weights",
            file=saved.root,
        )
    if saved.layout.models:
        return [(key,) for key in saved.layout.models]
    if LIGHTNING in saved.tree and WHOLE.model in models:
        chosen = (asked,) if asked == TRAINED else WHOLE.model
        return [chosen if chosen in models else WHOLE.model]
    fitting: dict[TreePath, dict[Any, Any]] = dict(models)
    if len(optimizers) == 1 and not optimizers[0].is_numbered:
        names = {name for members in optimizers[0].members for name in members}
        complete = {path: model for path, model in models.items() if names <= model.keys()}
        fitting = complete or fitting
    if len(optimizers) < 2:
        for likely in MODELS:
            for path in fitting:
                if dotted(path) == likely:
                    return [path]
    sizes = {
        path: sum(is_float(leaf) and bool(leaf.shape) for leaf in model.values())
        for path, model in fitting.items()
    }
    if () in fitting:  # a loss or a generator's state may be beside the model
        keys = [str(key) for key, value in fitting[()].items() if isinstance(value, Leaf)]
        qualified = any("." in key for key in keys)
        if qualified or sizes[()] >= max(sizes.values()):
            return [()]
        del fitting[()]
    if any(sizes[path] for path in fitting):  # the others are random states and counters
        fitting = {path: model for path, model in fitting.items() if sizes[path]}
    averages = [path for path in fitting if "ema" in re.split(r"[._]", dotted(path))]
    if len(averages) < len(fitting):
        fitting = {path: model for path, model in fitting.items() if path not in averages}
    # a module's get_extra_state may be a dictionary of tensors
    return [path for path in fitting if not any(path[:end] in fitting for end in range(len(path)))]


def beside(
    models: Mapping[TreePath, Mapping[Any, Any]], chosen: Sequence[TreePath]
) -> dict[TreePath, Mapping[Any, Any]]:
    """Dictionaries of weights beside the `chosen` models, such as an average (EMA), by path."""
    chosen_paths = [path for path in chosen if path]
    return {
        path: model
        for path, model in models.items()
        if path  # a tensor may be beside the model's key
        and path not in chosen
        and not any(path[: len(each)] == each for each in chosen_paths)
        and not any(map(is_extra, path))
        and any(is_float(leaf) and leaf.shape for leaf in model.values())
    }


def value_at(tree: Any, path: TreePath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def is_buffer(name: str, leaf: Leaf, sharded: bool) -> bool:
    """Whether a tensor is a buffer, judged by its type, its name and its sharding.

    With `sharded`, the model's parameters are sharded over ranks: then a tensor that is not sharded
    is a buffer too.
    """
    # a parameter with a single row cannot be divided
    whole = sharded and leaf.sharded is False and leaf.shape[:1] != (1,)
    return leaf.dtype not in FLOATS or whole or bool(BUFFERS.fullmatch(name))


def matches_any(name: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs of `--buffers` matches a tensor's name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def is_extra(key: Any) -> bool:
    """Whether a key belongs to a value that `get_extra_state` of a module returned."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def without(tree: Any, paths: set[TreePath], path: TreePath = ()) -> Any:
    """Removes the state dicts at `paths` from a tree, and containers that become empty by this.

    In a list with other items, None takes the place of a removed item. If `paths` has (), the
    tensors at the top of the tree are removed. `path` is the path of `tree` itself, for recursion.
    """
    if () in paths and not path:
        values = {key: value for key, value in tree.items() if not isinstance(value, Leaf)}
        return without(values, paths - {()})
    if isinstance(tree, list) and not types_in(tree) <= PLAIN:
        places = [(*path, place) for place in range(len(tree))]
        items = [
            None if place in paths else without(item, paths, place)
            for place, item in zip(places, tree, strict=True)
        ]
        is_empty = not paths.isdisjoint(places) and all(item is None for item in items)
        return [] if is_empty else items
    if not isinstance(tree, dict):
        return tree
    rest = type(tree)()  # an OrderedDict stays one
    for key, value in tree.items():
        if type(value) in PLAIN:
            rest[key] = value
            continue
        if (*path, key) in paths:
            continue
        kept = without(value, paths, (*path, key))
        if kept not in ({}, []) or value in ({}, []):
            rest[key] = kept
    return rest
