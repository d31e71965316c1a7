"""A source of another engine, with what only a run of DeepSpeed knows: `--like RUN`.

    from RUN       stages and layers of a pipeline, rules of slices, groups and their members, the
                   ds_config, the order of parameters, the program's arguments
    from source    weights, masters, moments, steps, hyper-parameters, the scheduler

The result is a manifest like one of RUN, so that the writers need no second way. Both must have the
same parameters with the same shapes; rows that only pad a vocabulary may be missing. RUN may be a
universal checkpoint of such a run too. No tensor of RUN's model arrives.

Turned down: layers and groups by names. No file of another engine says where a layer is tied, or
how parameters are grouped and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ... import formats
from ...core import sources
from ...core.facts import FlatBufferEngine
from ...core.inert import unwrapped
from ...core.manifest import Entry, Manifest, Parameter
from ...core.weights import states_by_weight
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
)
from ...training.hyperparameters import given_groups
from ...training.objects import without_others
from ...training.optimizers import known_optimizer, plain_name
from ...training.options import ALLOW_OBJECT, Options
from ..deepspeed_states.hyper import OF_IMPLEMENTATIONS
from ..deepspeed_states.patterns import INFO
from ..reading import USUAL

SCHEDULED = ("last_batch_iteration", "last_epoch", "_step_count")  # counters of schedulers
OF_THE_NEXT = ("data_sampler", "random_ltd")  # states of RUN that count its own batches
ITERATION = "iteration"  # the step in the client state of Megatron-DeepSpeed
OF_RANKS = ("args", INFO)  # of the client state: they are about the grid

Group = dict[str, Any]


def as_in_run(source: Manifest, path: str, options: Options) -> Manifest:
    """The source with the stages, slices, groups and configuration of the run at `path`.

    Raises NotACheckpoint or UnsupportedCheckpoint (that is no run of DeepSpeed, or one with experts
    or elastic files), WrongOption (the source has ranks of its own, or another optimizer),
    MissingData (a parameter, a shape or a state does not fit), InconsistentCheckpoint (the members
    of one group differ).
    """
    if "model_ranks" in source.source:
        raise WrongOption(
            f"--like does not apply to {source.root}, whose files say how its ranks share a model",
            hint="leave it out",
        )
    with sources.watching() as watch:
        try:
            like = formats.recognize(path).functions.read(path, USUAL)
        except MissingData as error:
            raise MissingData(
                f"--like {path}: {error}",
                hint="convert it to a universal checkpoint with --tp-rules first, and give that",
            ) from error
        like = replace(like, fingerprints=watch.of(like.files))
    engine = like.engine
    if not isinstance(engine, FlatBufferEngine) or like.source.get("format") != "deepspeed":
        raise NotACheckpoint(
            f"--like {path} is no checkpoint of DeepSpeed",
            hint="give a directory that the next run has saved, or a universal checkpoint of one",
        )
    if engine.experts or like.groups is None:
        reason = "experts" if engine.experts else "no parameter groups"
        raise UnsupportedCheckpoint(
            f"--like does not work with {path}, which has {reason}",
            hint="leave out --like: the names of groups show which ones have experts"
            if engine.experts
            else "give a run without elastic_checkpoint",
        )
    like = without_others(like, formats.engine_objects(), options[ALLOW_OBJECT])
    return _Run(source, like, options).manifest()


class _Run:
    """The run of `--like`, and what the source has for it."""

    def __init__(self, source: Manifest, like: Manifest, options: Options) -> None:
        self.source = source
        self.like = like
        self.options = options
        self.warnings: list[str] = []
        self.owners = self._owners()

    def manifest(self) -> Manifest:
        source, like = self.source, self.like
        names = {owner: name for name, owner in self.owners.items()}
        entries = {
            entry.name: entry
            for entry in (*like.entries.values(), *source.entries.values())
            if entry.slot == "state"
        }
        for entry in source.entries.values():
            if entry.slot != "state" and entry.parameter in names:
                own = replace(entry, name=f"{names[entry.parameter]}/{entry.slot}")
                entries[own.name] = own
        if not self.options.weights_only:
            self._check_states(entries)
        return replace(
            source,
            source={**like.source, "tag": None},
            entries=entries,
            parameters={name: self._parameter(name) for name in like.parameters},
            buffers=like.buffers,
            groups=self._groups(),
            optimizer=like.optimizer,
            engine=like.engine,
            step_place=like.step_place,
            replicas=(),
            state=self._state(),
            warnings=(*source.warnings, *self.warnings),
            fingerprints={**like.fingerprints, **source.fingerprints},
        )

    # -- parameters

    def _owners(self) -> dict[str, str]:
        """The source's name of every weight and buffer of the run; raises MissingData."""
        source, like = self.source, self.like
        known = {*source.parameters, *source.buffers}
        tied = {alias: name for name, item in source.parameters.items() for alias in item.aliases}
        owners: dict[str, str] = {}
        for name in (*like.parameters, *like.buffers):
            item = like.parameters.get(name)
            every = (name, *(item.aliases if item is not None else ()))
            own = next((each for each in every if each in known), None)
            own = own or next((tied[each] for each in every if each in tied), None)
            if own is not None:
                owners[name] = own
        lost = [name for name in (*like.parameters, *like.buffers) if name not in owners]
        strangers = sorted(known.difference(owners.values()))
        if lost or strangers:
            sides = {"only the source has": strangers, "only --like has": lost}
            text = "; ".join(f"{what} {listed(n, 4)}" for what, n in sides.items() if n)
            raise MissingData(
                f"{source.root} and --like {like.root} have different parameters: {text}",
                hint="give a run of the same model; if only the names differ: --rename REGEX=REPL",
            )
        both: dict[str, str] = {}
        for name, owner in owners.items():
            if (other := both.setdefault(owner, name)) != name:
                raise MissingData(
                    f"{other} and {name} are one tied weight in {source.root}, and two weights in "
                    f"--like {like.root}",
                    hint="give a run of the same model",
                )
        shapes = {n: (_shape(source, owner), _shape(like, n)) for n, owner in owners.items()}
        wrong = [
            f"{name} ({list(own)} and {list(wanted)})"
            for name, (own, wanted) in shapes.items()
            if not self._fits(name, own, wanted)
        ]
        if wrong:
            raise MissingData(
                f"these have other shapes in {source.root} than in --like {like.root}: "
                f"{listed(wrong, 4)}",
                hint="give a run of the same model",
            )
        return owners

    def _fits(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Whether shapes are the same, or the run has more rows which only pad the vocabulary."""
        about = (self.like.state.get("tensor_parallel") or {}).get("vocabulary") or {}
        if shape == wanted or name not in about or shape[1:] != wanted[1:]:
            return shape == wanted
        return bool(about[name]["used"] <= shape[0] < wanted[0])

    def _parameter(self, name: str) -> Parameter:
        like, own = self.like.parameters[name], self.source.parameters.get(self.owners[name])
        if own is None:  # files of whole tensors do not separate buffers and frozen weights
            own = Parameter(_shape(self.source, self.owners[name]))
        return replace(own, trainable=like.trainable, group=like.group, aliases=like.aliases)

    def _check_states(self, entries: Mapping[str, Entry]) -> None:
        """Raises unless both train the same weights with an optimizer of the same states."""
        source, like = self.source, self.like
        ours, theirs = plain_name(source.optimizer or ""), plain_name(like.optimizer or "")
        families = known_optimizer(ours).family or ours, known_optimizer(theirs).family or theirs
        if all(families) and families[0] != families[1]:
            raise WrongOption(
                f"the optimizer of {source.root} is {source.optimizer}, that of --like "
                f"{like.optimizer}",
                hint="give a run with the optimizer of the source",
            )
        own, wanted = (states_by_weight(each.values()) for each in (entries, like.entries))
        for name, parameter in like.parameters.items():
            of_source = own.get(name, set())
            of_run = wanted.get(name, of_source if parameter.trainable else set())
            if of_source != of_run:
                raise MissingData(
                    f"{name} has the states {_listed(of_source)} in {source.root}, and "
                    f"{_listed(of_run)} in --like {like.root}",
                    hint="both must have the same optimizer and train the same weights",
                )

    # -- what is not a tensor

    def _groups(self) -> tuple[Group, ...]:
        """The run's groups with the source's hyper-parameters."""
        source, like = self.source, self.like
        groups = given_groups(source, self.options)
        chosen: dict[int, tuple[str, Group]] = {}
        for name, item in like.parameters.items():
            own = source.parameters.get(self.owners[name])
            if item.group is None or not item.trainable or own is None:
                continue
            first, group = chosen.setdefault(item.group, (name, groups[own.group or 0]))
            other = groups[own.group or 0]
            keys = [k for k in (like.groups or ())[item.group] if k not in OF_IMPLEMENTATIONS]
            if wrong := [
                key for key in keys if unwrapped(group.get(key)) != unwrapped(other.get(key))
            ]:
                raise InconsistentCheckpoint(
                    f"{first} and {name} are in one group of the run of --like, but the source "
                    f"has another {listed(wrong)} for each",
                    hint="give a run whose groups are those of the source",
                )
        result = []
        for number, theirs in enumerate(like.groups or ()):
            _, group = chosen.get(number, ("", {}))
            lost = [key for key in ("lr", "weight_decay") if key in theirs and key not in group]
            if lost and not self.options.weights_only:
                self.warnings.append(
                    f"{listed(lost)} of group {number} is as in --like: the source does not state "
                    "it"
                )
            result.append({key: _taken(key, value, group) for key, value in theirs.items()})
            self._warn_of_another_adam(number, theirs, group)
        return tuple(result)

    def _warn_of_another_adam(self, number: int, theirs: Group, ours: Group) -> None:
        key = "decoupled_weight_decay"
        if ours.get("weight_decay") and ours.get(key, True) != theirs.get(key, True):
            how = "weights" if theirs.get(key, True) else "gradients"
            self.warnings.append(
                f"group {number}: the optimizer of --like adds weight decay to {how}, that of the "
                "source does not"
            )

    def _state(self) -> dict[str, Any]:
        """The run's state, with the source's scheduler and client state; its own counters go."""
        source, like = self.source, self.like
        state = {key: value for key, value in like.state.items() if key != "counters"}
        optimizer = dict(state.get("optimizer") or {})
        for key in ("members", "other"):
            optimizer.pop(key, None)
        if other := (source.state.get("optimizer") or {}).get("other"):
            optimizer["other"] = other
        assert isinstance(like.engine, FlatBufferEngine)
        if like.engine.dtype == "F16":
            self.warnings.append("the loss scale is that of --like")
        if full := [key for key in OF_THE_NEXT if state.get(key)]:
            self.warnings.append(f"{listed(full)} is as in --like")
        theirs, ours = (dict(m.state.get("client_state") or {}) for m in (like, source))
        kept = {key: value for key, value in theirs.items() if key in OF_RANKS or key not in ours}
        if like.step is not None and kept.get(ITERATION) == like.step:
            kept[ITERATION] = int(source.step or 0)
        if lost := [str(key) for key in kept if key not in (INFO, ITERATION)]:
            self.warnings.append(f"the client state has {listed(lost)} of --like")
        return {
            **state,
            "optimizer": optimizer,
            "lr_scheduler": self._scheduler(),
            "client_state": {**ours, **kept},
            "counters": source.state.get("counters") or self._counters(),
        }

    def _counters(self) -> dict[str, Any]:
        """Those of a run of as many steps, each with as many samples as one of the run's."""
        step, before = int(self.source.step or 0), self.like.state.get("counters") or {}
        steps, samples = before.get("global_steps") or 0, before.get("global_samples") or 0
        rate, rest = divmod(int(samples), int(steps)) if steps else (0, 1)
        if rest:
            self.warnings.append("global_samples is 0: the samples of a step are unknown")
            rate = 0
        return {"global_steps": step, "skipped_steps": 0, "global_samples": rate * step}

    def _scheduler(self) -> Any:
        """The source's scheduler, else the run's with the counters of the source's step."""
        theirs, ours = (m.state.get("lr_scheduler") for m in (self.like, self.source))
        if ours is not None or not isinstance(theirs, dict):
            return ours
        steps = self.source.step, self.like.step
        more = None if None in steps else int(steps[0] or 0) - int(steps[1] or 0)
        counters = [key for key in SCHEDULED if type(theirs.get(key)) is int]
        if more is None or not counters:
            self.warnings.append("the scheduler of learning rates is as in --like")
            return theirs
        moved = {key: theirs[key] + more for key in counters}
        values = ", ".join(f"{key} = {value}" for key, value in moved.items())
        self.warnings.append(
            f"the scheduler of learning rates is that of --like, at the source's step: {values}"
        )
        return {**theirs, **moved}


def _shape(manifest: Manifest, name: str) -> tuple[int, ...]:
    parameter = manifest.parameters.get(name)
    return manifest.entries[f"{name}/param"].shape if parameter is None else parameter.shape


def _listed(slots: set[str]) -> str:
    return listed(sorted(slots)) if slots else "none"


def _taken(key: str, theirs: Any, group: Mapping[str, Any]) -> Any:
    """The source's hyper-parameter, in the form in which the run has it."""
    if key in OF_IMPLEMENTATIONS or key not in group:
        return theirs
    value = group[key]
    if isinstance(value, Sequence) and isinstance(theirs, (list, tuple)):
        return type(theirs)(value)
    return value
