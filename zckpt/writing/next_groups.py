"""Gives the target the optimizer param groups of the next run instead of the source's.

    --groups-from RUN    members, their order and hyper-parameters are those of a checkpoint of the
                         next program; moments and steps are matched by the names of parameters
    --set-group          single hyper-parameters: see set_groups.py

The manifest gets the groups under the target's names before a writer sees it, so writers do not
handle these options. The initial states of new parameters depend on the target: see beginnings.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint import states
from ..core.checkpoint.facts import FlatBufferEngine, StateDictEngine
from ..core.checkpoint.manifest import Manifest, Parameter
from ..core.grouping import by_key
from ..core.passes.description import Report
from ..errors import (
    MissingData,
    Notice,
    WrongOption,
    listed,
    warning,
)
from ..formats.format import Format
from ..formats.groups import regrouped
from ..formats.reading import USUAL
from ..formats.schedulers import schedulers_of, with_schedulers
from ..naming.names import called_as, names_of
from ..reading import read
from ..training import schedulers
from ..training.hyperparameters import are_inferred
from ..training.optimizers import keep_other_states
from ..training.options import GROUPS_FROM, SET_GROUP, Options
from .set_groups import about_files, number_of, of_form, with_values

Group = dict[str, Any]
MEGATRON = "megatron"
"""The key of a manifest's state for data that only Megatron-Core's files need."""
DOES_NOT_FIT = "like-does-not-fit"


def as_asked(format: Format, named: Manifest, options: Options) -> tuple[Manifest, list[Report]]:
    """Applies --groups-from or --set-group to the param groups of the manifest `named`.

    Also returns report lines about states that are dropped because their parameters are no longer
    trained. Raises WrongOption, and MissingData if the checkpoint given by --groups-from does not
    fit.
    """
    asked = [option.flag for option in (GROUPS_FROM, SET_GROUP) if options[option]]
    if asked and options.weights_only:
        raise WrongOption(
            "options-conflict",
            f"{asked[0]} does not apply with --weights-only",
            hint="leave it out: no optimizer is written",
        )
    if asked and format.is_neutral and named.state.get(MEGATRON):
        message = (
            f"{asked[0]} will have no effect if you convert this target to Megatron-Core later: "
            "that conversion uses the groups of the Megatron-Core run, and --group-defaults "
            "changes them"
        )
        line = warning("option-without-effect", message, subject=asked[0])
        named = named.replace(warnings=(*named.notices.warnings, line))
    dropped: list[Report] = []
    if (path := options[GROUPS_FROM]) is not None:
        named, dropped = _RunsGroups(named, _groups_from(path), path).taken()
    return (with_values(named, options) if options[SET_GROUP] else named), dropped


# -- the groups of a run


def _groups_from(path: str) -> Manifest:
    """Reads the checkpoint that the user named with --groups-from.

    Raises MissingData if it does not state its optimizer's param groups or parameter names.
    """
    hint = (
        "let the program that will load the target save a checkpoint after its first update, with "
        "the optimizer and without elastic_checkpoint; if this checkpoint lacks parameter names, "
        "convert it to a universal checkpoint with --param-names FILE, and give the universal "
        "checkpoint to --groups-from"
    )
    try:
        run = read(path, USUAL)
    except MissingData as error:
        message = f"--groups-from {path}: {error}"
        raise MissingData(DOES_NOT_FIT, message, hint=hint, file=path) from error
    if run.groups is None or are_inferred(run):
        message = f"--groups-from {path} does not state the groups of its optimizer"
        raise MissingData(DOES_NOT_FIT, message, hint=hint, file=path)
    return run


class _RunsGroups:
    """Gives a checkpoint the param groups of another run: --groups-from PATH.

    `named` is the manifest of the checkpoint under the target's names, `run` that of the other run
    at `path`.
    """

    def __init__(self, named: Manifest, run: Manifest, path: str) -> None:
        if named.ranks:
            raise WrongOption(
                "option-not-applicable",
                f"--groups-from does not apply while the model ranks of {named.root} are copied "
                "one by one",
                hint=f"add --tp {named.run.origin.tp or 1}: then zckpt joins the ranks and slices "
                "tensors anew",
            )
        self.named, self.path = named, path
        self.run = called_as(run, names_of(named))
        self.warnings: list[Notice] = []
        self.owners = self._owners()
        self._refuse_other_optimizer()
        self.members = self._members()
        self.origins = self._origins()

    def _owners(self) -> dict[str, str]:
        """Maps every weight of the other run to its name in the source.

        Raises MissingData if one of them has weights that the other one lacks.
        """
        named, run = self.named, self.run
        names_of_weights = {
            name: name for name in (*named.parameters, *named.buffers)
        } | named.owners
        second = by_key((first, alias) for alias, first in run.owners.items())
        owners: dict[str, str] = {}
        for name in (*run.parameters, *run.buffers):
            spellings = [each for each in (name, *second.get(name, ())) if each in names_of_weights]
            owners |= {name: names_of_weights[spellings[0]]} if spellings else {}
        lost = [name for name in run.parameters if name not in owners]
        strangers = [name for name in named.parameters if name not in owners.values()]
        sides = {"only the run has": lost, "only the source has": strangers}
        if _lacks_frozen(run):
            strangers = [name for name in strangers if named.parameters[name].trainable]
            sides = {"only the run has": lost}
        text = "; ".join(f"{what} {listed(names, 4)}" for what, names in sides.items() if names)
        if text:
            raise MissingData(
                DOES_NOT_FIT,
                f"{named.root} and --groups-from {self.path} have different parameters: {text}",
                hint="give a checkpoint of the same model; if only the names differ: --rename "
                "REGEX=REPL, or --family",
                file=self.path,
            )
        wrong = [
            f"{name} ({list(named.shape_of(owner))} and {list(run.parameters[name].shape)})"
            for name, owner in owners.items()
            if name in run.parameters and named.shape_of(owner) != run.parameters[name].shape
        ]
        if wrong:
            raise MissingData(
                DOES_NOT_FIT,
                f"the shapes in {named.root} and --groups-from {self.path} differ: "
                f"{listed(wrong, 4)}",
                hint="give a checkpoint of the same model",
                file=self.path,
            )
        return owners

    def _refuse_other_optimizer(self) -> None:
        if keep_other_states(self.named.optimizer, self.run.optimizer):
            raise WrongOption(
                DOES_NOT_FIT,
                f"the optimizer of {self.named.root} is {self.named.optimizer}, that of "
                f"--groups-from {self.path} is {self.run.optimizer}",
                hint="give a run with the optimizer of the source, or begin with fresh states: "
                "--weights-only instead of --groups-from",
            )

    def _members(self) -> dict[str, int]:
        """Maps each parameter that the other run trains to its param group, in optimizer order."""
        members: dict[str, int] = {}
        for name, parameter in self.run.parameters.items():
            if (
                parameter.trainable
                and members.setdefault(owner := self.owners[name], number := parameter.group or 0)
                != number
            ):
                raise MissingData(
                    DOES_NOT_FIT,
                    f"{owner} is one tied weight in {self.named.root}, but two weights in "
                    f"--groups-from {self.path}",
                    hint="give a checkpoint of the same model",
                    file=self.path,
                    subject=owner,
                )
        return members

    def _origins(self) -> list[int]:
        """Finds, for each param group of the other run, the source's group that corresponds to it.

        It is the group of the first parameter that both train; 0 if there is no such parameter.
        """
        before = self.named.parameters
        first: dict[int, int] = {}
        for name, number in self.members.items():
            if name in before and before[name].trainable:
                first.setdefault(number, before[name].group or 0)
        return [first.get(number, 0) for number in range(len(self.run.groups or ()))]

    def taken(self) -> tuple[Manifest, list[Report]]:
        """Returns the source with the other run's param groups, and report lines about lost states.

        The states of parameters that the other run does not train are dropped.
        """
        named, members = self.named, self.members
        before = named.parameters
        trained = {name for name, own in before.items() if own.trainable}
        gone = [name for name in before if name in trained and name not in members]
        dropped = _lines(named, gone)
        if dropped:
            message = f"the run of --groups-from does not train {listed(gone, 4)}: " + (
                f"{'its' if len(gone) == 1 else 'their'} states are dropped"
            )
            self.warnings.append(warning("state-dropped", message, subject=gone[0]))
        order = [*members, *(name for name in before if name not in members)]
        parameters = {name: self._parameter(name) for name in order}
        result = _without_states_of(named, frozenset(gone))
        result = result.replace(
            parameters=parameters,
            buffers=tuple(name for name in named.buffers if name not in members),
            state=self._state(result.state),
            engine=self._engine(),
            pipeline=self._pipeline(),
        )
        groups = tuple(self._group(number) for number in range(len(self.origins)))
        result = regrouped(result, groups, members, self.origins)
        result, unreached = with_schedulers(
            result, lambda each: schedulers.with_rates(each, groups)
        )
        self.warnings += about_files(unreached)
        return result.replace(warnings=(*result.notices.warnings, *self.warnings)), dropped

    def _parameter(self, name: str) -> Parameter:
        """The parameter `name`, trained or frozen as in the other run.

        It has no step if the source froze it.
        """
        before = self.named.parameters.get(name) or Parameter(self.named.shape_of(name), False)
        if name not in self.members:
            frozen = replace(before, trainable=False, group=None, step=None, updated=True)
            return frozen if before.trainable else before
        is_new = not before.trainable
        step, updated = (None, False) if is_new else (before.step, before.updated)
        return replace(before, trainable=True, group=self.members[name], step=step, updated=updated)

    def _group(self, number: int) -> Group:
        """The other run's hyper-parameters of a param group, with the source's learning rate.

        The source's rate is scaled if the other run has another `initial_lr`. The other run's rate
        stays if the source has no scheduler, or if a rate is unknown.
        """
        assert self.run.groups is not None
        group = dict(self.run.groups[number])
        before = (self.named.groups or ({},))[self.origins[number]]
        if "lr" not in group or not _has_scheduler(self.named):
            return group
        # the other run has saved the rate of its first update; the source's scheduler has gone on
        base, base_before, rate = (
            number_of(value)
            for value in (group.get("initial_lr"), before.get("initial_lr"), before.get("lr"))
        )
        if base is not None and base_before and rate is not None:
            scheduled = rate if base == base_before else base * (rate / base_before)
            if scheduled != number_of(group["lr"]):
                message = (
                    f"lr of group {number} becomes {scheduled:g}: the run's initial_lr ({base:g}), "
                    "scaled as the source's scheduler has scaled its own"
                )
                self.warnings.append(warning("value-assumed", message, subject="lr"))
            return {**group, "lr": of_form("lr", group["lr"], scheduled)}
        message = (
            f"the first update of group {number} uses the run's lr ({_shown(group['lr'])}), and "
            f"the scheduler sets it later; for another first lr: --set-group {number}:lr=..."
        )
        self.warnings.append(warning("value-assumed", message, subject="lr"))
        return group

    def _engine(self) -> Any:
        """The source's engine, with hyper-parameters marked as given if the files are elastic.

        DeepSpeed's elastic files lack hyper-parameters; the run of --groups-from supplies them.
        """
        engine = self.named.run.engine
        if isinstance(engine, FlatBufferEngine) and engine.elastic:
            return replace(engine, given=True)
        return engine

    def _pipeline(self) -> Any:
        """The pipeline stages: those of the other run if it has as many stages as the source.

        They list the parameters that the other run trains. Otherwise they are the source's.
        """
        stages, its = self.named.run.pipeline, self.run.run.pipeline
        fits = stages and its and len(stages.parameters) == len(its.parameters)
        return its.renamed(self.owners) if fits and its else stages

    def _state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The source's state with the other run's `optimizer.members`, the names in each group.

        Names are indices into the state's list `module`, None for a frozen parameter. `members` is
        left out if the other run has none, or if the source lacks a name of that run's `module`.
        """
        optimizer = dict(state.get("optimizer") or {})
        listed_before = optimizer.pop("members", None)
        theirs = (self.run.state.get("optimizer") or {}).get("members")
        modules = [each.get("module") or [] for each in (self.run.state, state)]
        places = {name: place for place, name in enumerate(modules[1])}
        names = [self.owners.get(name, name) for name in modules[0]]
        if theirs is not None and {*names} <= places.keys():
            optimizer["members"] = [
                [None if place is None else places[names[place]] for place in own] for own in theirs
            ]
        elif listed_before is None:
            return dict(state)
        return {**state, "optimizer": optimizer}


def _lacks_frozen(run: Manifest) -> bool:
    engine = run.run.engine
    if isinstance(engine, FlatBufferEngine):
        return engine.excludes_frozen is True
    return isinstance(engine, StateDictEngine) and engine.adapter


def _lines(manifest: Manifest, names: Sequence[str]) -> list[Report]:
    """Makes a report line for each optimizer state that is dropped for these parameters."""
    counts = {
        key: len({*names} & state.tensors.keys())
        for key, state in states.states_of(manifest).items()
    }
    reason = "the run of --groups-from does not train these parameters"
    return [
        {"state": key, "parameters": count, "reason": reason}
        for key, count in counts.items()
        if count
    ]


def _without_states_of(manifest: Manifest, names: frozenset[str]) -> Manifest:
    gone = {
        tensor
        for state in states.states_of(manifest).values()
        for name, tensors in state.tensors.items()
        if name in names
        for tensor in tensors
    }
    return replace(
        manifest,
        entries={key: entry for key, entry in manifest.entries.items() if key not in gone},
        replicas=tuple(entry for entry in manifest.replicas if entry.key not in gone),
        states=manifest.states.where(
            lambda row: not row.parameters or not names.issuperset(row.parameters)
        ),
    )


def _has_scheduler(manifest: Manifest) -> bool:
    return manifest.state.get("lr_scheduler") is not None or bool(schedulers_of(manifest))


def _shown(value: Any) -> str:
    number = number_of(value)
    return str(value) if number is None else f"{number:g}"
