"""`--like RUN`: completes a source of another engine with facts that only a DeepSpeed run has.

    from RUN       stages and layers of a pipeline, rules for tensor-parallel slices, param groups
                   and their members, the ds_config, the order of parameters, the program's
                   arguments
    from source    weights, masters, moments, steps, hyper-parameters, and the scheduler's state, if
                   the program of RUN can load it

The result is a manifest like RUN's, so the writers need no special case. The source and RUN must
have the same parameters with the same shapes; the source may lack rows that only pad a vocabulary.
RUN may also be a universal checkpoint of a DeepSpeed run. No tensor of RUN's model is used.

Rejected alternative: to infer layers and groups from names. No file of another engine states which
layers are tied, or how parameters are grouped and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.facts import UNCUT, FlatBufferEngine
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.optimizer_states import Form
from ...errors import MissingData, UnsupportedCheckpoint, WrongOption, listed, warning
from ...naming.patterns import INFO
from ...training.options import Options
from ...training.trainers_steps import counted_updates
from ..deepspeed_states import schedulers
from ..deepspeed_states.hyper import OF_IMPLEMENTATIONS
from ..template import Group, Template

SCHEDULED = ("last_batch_iteration", "last_epoch", "_step_count")  # counters of schedulers
OF_THE_NEXT = ("data_sampler", "random_ltd")  # states of RUN that count its own batches
ITERATION = "iteration"  # the step in Megatron-DeepSpeed's client state
OF_SOURCE: tuple[Form, ...] = ("number", "other", "unsupported")
"""Kinds of optimizer states that the target takes from the converted checkpoint (the source).

All other kinds are taken from the run that the user names with `--like`.
"""
OF_RANKS = ("args", INFO)  # keys of the client state that describe the grid


def as_in_run(source: Manifest, like: Manifest, options: Options) -> Manifest:
    """Gives the source the pipeline stages, tensor-rank cuts, groups and ds_config of `like`.

    Raises UnsupportedCheckpoint (`like` has experts or elastic files), WrongOption (the source's
    manifest has model ranks of its own, or its optimizer differs), MissingData (a parameter, shape
    or state does not fit) and InconsistentCheckpoint (the source has different hyper-parameters
    within a group of `like`).
    """
    if source.ranks:
        raise WrongOption(
            "option-not-applicable",
            f"--like does not apply to {source.root}: its own files say how its ranks share the "
            "model",
            hint="leave it out",
        )
    assert isinstance(like.run.engine, FlatBufferEngine)
    if like.run.engine.experts or like.groups is None:
        reason, hint = "no parameter groups", "give a run that was saved without elastic_checkpoint"
        if like.run.engine.experts:
            reason = "experts"
            hint = "leave out --like: the names of groups show which ones have experts"
        raise UnsupportedCheckpoint(
            "like-does-not-fit",
            f"--like does not work with {like.root}, which has {reason}",
            hint=hint,
            file=like.root,
        )
    slices = like.run.tensor_parallel or UNCUT
    rows = {name: own.used for name, own in slices.vocabularies.items()}
    return _Run(source, like, options, rows).manifest()


class _Run(Template):
    way_to_groups = "--groups-from RUN uses the groups and hyper-parameters of that run"

    def manifest(self) -> Manifest:
        source, like = self.source, self.run
        self._need_own_weights()
        every = (*like.entries.values(), *source.entries.values())
        entries = {entry.key: entry for entry in every if entry.slot == "state"} | self.entries()
        if not self.options.weights_only:
            self.check_states(entries)
        return source.replace(
            origin=replace(like.run.origin, tag=None),
            entries=entries,
            parameters=self.parameters(),
            buffers=like.buffers,
            groups=self._groups(),
            optimizer=like.optimizer,
            engine=like.run.engine,
            step_place=like.run.step_place,
            pipeline=like.run.pipeline,
            tensor_parallel=like.run.tensor_parallel,
            replicas=(),
            state=self._state(),
            states=like.states.without_form(*OF_SOURCE) + self.own_states.of_form(*OF_SOURCE),
            warnings=(*source.notices.warnings, *self.warnings),
            fingerprints={**like.files.fingerprints, **source.files.fingerprints},
        )

    def _need_own_weights(self) -> None:
        """Raises MissingData if a tied weight of the source is two separate weights in the run."""
        both: dict[str, str] = {}
        for name, owner in self.owners.items():
            if (other := both.setdefault(owner, name)) != name:
                raise MissingData(
                    "like-does-not-fit",
                    f"{other} and {name} are one tied weight in {self.source.root}, and two "
                    f"weights in --like {self.run.root}",
                    hint="give a run of the same model",
                    file=self.source.root,
                    subject=name,
                )

    # -- what is not a tensor

    def _groups(self) -> tuple[Group, ...]:
        groups = self.run.groups or ()
        chosen = self.own_groups(
            lambda number: [key for key in groups[number] if key not in OF_IMPLEMENTATIONS]
        )
        result = []
        for number, theirs in enumerate(groups):
            _, group = chosen.get(number, ("", {}))
            lost = [key for key in ("lr", "weight_decay") if key in theirs and key not in group]
            if lost and not self.options.weights_only:
                message = (
                    f"{listed(lost)} of group {number} is taken from --like: the source does not "
                    "state it"
                )
                self.warnings.append(warning("value-assumed", message, subject=lost[0]))
            result.append(
                {key: _hyper_parameter(key, value, group) for key, value in theirs.items()}
            )
            ours, other = (each.get("decoupled_weight_decay", True) for each in (group, theirs))
            if group.get("weight_decay") and ours != other:
                how = "weights" if other else "gradients"
                message = (
                    f"group {number}: the optimizer of --like applies weight decay to the {how}, "
                    "but the source's optimizer does not"
                )
                self.warnings.append(warning("not-exact", message, subject="weight_decay"))
        return tuple(result)

    def _state(self) -> dict[str, Any]:
        """The target's values that are no parameters: the run's, some replaced by the source's.

        The source's are its counters (or counters made for its number of updates), its scheduler's
        state and its client state.
        """
        source, like = self.source, self.run
        state = {key: value for key, value in like.state.items() if key != "counters"}
        optimizer_of_run = like.state.get("optimizer") or {}
        optimizer = {key: value for key, value in optimizer_of_run.items() if key != "members"}
        assert isinstance(like.run.engine, FlatBufferEngine)
        if like.run.engine.dtype == "F16":
            message = "the loss scale is taken from --like"
            self.warnings.append(warning("value-assumed", message, subject="loss_scaler"))
        if full := [key for key in OF_THE_NEXT if state.get(key)]:
            message = f"{listed(full)} is taken from --like"
            self.warnings.append(warning("value-assumed", message, subject=full[0]))
        theirs, ours = (m.state.get("client_state") or {} for m in (like, source))
        kept = {key: value for key, value in theirs.items() if key in OF_RANKS or key not in ours}
        if like.step is not None and kept.get(ITERATION) == like.step:
            kept[ITERATION] = int(source.step or 0)
        if lost := [str(key) for key in kept if key not in (INFO, ITERATION)]:
            message = (
                f"the target's client state has these keys from the run of --like: {listed(lost)}"
            )
            self.warnings.append(warning("value-assumed", message, subject=lost[0]))
        return {
            **state,
            "optimizer": optimizer,
            "lr_scheduler": self._scheduler(),
            "client_state": {**ours, **kept},
            "counters": source.state.get("counters") or self._counters(),
        }

    def _counters(self) -> dict[str, Any]:
        """The engine's counters after as many updates as the source has made.

        `global_samples` is the number of updates times the run's samples per step. If the run's
        counters do not show a whole number of samples per step, `global_samples` is 0, with a
        warning.
        """
        step, before = counted_updates(self.source), self.run.state.get("counters") or {}
        steps, samples = before.get("global_steps") or 0, before.get("global_samples") or 0
        rate, rest = divmod(int(samples), int(steps)) if steps else (0, 1)
        if rest:
            message = "global_samples is set to 0: the number of samples per step is unknown"
            self.warnings.append(warning("value-assumed", message, subject="global_samples"))
            rate = 0
        return {"global_steps": step, "skipped_steps": 0, "global_samples": rate * step}

    def _scheduler(self) -> Any:
        """The scheduler's state to write: the source's, if the program of the run can load it.

        Otherwise it is the run's state. Its counters are moved to the source's step, if it has
        counters. A warning says that the run's state was used.
        """
        theirs, ours = (m.state.get("lr_scheduler") for m in (self.run, self.source))
        if not isinstance(theirs, dict) or not (ours is None or self._has_other_scheduler()):
            return ours
        ours, before = map(schedulers.updates, (self.source, self.run))
        more = None if ours is None or before is None else ours - before
        counters = [key for key in SCHEDULED if type(theirs.get(key)) is int]
        if more is None or not counters:
            message = "the state of the learning rate scheduler is taken from --like, unchanged"
            self.warnings.append(warning("value-assumed", message, subject="lr_scheduler"))
            return theirs
        moved = {key: theirs[key] + more for key in counters}
        values = ", ".join(f"{key} = {value}" for key, value in moved.items())
        message = (
            "the state of the learning rate scheduler is taken from --like, moved to the source's "
            f"step: {values}"
        )
        self.warnings.append(warning("value-assumed", message, subject="lr_scheduler"))
        return {**theirs, **moved}

    def _has_other_scheduler(self) -> bool:
        """Whether the source's scheduler differs from the run's.

        It differs if its state lacks the counter that the run's scheduler needs, or if the two
        ds_configs name different schedulers.
        """
        named = [
            schedulers.named_in(side.run.engine.config)
            for side in (self.source, self.run)
            if isinstance(side.run.engine, FlatBufferEngine)
        ]
        lacks = schedulers.lacking_of(self.source, self.run) is not None
        return lacks or (len(named) == 2 and None not in named and named[0] != named[1])


def _hyper_parameter(key: str, theirs: Any, group: Mapping[str, Any]) -> Any:
    """The value of `key` in a target's param group: from the source's `group`, else the run's.

    The run's value (`theirs`) is also used for keys of an implementation, such as `foreach`.
    """
    if key in OF_IMPLEMENTATIONS or key not in group:
        return theirs
    value = group[key]
    # a list becomes a tuple if the run has a tuple
    are_several = isinstance(value, Sequence) and isinstance(theirs, (list, tuple))
    return type(theirs)(value) if are_several else value
