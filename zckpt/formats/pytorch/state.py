"""What state dicts mean: which is the model's, which the optimizer's, and the manifest of both.

Programs choose the keys (`model`, `state_dict`, `app.model`, none; `optim`, `optimizer`), so state
dicts are known by what they hold. An optimizer's comes in three kinds (torch 2.13):

    nested    {"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}
    flat      {"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}: groups are lost
    raw       as nested, with numbers for names: places in all groups, one behind the other

The module's weights are what the optimizer updates; there are no masters beside them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ... import steps
from ...dtypes import FLOATS
from ...errors import (
    AmbiguousCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
)
from ...inert import TensorName, map_values, to_json
from ...manifest import Entry, Manifest, Parameter, Sighting, slot_name
from .tree import Found, Leaf

Path = tuple[Any, ...]
MODELS = ("model", "state_dict", "module", "model_state_dict", "app.model")  # the likeliest first
SCHEDULERS = ("lr_scheduler", "scheduler")
BUFFERS = re.compile(  # by what modules of torch and transformers call theirs
    r"(?:.*\.)?(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|attn_bias|masked_bias|causal_mask)"
)
DEPTH = 4
SAMPLE = 4096  # bytes


def manifest(
    found: Found, step_policy: str | None = None, param_names: Sequence[str] | None = None
) -> Manifest:
    """The manifest of state dicts; `param_names` where the optimizer knows numbers alone.

    Raises MissingData (no model; numbers that fit several names), UnsupportedCheckpoint (several
    optimizers), AmbiguousCheckpoint (several models), InconsistentCheckpoint.
    """
    optimizers = list(_optimizers(found.tree))
    if len(optimizers) > 1:
        raise UnsupportedCheckpoint(
            f"{found.root} holds {len(optimizers)} optimizers: "
            f"{listed([*map(_dotted, optimizers)])}"
        )
    at = optimizers[0] if optimizers else None
    optimizer = None if at is None else _optimizer(_at(found.tree, at))
    models: dict[Path, dict[Any, Any]] = dict(_models(found.tree, at))
    path = _model(found, models, optimizer)
    model = models[path]
    if optimizer is not None:
        _refuse_twice(found, [str(m) for members in optimizer.members for m in members])
        names = _names(found, model, optimizer, param_names)
        _refuse_twice(found, [names[m] for members in optimizer.members for m in members])
        if alien := [str(key) for key in optimizer.state if key not in names]:
            found.left_out.append(f"the state of {listed(alien)}, which no group holds")
        optimizer = optimizer.renamed(names)
    return _Reading(found, path, model, at, optimizer, step_policy).manifest()


# -- state dicts, by what they hold


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer's state by name (or number), and its groups with their members."""

    layout: str
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]
    members: list[list[Any]] = field(default_factory=list)

    @property
    def is_numbered(self) -> bool:
        return any(type(member) is int for members in self.members for member in members)

    def renamed(self, names: Mapping[Any, str]) -> _Optimizer:
        return replace(
            self,
            state={names[key]: held for key, held in self.state.items() if key in names},
            members=[[names[member] for member in members] for members in self.members],
        )


def _optimizers(tree: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(tree, dict) and _is_optimizer(tree):
        yield path
    elif len(path) < DEPTH and isinstance(tree, (dict, list)):
        for key, held in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _optimizers(held, (*path, key))


def _is_optimizer(held: dict[Any, Any]) -> bool:
    groups = held.get("param_groups")
    if isinstance(groups, list):
        return all(isinstance(group, dict) and "params" in group for group in groups)
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in held)


def _optimizer(held: dict[Any, Any]) -> _Optimizer:
    if "param_groups" not in held:
        return _flat(held)
    state = held.get("state") or {}
    members = [list(group["params"]) for group in held["param_groups"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in held["param_groups"]
    ]
    made = _Optimizer("nested", state, groups, members)
    if not made.is_numbered:
        return made
    # planners of torch.distributed.checkpoint make texts of the numbers
    return replace(made, layout="raw", state={int(key): value for key, value in state.items()})


def _flat(held: dict[Any, Any]) -> _Optimizer:
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
    return _Optimizer("flat", dict(state), list(groups.values()), list(members.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value.number() if not value.shape else repr(value.place or value.twin or id(value))
    return map_values(value, lambda item, _: _plain(item))


def _models(tree: Any, optimizer: Path | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Dictionaries that hold tensors by name, with those that are the optimizer's left out."""
    if path == optimizer or not isinstance(tree, dict) or len(path) > DEPTH:
        return
    if any(isinstance(held, Leaf) and isinstance(key, str) for key, held in tree.items()):
        yield path, tree
    for key, held in tree.items():
        yield from _models(held, optimizer, (*path, key))


def _model(
    found: Found, models: Mapping[Path, dict[Any, Any]], optimizer: _Optimizer | None
) -> Path:
    """The path of the one state dict that is the model's."""
    if not models:
        raise MissingData(
            f"{found.root} holds an optimizer's state, but no model's",
            hint="give the folder that holds both; names and weights are in the model's",
        )
    fitting: dict[Path, dict[Any, Any]] = dict(models)
    if optimizer is not None and not optimizer.is_numbered:
        names = {name for members in optimizer.members for name in members}
        whole = {path: held for path, held in models.items() if names <= held.keys()}
        fitting = whole or fitting
    for likely in MODELS:
        for path in fitting:
            if _dotted(path) == likely:
                return path
    sizes = {
        path: sum(_is_float(leaf) and bool(leaf.shape) for leaf in held.values())
        for path, held in fitting.items()
    }
    if () in fitting:  # a loss or a generator's state may stand beside the model
        keys = [str(key) for key, value in fitting[()].items() if isinstance(value, Leaf)]
        dotted = any("." in key for key in keys)
        if dotted or sizes[()] >= max(sizes.values()):
            return ()
        del fitting[()]
    averages = [path for path in fitting if "ema" in re.split(r"[._]", _dotted(path))]
    if len(averages) < len(fitting):
        fitting = {path: held for path, held in fitting.items() if path not in averages}
    if len(fitting) > 1:
        raise AmbiguousCheckpoint(
            f"{found.root} holds several models: {listed([*map(_dotted, fitting)])}",
            hint="one checkpoint is of one model: save each in a file or directory of its own, or "
            f"call the one that is meant {MODELS[0]!r}",
        )
    return next(iter(fitting))


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _names(
    found: Found,
    model: Mapping[str, Any],
    optimizer: _Optimizer,
    param_names: Sequence[str] | None,
) -> dict[Any, str]:
    """The model's name of every parameter that the optimizer knows."""
    if optimizer.is_numbered:
        return _matched(found, model, optimizer, param_names)
    known = [name for members in optimizer.members for name in members]
    if all(name in model for name in known):
        return {name: name for name in known}
    from ...naming import matched

    return dict(matched(known, [name for name in model if isinstance(model[name], Leaf)]))


def _refuse_twice(found: Found, members: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(members).items() if count > 1]:
        raise InconsistentCheckpoint(
            f"{found.root}: the optimizer holds {listed(twice)} more than once",
            hint="the file was edited: torch gives every parameter to one group, once",
        )


def _matched(
    found: Found,
    model: Mapping[str, Any],
    optimizer: _Optimizer,
    param_names: Sequence[str] | None,
) -> dict[int, str]:
    """Names for numbers: as groups tell them (torch 2.6's `param_names`), else by shapes."""
    numbers = [number for members in optimizer.members for number in members]
    if found.known is not None and len(found.known.get("numbers", ())) == len(numbers):
        return dict(zip(numbers, found.known["numbers"], strict=True))
    told = [name for group in optimizer.groups for name in group.get("param_names") or ()]
    if len(told) == len(numbers) and not set(told) <= model.keys():
        told = _without_wrappers(told, model)
    if len(told) == len(numbers):
        _refuse_mixed(found, [_shape(optimizer.state.get(n, {})) for n in numbers], told, model)
        return dict(zip(numbers, told, strict=True))
    if param_names is not None and not set(param_names) <= model.keys():
        from ...naming import matched

        param_names = list(matched(param_names, list(model)).values())
    from .matching import match

    orders = found.orders or optimizer.members
    shapes = {number: _shape(optimizer.state.get(number, {})) for number in numbers}
    owners = [name for name in model if _is_float(model[name])]
    if len(owners) != len(numbers):  # else these are all, whichever hold the same
        owners = _owners(model, owners)
    candidates = [(name, model[name].shape) for name in owners]
    names = match([[shapes[n] for n in order] for order in orders], candidates, param_names)
    given = {
        number: name
        for order, each in zip(orders, names, strict=True)
        for number, name in zip(order, each, strict=True)
    }
    if param_names is None:
        _refuse_copies(model, optimizer, given, set(owners))
    found.warnings.append(
        "the optimizer knows its parameters by number: each was given the one name that its shape "
        "and its place allow"
        if param_names is None
        else "the optimizer knows its parameters by number: names are those of --param-names"
    )
    return given


def _refuse_copies(
    model: Mapping[str, Any], optimizer: _Optimizer, given: Mapping[int, str], owners: set[str]
) -> None:
    """Raises where a number may as well be that of a copy: only an update tells copies apart."""
    from .matching import HINT

    rest = {held.twin: n for n, held in model.items() if _is_float(held) and n not in owners}
    for number, name in given.items():
        held = model[name]
        known_apart = held.twin is None or held.place is not None
        if known_apart or held.twin not in rest or _is_updated(optimizer.state.get(number, {})):
            continue
        raise MissingData(
            f"the optimizer knows its parameters by number, and {name} and {rest[held.twin]} hold "
            "the same: no update shows which of them it has",
            hint=HINT,
        )


def _without_wrappers(told: Sequence[str], model: Mapping[str, Any]) -> list[str]:
    """The model's names of those that a wrapper's optimizer was given; none where no rule fits."""
    from ...naming import matched

    held = [name for name, leaf in model.items() if isinstance(leaf, Leaf)]
    try:
        return list(matched(told, held).values())
    except (MissingData, WrongOption):
        return []


def _refuse_mixed(
    found: Found,
    shapes: Sequence[tuple[int, ...] | None],
    told: Sequence[str],
    model: Mapping[str, Any],
) -> None:
    """Raises where names have the shapes that states have, but in another order.

    Some optimizers keep states of other shapes than their weights: these tell nothing.
    """
    pairs = [(name, model[name].shape, shape) for name, shape in zip(told, shapes, strict=True)]
    held = [pair for pair in pairs if pair[2] is not None]
    if Counter(own for _, own, _ in held) == Counter(shape for _, _, shape in held):
        for name, own, shape in held:
            if shape != own:
                raise InconsistentCheckpoint(
                    f"{found.root}: param_names gives {name} of shape {list(own)} a state of shape "
                    f"{list(shape or ())}",
                    hint="names and states are of two different orders of parameters",
                )


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, as its states tell it; None without any."""
    shapes = [held.shape for key, held in state.items() if isinstance(held, Leaf) and key != "step"]
    return max(shapes, key=len, default=None)


def _is_float(held: Any) -> bool:
    return isinstance(held, Leaf) and held.dtype in FLOATS


def _owners(model: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Of several that hold the same the first.

    Where the file tells what is one memory, equal bytes are two weights: a frozen copy, as of a
    teacher or a reference, is the model's first as often as its second.
    """
    seen = _Seen()

    def owner(name: str) -> str:
        held = model[name]
        return seen.owner(name, held if held.place is None else replace(held, twin=None))

    return [name for name in names if owner(name) == name]


def _is_updated(state: Mapping[str, Any]) -> bool:
    """Whether there are moments: torch's helpers count an update that was none."""
    return any(isinstance(h, Leaf) and h.shape and _is_telling(h) for h in state.values())


class _Seen:
    """Leaves by what they hold, so that the second names of tied weights are found."""

    def __init__(self) -> None:
        self.places: dict[Any, str] = {}
        self.twins: dict[Any, str] = {}

    def add(self, name: str, held: Leaf) -> None:
        self.places.setdefault(held.place, name)
        self.twins.setdefault(held.twin, name)

    def find(self, held: Leaf) -> str | None:
        """Who holds the same: one memory, or equal bytes that are no chance."""
        if held.place is not None and held.place in self.places:
            return self.places[held.place]
        if held.twin is not None and held.twin in self.twins and _is_telling(held):
            return self.twins[held.twin]
        return None

    def owner(self, name: str, held: Leaf) -> str:
        """Who held the same before; itself, and then it is remembered."""
        found = self.find(held)
        if found is None:
            self.add(name, held)
        return found or name


def _is_telling(held: Leaf) -> bool:
    """Whether two tensors with these bytes are one: zeros and ones are met by chance."""
    first = next(iter(held.fragments), None)
    if first is None or held.numel < 2:
        return False
    with open(first.extent.file, "rb") as file:
        sample = os.pread(file.fileno(), min(SAMPLE, first.extent.length), first.extent.offset)
    size = first.extent.length // ((first.stop - first.start) * first.count)
    return sample != sample[:size] * (len(sample) // size)


# -- the manifest


class _Reading:
    """A manifest in the making."""

    def __init__(
        self,
        found: Found,
        path: Path,
        model: Mapping[Any, Any],
        at: Path | None,
        optimizer: _Optimizer | None,
        step_policy: str | None,
    ) -> None:
        self.found = found
        self.path = path
        self.model = {name: held for name, held in model.items() if isinstance(held, Leaf)}
        self.at = at
        self.optimizer = optimizer
        self.step_policy = step_policy
        self.entries: dict[str, Entry] = {}
        self.replicas: list[Entry] = []
        self.parameters: dict[str, Parameter] = {}
        self.buffers: list[str] = []
        self.other: dict[str, dict[str, Any]] = {}
        self.sightings: list[Sighting] = []
        self.warnings = list(found.warnings)

    def manifest(self) -> Manifest:
        optimizer, found = self.optimizer, self.found
        trained = [name for members in optimizer.members for name in members] if optimizer else []
        known = found.known
        aliases = self._aliases(trained) if known is None else dict(known["aliases"])
        stepped = self._steps()
        scalars = self._scalar_keys()
        for group, members in enumerate(optimizer.members if optimizer else ()):
            for name in members:
                self._weight(
                    name, Parameter(self.model[name].shape, True, group, stepped.get(name))
                )
                self._states(name, scalars)
        owned = set(trained)
        rest = [name for name in self.model if name not in owned and name not in aliases]
        sharded = any(self.model[name].sharded for name in trained)
        self.buffers = [
            name
            for name in rest
            if (
                _is_buffer(name, self.model[name], sharded)
                if known is None
                else name in known["buffers"]
            )
        ]
        for name in rest:
            if name not in self.buffers:
                # without an optimizer nothing tells which are frozen
                frozen = optimizer is not None if known is None else name in known["frozen"]
                self._weight(name, Parameter(self.model[name].shape, not frozen))
        for name in self.buffers:
            self._enter(f"{name}/param", self.model[name])
        for alias, owner in aliases.items():
            held = self.parameters.get(owner)
            if held is None:  # of a buffer: both names keep it
                self.buffers.append(alias)
                self._enter(f"{alias}/param", self.model[alias])
                continue
            self.parameters[owner] = replace(held, aliases=(*held.aliases, alias))
            place = self.model[alias].place
            if place is None or place != self.model[owner].place:
                copy = self.model[alias].fragments
                self.replicas.append(replace(self.entries[f"{owner}/param"], fragments=copy))
        groups = self._groups() if optimizer else None
        state = self._state()
        keys = {key for held in (optimizer.state if optimizer else {}).values() for key in held}
        return Manifest(
            root=found.root,
            format=str(found.source["format"]),
            source=found.source,
            entries=self.entries,
            parameters=self.parameters,
            buffers=tuple(self.buffers),
            groups=groups,
            optimizer=steps.infer_optimizer(keys, groups[0] if groups else None),
            state=state,
            steps=tuple(self.sightings),
            records=tuple(found.records),
            replicas=tuple(self.replicas),
            files=tuple(found.files),
            siblings=tuple(found.siblings),
            left_out=tuple(found.left_out),
            warnings=tuple(self.warnings),
        )

    def _aliases(self, trained: Sequence[str]) -> dict[str, str]:
        """Second names of tied weights: in one memory, or with equal bytes that are no chance.

        A tied weight's state is under its first name, so the second is no parameter of its own.
        Before the first update a frozen copy has equal bytes too, as of a teacher: it is none where
        the file tells what is one memory.
        """
        seen = _Seen()
        for name in trained:
            seen.add(name, self.model[name])
        owned = set(trained)
        state = self.optimizer.state if self.optimizer else {}
        rest = [name for name in self.model if name not in owned]
        found: dict[str, str] = {}
        for name in rest:
            owner = seen.find(self.model[name])
            if owner is None:  # of what no optimizer owns one memory alone tells
                owner = seen.owner(name, replace(self.model[name], twin=None))
            places = [self.model[each].place for each in (name, owner)]
            if owner in owned and places[0] != places[1] and not _is_updated(state.get(owner, {})):
                continue
            if owner != name:
                found[name] = owner
        doubtful = [
            name
            for name, owner in found.items()
            if owner in owned
            and self.model[name].place is None
            and not _is_updated(state.get(owner, {}))
        ]
        if doubtful:
            self.warnings.append(
                f"{listed(doubtful, 4)}: equal to a trained weight that shows no update, so taken "
                "for a second name of a tied weight; it may be a frozen copy"
            )
        return found

    def _enter(self, name: str, held: Leaf) -> None:
        self.entries[name] = Entry(name, held.dtype, held.shape, held.fragments)

    def _weight(self, name: str, parameter: Parameter) -> None:
        self.parameters[name] = parameter
        self._enter(f"{name}/param", self.model[name])

    def _scalar_keys(self) -> set[str]:
        """States that are 0-d, as NAdam's `mu_product`, also where a parameter is 0-d itself."""
        return {
            key
            for name, state in (self.optimizer.state if self.optimizer else {}).items()
            for key, held in state.items()
            if isinstance(held, Leaf) and not held.shape and self.model[name].shape
        }

    def _states(self, name: str, scalars: set[str]) -> None:
        assert self.optimizer is not None
        kept = self.parameters[name]
        for key, held in self.optimizer.state.get(name, {}).items():
            if key == "step":
                continue
            if isinstance(held, Leaf) and not held.shape and key in scalars:
                kept.scalars[key] = held.number()
            elif isinstance(held, Leaf) and held.shape == kept.shape:
                self._enter(f"{name}/{slot_name(key)}", held)
            else:
                self.other.setdefault(name, {})[key] = held

    # -- steps

    def _steps(self) -> dict[str, steps.Step]:
        """Completed updates by parameter, and every place that told them."""
        if self.optimizer is None:
            return {}
        told: dict[str, tuple[steps.Step, str]] = {}
        for name, state in self.optimizer.state.items():
            if (step := _step(state.get("step"))) is not None:
                told[name] = step
        self._sight(told, "state", True)
        in_groups = {
            name: step
            for group, members in zip(self.optimizer.groups, self.optimizer.members, strict=True)
            if (step := _step(group.get("step"))) is not None
            for name in members
        }
        self._sight(in_groups, "group", not told)
        true = told or in_groups
        found = {name: step for name, (step, _) in true.items()}
        if self.step_policy not in (None, steps.KEEP):
            agreed = steps.agree(list(found.items()), self.step_policy)
            if agreed is not None:
                found = dict.fromkeys(found, agreed)
        return found

    def _sight(self, told: Mapping[str, tuple[steps.Step, str]], where: str, truth: bool) -> None:
        """A line for each step that is told, not one for each parameter."""
        names: dict[tuple[steps.Step, str], list[str]] = {}
        for name, pair in told.items():
            names.setdefault(pair, []).append(name)
        for (step, kind), held in names.items():
            what = f"{where} of {listed(held, 1)}"
            self.sightings.append(Sighting(what, step, truth))
            if truth and (warning := steps.stalled(step, kind, what)):
                self.warnings.append(warning)

    # -- what is no tensor

    def _groups(self) -> tuple[dict[str, Any], ...]:
        assert self.optimizer is not None
        return tuple(
            {
                key: self._kept(value, f"param_groups.{place}.{key}")
                for key, value in group.items()
                if key not in ("step", "param_names")
            }
            for place, group in enumerate(self.optimizer.groups)
        )

    def _state(self) -> dict[str, Any]:
        """Everything else, so that state dicts can be made again."""
        rest = _without(self.found.tree, {self.path, self.at})
        extra = {
            key: self._kept(held, f"module_extra.{key}")
            for key, held in _at(self.found.tree, self.path).items()
            if not isinstance(held, Leaf) and (self.path or _is_extra(key))
        }
        if not self.path:
            rest = {key: held for key, held in rest.items() if not _is_extra(key)}
        scheduler = next((key for key in SCHEDULERS if isinstance(rest.get(key), dict)), None)
        dtypes = [self.entries[f"{name}/param"].dtype for name in self.parameters]
        engine = {
            "name": "torch",
            "dtype": max(dtypes, key=dtypes.count, default="F32"),
            "model": list(self.path),
            "optimizer": None if self.at is None else list(self.at),
            "layout": self.optimizer.layout if self.optimizer else None,
            "scheduler": scheduler,
            "folders": self.found.folders,
            "guessed": self.found.known is None,
            "group_step": self._group_step(),
        }
        state: dict[str, Any] = {
            "engine": engine,
            "module": list(self.model),
            "module_extra": extra,
        }
        if scheduler is not None:
            state["lr_scheduler"] = self._kept(rest.pop(scheduler), "lr_scheduler")
            self._sight_scheduler(state["lr_scheduler"])
        if rest:
            state["client_state"] = self._kept(rest, "client_state")
        if self.other:
            state["optimizer"] = {"other": self._kept(self.other, "optimizer.other")}
        kinds = {kind for name in self.parameters if (kind := self._step_kind(name)) is not None}
        if len(kinds) == 1 and kinds != {"F32"}:
            state.setdefault("optimizer", {})["step"] = {"in": "state", "type": kinds.pop()}
        return state

    def _group_step(self) -> str | None:
        """The type of a step that groups alone keep (Apex and TransformerEngine's FusedAdam)."""
        optimizer = self.optimizer
        if optimizer is None or any("step" in held for held in optimizer.state.values()):
            return None
        kinds = {_step_value(group["step"])[1] for group in optimizer.groups if "step" in group}
        return kinds.pop() if len(kinds) == 1 else None

    def _step_kind(self, name: str) -> str | None:
        held = (self.optimizer.state.get(name, {}) if self.optimizer else {}).get("step")
        return None if held is None else _step_value(held)[1]

    def _sight_scheduler(self, scheduler: Mapping[str, Any]) -> None:
        for key in ("last_epoch", "_step_count"):
            if (step := steps.step_of(scheduler.get(key))) is not None:
                self.sightings.append(Sighting(f"lr_scheduler, {key}", step, False))

    def _kept(self, value: Any, path: str) -> Any:
        """`value` with its tensors as entries of slot `state`; 0-d ones by value."""
        if isinstance(value, Leaf):
            if not value.shape and value.dtype != "C64":
                return value.number()
            name = value.name or path
            self._enter(f"{name}/state", value)
            return TensorName(name)
        return map_values(value, lambda held, key: self._kept(held, f"{path}.{_plain_key(key)}"))


def _plain_key(key: Any) -> str:
    plain = isinstance(key, str) and re.fullmatch(r"[^\W\d][\w-]*", key)
    return key if plain else repr(key)


def _step_value(held: Any) -> tuple[Any, str]:
    value = held.number() if isinstance(held, Leaf) else held
    return value, steps.kind_of(value)


def _step(held: Any) -> tuple[steps.Step, str] | None:
    """Completed updates, and the type that they were kept in."""
    if held is None or (isinstance(held, Leaf) and held.numel != 1):
        return None
    value, kind = _step_value(held)
    step = steps.step_of(value)
    return None if step is None else (step, kind)


def _is_buffer(name: str, held: Leaf, sharded: bool) -> bool:
    """What is no parameter, where state dicts do not say it.

    What no optimizer could train; what is called as modules call theirs; what is whole where ranks
    hold parts of the parameters (those of one row may be whole).
    """
    whole = sharded and held.sharded is False and held.shape[:1] != (1,)
    return held.dtype not in FLOATS or whole or bool(BUFFERS.fullmatch(name))


def _is_extra(key: Any) -> bool:
    """What a module's get_extra_state gave."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def _without(tree: Any, paths: set[Path | None], path: Path = ()) -> Any:
    """The tree without the state dicts at these paths, nor containers that held nothing else."""
    if () in paths and not path:
        held = {key: value for key, value in tree.items() if not isinstance(value, Leaf)}
        return _without(held, paths - {()})
    if not isinstance(tree, dict):
        return tree
    found = {}
    for key, value in tree.items():
        if (*path, key) in paths:
            continue
        kept = _without(value, paths, (*path, key))
        if kept != {} or value == {}:
            found[key] = kept
    return found
