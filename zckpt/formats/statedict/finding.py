"""Which of a program's state dicts are the model's and the optimizer's.

Programs choose the keys (`model`, `state_dict`, `app.model`, none; `optim`, `optimizer`), so state
dicts are known by what they hold. An optimizer's comes in three kinds (torch 2.13):

    nested    {"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}
    flat      {"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}: groups are lost
    raw       as nested, with numbers for names: places in all groups, one behind the other
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.inert import map_values, to_json
from ...errors import AmbiguousCheckpoint, MissingData, listed
from .tree import Found, Leaf, Path, dotted
from .twins import is_float

MODELS = ("model", "state_dict", "module", "model_state_dict", "app.model")  # the likeliest first
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's state by name (or number), and its groups with their members."""

    layout: str
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]
    members: list[list[Any]] = field(default_factory=list)

    @property
    def is_numbered(self) -> bool:
        return any(type(member) is int for members in self.members for member in members)

    def renamed(self, names: Mapping[Any, str]) -> Optimizer:
        return replace(
            self,
            state={names[key]: held for key, held in self.state.items() if key in names},
            members=[[names[member] for member in members] for members in self.members],
        )


def find_optimizers(tree: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(tree, dict) and _is_optimizer(tree):
        yield path
    elif len(path) < DEPTH and isinstance(tree, (dict, list)):
        for key, held in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from find_optimizers(held, (*path, key))


def _is_optimizer(held: dict[Any, Any]) -> bool:
    groups = held.get("param_groups")
    if isinstance(groups, list):
        return all(isinstance(group, dict) and "params" in group for group in groups)
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in held)


def read_optimizer(held: dict[Any, Any]) -> Optimizer:
    if "param_groups" not in held:
        return _flat(held)
    state = held.get("state") or {}
    members = [list(group["params"]) for group in held["param_groups"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in held["param_groups"]
    ]
    made = Optimizer("nested", state, groups, members)
    if not made.is_numbered:
        return made
    # planners of torch.distributed.checkpoint make texts of the numbers
    return replace(made, layout="raw", state={int(key): value for key, value in state.items()})


def _flat(held: dict[Any, Any]) -> Optimizer:
    """Every parameter has hyper-parameters of its own: equal ones are one group."""
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in held.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        (state if kind == "state" else hyper).setdefault(name, {})[what] = value
    groups: dict[str, dict[str, Any]] = {}
    members: dict[str, list[str]] = {}
    for name, group in hyper.items():
        same = json.dumps(to_json(_plain(group)), sort_keys=True)
        groups.setdefault(same, group)
        members.setdefault(same, []).append(name)
    return Optimizer("flat", dict(state), list(groups.values()), list(members.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value.number() if not value.shape else repr(value.place or value.twin or id(value))
    return map_values(value, lambda item, _: _plain(item))


def find_models(tree: Any, optimizer: Path | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Dictionaries that hold tensors by name, with those that are the optimizer's left out."""
    if path == optimizer or not isinstance(tree, dict) or len(path) > DEPTH:
        return
    keys = [key for key, value in tree.items() if isinstance(value, Leaf)]
    if keys and all(isinstance(key, str) for key in keys):
        yield path, tree
    for key, held in tree.items():
        yield from find_models(held, optimizer, (*path, key))


def choose_model(
    found: Found, models: Mapping[Path, dict[Any, Any]], optimizer: Optimizer | None
) -> Path:
    """The path of the one state dict that is the model's."""
    if not models:
        if optimizer is None:
            raise MissingData(
                f"{found.root} has no state of a model: no dictionary of tensors by name",
                hint="save model.state_dict(), alone or under a key",
            )
        raise MissingData(
            f"{found.root} has an optimizer's state, but no model's",
            hint="give the folder that has both; names and weights are in the model's",
        )
    fitting: dict[Path, dict[Any, Any]] = dict(models)
    if optimizer is not None and not optimizer.is_numbered:
        names = {name for members in optimizer.members for name in members}
        whole = {path: held for path, held in models.items() if names <= held.keys()}
        fitting = whole or fitting
    for likely in MODELS:
        for path in fitting:
            if dotted(path) == likely:
                return path
    sizes = {
        path: sum(is_float(leaf) and bool(leaf.shape) for leaf in held.values())
        for path, held in fitting.items()
    }
    if () in fitting:  # a loss or a generator's state may stand beside the model
        keys = [str(key) for key, value in fitting[()].items() if isinstance(value, Leaf)]
        qualified = any("." in key for key in keys)
        if qualified or sizes[()] >= max(sizes.values()):
            return ()
        del fitting[()]
    averages = [path for path in fitting if "ema" in re.split(r"[._]", dotted(path))]
    if len(averages) < len(fitting):
        fitting = {path: held for path, held in fitting.items() if path not in averages}
    if len(fitting) > 1:
        raise AmbiguousCheckpoint(
            f"{found.root} holds several models: {listed([*map(dotted, fitting)])}",
            hint="one checkpoint is of one model: save each in a file or directory of its own, or "
            f"call the one that is meant {MODELS[0]!r}",
        )
    return next(iter(fitting))


def value_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree
