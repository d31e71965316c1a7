"""What state dicts mean: the manifest of a model's and an optimizer's.

The module's weights are what the optimizer updates; there are no masters beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.dtypes import FLOATS, NUMBERS
from ...core.inert import PYTHON_NUMBERS, Scalar, TensorName, inside, map_values
from ...core.manifest import Entry, Manifest, Parameter, Sighting, slot_name
from ...errors import MissingData, UnsupportedCheckpoint, listed
from ...training import peft, steps, ties
from ...training.trainers import json_of
from .finding import Optimizer, choose_model, find_models, find_optimizers, read_optimizer, value_at
from .names import names_of, refuse_twice
from .tree import Found, Leaf, Path, dotted
from .twins import Seen, is_updated

SCHEDULERS = ("lr_scheduler", "scheduler")
BUFFERS = re.compile(  # by what modules of torch and transformers call theirs
    r"(?:.*\.)?(?:running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|attn_bias|masked_bias|causal_mask)"
)


def manifest(
    found: Found,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of state dicts; `param_names` where the optimizer knows numbers alone.

    With `weights_only`, an optimizer whose numbers get no names is left unread.

    Raises MissingData (no model; numbers that fit several names), UnsupportedCheckpoint (several
    optimizers), AmbiguousCheckpoint (several models), InconsistentCheckpoint.
    """
    optimizers = list(find_optimizers(found.tree))
    if len(optimizers) > 1:
        raise UnsupportedCheckpoint(
            f"{found.root} holds {len(optimizers)} optimizers: {listed([*map(dotted, optimizers)])}"
        )
    at = optimizers[0] if optimizers else None
    optimizer = None if at is None else read_optimizer(value_at(found.tree, at))
    models: dict[Path, dict[Any, Any]] = dict(find_models(found.tree, at))
    path = choose_model(found, models, optimizer)
    model = _with_adapters_names(found, models[path], optimizer, param_names)
    if optimizer is not None:
        refuse_twice(found, [str(m) for members in optimizer.members for m in members])
        try:
            names = names_of(found, model, optimizer, param_names)
        except MissingData:
            if not weights_only:
                raise
            return _Reading(found, path, model, at, None, step_policy).manifest()
        refuse_twice(found, [names[m] for members in optimizer.members for m in members])
        if alien := [str(key) for key in optimizer.state if key not in names]:
            found.left_out.append(f"the state of {listed(alien)}, which no group holds")
        optimizer = optimizer.renamed(names)
    return _Reading(found, path, model, at, optimizer, step_policy).manifest()


def _with_adapters_names(
    found: Found,
    model: Mapping[Any, Any],
    optimizer: Optimizer | None,
    param_names: Sequence[str] | None,
) -> Mapping[Any, Any]:
    """The model's state under the module's own names, where PEFT left an adapter's name out."""
    known = [*(param_names or ()), *(found.known or {}).get("numbers", ())]
    if optimizer is not None:
        known += [name for group in optimizer.groups for name in group.get("param_names") or ()]
        known += [str(name) for members in optimizer.members for name in members]
    names = [str(name) for name in model]
    changed = peft.module_names(names, known, json_of(found.siblings, peft.CONFIG))
    found.adapter = bool(changed)
    return {changed.get(name, name): leaf for name, leaf in model.items()} if changed else model


class _Reading:
    """A manifest in the making."""

    def __init__(
        self,
        found: Found,
        path: Path,
        model: Mapping[Any, Any],
        at: Path | None,
        optimizer: Optimizer | None,
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
        self.step_kinds: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.warnings = list(found.warnings)

    def manifest(self) -> Manifest:
        optimizer, found = self.optimizer, self.found
        trained = [name for members in optimizer.members for name in members] if optimizer else []
        known = found.known
        aliases = self._aliases(trained) if known is None else dict(known["aliases"])
        config = json_of(found.siblings, ties.CONFIG)
        self.aliases = aliases = aliases | ties.stated(config, [*self.model, *aliases])
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
            if alias not in self.model:
                continue
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
            inferred=tuple(found.inferred),
        )

    def _aliases(self, trained: Sequence[str]) -> dict[str, str]:
        """Second names of tied weights: in one memory, or with equal bytes that are no chance.

        A tied weight's state is under its first name, so the second is no parameter of its own.
        Before the first update a frozen copy has equal bytes too, as of a teacher: it is none where
        the file tells what is one memory.
        """
        seen = Seen()
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
            if owner in owned and places[0] != places[1] and not is_updated(state.get(owner, {})):
                continue
            if owner != name:
                found[name] = owner
        doubtful = [
            name
            for name, owner in found.items()
            if owner in owned
            and self.model[name].place is None
            and not is_updated(state.get(owner, {}))
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
        """States of one number, as NAdam's `mu_product`: Python's, or a tensor of one element.

        They are numbers also of a parameter that has the same shape itself.
        """
        return {
            key
            for name, state in (self.optimizer.state if self.optimizer else {}).items()
            for key, value in state.items()
            if _is_number(value)
            and not (isinstance(value, Leaf) and value.shape == self.model[name].shape)
        }

    def _states(self, name: str, scalars: set[str]) -> None:
        assert self.optimizer is not None
        kept = self.parameters[name]
        for key, held in self.optimizer.state.get(name, {}).items():
            if key == "step":
                continue
            if key in scalars and _is_number(held):
                kept.scalars[key] = _number(held)
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
        self.step_kinds = {kind for _, kind in told.values()}
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
            for key, held in value_at(self.found.tree, self.path).items()
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
            "adapter": self.found.adapter,
            "group_step": self._group_step(),
        }
        state: dict[str, Any] = {
            "engine": engine,
            "module": list(dict.fromkeys((*self.model, *self.aliases, *extra))),
            "module_extra": extra,
        }
        if scheduler is not None:
            state["lr_scheduler"] = self._kept(rest.pop(scheduler), "lr_scheduler")
            self._sight_scheduler(state["lr_scheduler"])
        if rest:
            state["client_state"] = self._kept(rest, "client_state")
        if self.other:
            state["optimizer"] = {"other": self._kept(self.other, "optimizer.other")}
        if len(self.step_kinds) == 1 and self.step_kinds != {"F32"}:
            (kind,) = self.step_kinds
            state.setdefault("optimizer", {})["step"] = steps.StepPlace("state", kind).to_state()
        return state

    def _group_step(self) -> str | None:
        """The type of a step that groups alone keep (Apex and TransformerEngine's FusedAdam)."""
        optimizer = self.optimizer
        if optimizer is None or any("step" in held for held in optimizer.state.values()):
            return None
        kinds = {_step_value(group["step"])[1] for group in optimizer.groups if "step" in group}
        return kinds.pop() if len(kinds) == 1 else None

    def _sight_scheduler(self, scheduler: Mapping[str, Any]) -> None:
        self.sightings += steps.counter_sightings(
            "lr_scheduler", scheduler, steps.SCHEDULER_COUNTERS
        )

    def _kept(self, value: Any, path: str) -> Any:
        """`value` with its tensors as entries of slot `state`; 0-d ones by value."""
        if isinstance(value, Leaf):
            if not value.shape and value.dtype != "C64":
                return value.number()
            name = value.name or path
            self._enter(f"{name}/state", value)
            return TensorName(name)
        return map_values(value, lambda held, key: self._kept(held, inside(path, key)))


def _is_number(value: Any) -> bool:
    """Whether a state is one number: Python's, or a tensor of one element."""
    if isinstance(value, Leaf):
        return value.numel == 1 and value.dtype in NUMBERS
    return type(value) in PYTHON_NUMBERS.values()


def _number(value: Any) -> Scalar:
    if isinstance(value, Leaf):
        return replace(value.number(), shape=value.shape)
    return Scalar(value, type(value).__name__)


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
