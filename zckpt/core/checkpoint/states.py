"""The states that an optimizer keeps for its parameters, and those that a target lacks.

The form of a state is one of

    slot         a tensor of the parameter's shape: an entry
    number       one number
    none         the value None, for all parameters that have the state
    other        any other value of a parameter
    partition    a state that a rank keeps for its part of a flat buffer
    wrapper      tensors next to the optimizer's state dict: see wrapper.py
    unsupported  a state in the files that has none of these forms

Slots are entries of the manifest, wrappers are in the program's state, and the table of
optimizer_states.py has all other forms. A state has the same key in every form, so two manifests
can be compared whatever their formats are. The step is not a state here: see training/steps.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...errors import WrongOption, joined, listed
from ..grouping import by_key
from .entries import Key
from .facts import FlatBufferEngine
from .inert import TensorName, map_values
from .keys import has_texts_alone, in_doubt
from .manifest import Manifest, slot_key
from .optimizer_states import Form, StateRow, States, unsupported
from .weights import WEIGHTS, is_optimizers
from .wrapper import without_wrapped, wrapped

FORMS = ("none", "slot", "number", "other", "partition", "wrapper", "unsupported")
"""The forms of an optimizer state, which the top of this module explains.

If parameters have a state in several forms, `State.form` is the last of them in this list.
"""
NO_PARAMETER = "no parameter"
"""The key, in place of a parameter's name, for a state that belongs to no parameter."""
OF_NO_GROUP = "it belongs to no parameter in a group, and zckpt reads only states of parameters"
BESIDE_STATE = "it stands beside the optimizer's `state`, but zckpt reads only what is inside"
REASONS: dict[Form, str] = {"among": OF_NO_GROUP, "beside": BESIDE_STATE}
"""Why zckpt does not use a value of the optimizer that belongs to no parameter.

This applies to all values except numbers and texts that are equal on all ranks. The key `among` is
for values inside the optimizer's dictionary `state`, `beside` for values next to this dictionary.
"""

# of Adafactor and CAME in torch, transformers, fairseq, came_pytorch and pytorch_optimizer, and of
# Adalite
FACTORING = frozenset(("scale_parameter", "clip_threshold", "eps1", "beta2_decay"))
"""Hyper-parameters that show that an optimizer keeps states of a matrix's rows and columns."""

# these optimizers write `RMS` (of the weight) in every update, and read it only after that or never
AFRESH = {"RMS": FACTORING}
"""States that a target may lack, because the optimizer recomputes them before it reads them.

Maps a state's key to hyper-parameters. The state may be missing if a param group has one of them.
"""

OF_VECTORS = (
    "the source's optimizer saw the parameters as vectors in flat buffers; the target's optimizer "
    "sees matrices, and needs states of their rows and columns instead"
)

BOUND = (
    "each rank keeps it for its part of a flat buffer, so only the same engine with the same ZeRO "
    "stage and number of ranks can load it"
)
OF_NUMBERS = (
    "its dictionary keys are strings that may have been numbers: torch.distributed.checkpoint "
    "turns all keys into strings, so its files do not show which type the optimizer expects"
)
OF_WRAPPER = "it is stored next to the optimizer's state dict, where other engines do not read it"


class State(Struct, frozen=True):
    """One optimizer state, such as `exp_avg`, with all parameters that have it.

    `tensors` maps each of these parameters to the keys of the state's tensors in the manifest.
    `reason` says why a target cannot have the state, or why it was not read; it may be empty.
    """

    key: str
    tensors: dict[str, tuple[Key, ...]] = field(default_factory=dict)
    form: str = "slot"
    reason: str = ""

    @property
    def parameters(self) -> list[str]:
        return list(self.tensors)

    @property
    def count(self) -> int:
        """The number of parameters that have the state."""
        return len(self.tensors.keys() - {NO_PARAMETER})


def states_of(manifest: Manifest) -> dict[str, State]:
    """Maps the key of each optimizer state of a checkpoint, such as `exp_avg`, to its `State`.

    If parameters have a state in several forms, such as a number and a tensor, `State.form` is the
    last of them in FORMS. Model ranks that the manifest keeps separate are combined.
    """
    if manifest.ranks:
        return _united(states_of(rank).values() for rank in manifest.ranks)
    states = {
        slot_key(slot): State(slot_key(slot), {entry.parameter: (entry.key,) for entry in entries})
        for slot, entries in manifest.slots.items()
        if is_optimizers(slot)
    }

    def add(key: str, name: str, tensors: Sequence[Key], form: str, reason: str = "") -> None:
        state = states.get(key)
        if state is None or state.form != form:
            tensors_before = {} if state is None or state.form == "none" else state.tensors
            state = states[key] = State(key, tensors_before, form, reason)
        state.tensors[name] = (*state.tensors.get(name, ()), *tensors)

    for name in manifest.parameters:
        for key in manifest.states.scalars.get(name, ()):
            add(key, name, (), "number")
    around = [
        StateRow(key, "wrapper", (NO_PARAMETER,), value, OF_WRAPPER)
        for key, value in wrapped(manifest).items()
    ]
    of_form = manifest.states.of_form
    for row in (*of_form("other", "partition"), *around, *of_form("unsupported")):
        key, is_none = str(row.key), row.form == "other" and row.value is None
        if is_none and key in states and states[key].form != "none":
            continue  # some parameters have a momentum_buffer of torch's SGD
        tensors = entries_in(row.value)
        reason = BOUND if row.form == "partition" else row.reason
        for name in row.parameters:
            add(key, name, tensors, "none" if is_none else row.form, reason)
            tensors = []  # of several parameters, only the first gets them
    return states


def entries_in(value: Any) -> list[Key]:
    """The keys of all tensors inside a state's value, which may be nested; no duplicates."""
    return [(name, "state") for name in tensors_in(value)]


def _united(states_of_ranks: Iterable[Iterable[State]]) -> dict[str, State]:
    """Combines the optimizer states of several ranks by key.

    A rank where the value is None is ignored if other ranks have a tensor.
    """
    united = {}
    for key, states_of_key in by_key(
        (state.key, state) for states in states_of_ranks for state in states
    ).items():
        states_of_key.sort(key=lambda state: FORMS.index(state.form))
        held = (
            states_of_key
            if states_of_key[-1].form == "none"
            else [s for s in states_of_key if s.form != "none"]
        )
        united[key] = replace(
            states_of_key[-1], tensors={n: t for s in held for n, t in s.tensors.items()}
        )
    return united


def tensors_in(value: Any) -> list[str]:
    """The names of all tensors inside a state's value, without duplicates."""
    names: dict[str, None] = {}

    def collect(item: Any, _key: Any = None) -> Any:
        if isinstance(item, TensorName):
            names[item.name] = None
        return map_values(item, collect)

    collect(value)
    return list(names)


def with_updates(manifest: Manifest) -> Manifest:
    """Marks parameters that the optimizer has never updated: sets `updated` to False.

    Such a parameter has no state and no step, while others have a step. It is frozen or never used.
    """
    manifest = manifest.map_ranks(with_updates)
    parameters = manifest.parameters
    unused = {name for name, own in parameters.items() if own.trainable and own.step is None}
    if not unused or all(own.step is None for own in parameters.values()):
        return manifest
    unused = unused.difference(*(state.tensors for state in states_of(manifest).values()))
    changed = {name: replace(parameters[name], updated=False) for name in unused}
    return replace(
        manifest, parameters={name: changed.get(name, own) for name, own in parameters.items()}
    )


def untouched(manifest: Manifest) -> list[str]:
    """The parameters that the optimizer lists but has never updated."""
    return [n for n, own in manifest.parameters.items() if own.trainable and not own.updated]


def harmless(state: State, manifest: Manifest) -> str:
    """The reason why a checkpoint may lack this state without harm; "" if there is none.

    A state is harmless if its value is None, or if the optimizer recomputes it before it uses it.
    """
    if state.form == "none":
        return "it is None"
    shown_by = AFRESH.get(state.key, frozenset())
    is_afresh = any(not shown_by.isdisjoint(group) for group in manifest.groups or ())
    return "the optimizer computes it afresh" if is_afresh else ""


def missing_in(source: Manifest, target: Manifest) -> list[State]:
    """The optimizer states of `source` that `target` lacks, each with the parameters concerned.

    A parameter without the same name in `target` may be renamed there, or be a part of another one.
    The parameter then lacks a state only if no parameter of `target` has this state.
    """
    # model ranks that both sides keep separate are compared one by one
    ours, theirs = ([own.parameters.keys() for own in side.ranks] for side in (source, target))
    if ours and ours == theirs:
        return [*_united(map(missing_in, source.ranks, target.ranks)).values()]
    kept = states_of(target)
    new_names: dict[str, str] = {}
    lacking = []
    for key, state in states_of(source).items():
        there = kept.get(key)
        target_tensors = {} if there is None or there.form == "unsupported" else there.tensors
        if state.tensors.keys() <= target_tensors.keys():
            continue
        new_names = (
            new_names
            or {n: n for own in target.rank_manifests for n in own.parameters} | target.owners
        )
        names = {new_names.get(name, name) for name in target_tensors}
        missing = {
            name: tensors
            for name, tensors in state.tensors.items()
            if (new_names[name] not in names if name in new_names else not target_tensors)
        }
        if missing:
            lacking.append(replace(state, tensors=missing))
    return lacking


def of_vectors(source: Manifest, target: Manifest) -> list[State]:
    """Finds states of vectors that are useless to a target whose optimizer sees matrices.

    Adafactor keeps other states for matrices than for vectors, and in a flat buffer every parameter
    is a vector. Empty if `target` has flat buffers too.
    """
    if not _is_flat(source) or _is_flat(target):
        return []
    axes = {
        name: len(parameter.shape)
        for rank in source.rank_manifests
        for name, parameter in rank.parameters.items()
        if rank.groups
        and parameter.group is not None
        and not FACTORING.isdisjoint(rank.groups[parameter.group])
    }
    unfit = []
    for key, state in states_of(source).items():
        matrices = {name: own for name, own in state.tensors.items() if axes.get(name, 0) > 1}
        if state.form == "slot" and key != "exp_avg" and matrices:
            unfit.append(replace(state, tensors=matrices, reason=OF_VECTORS))
    return unfit


def with_frozen(manifest: Manifest, names: Collection[str]) -> Manifest:
    """Returns the manifest with these parameters frozen: not trainable, and in no param group."""
    if not names:
        return manifest
    parameters = {
        name: replace(item, trainable=False, group=None, updated=True) if name in names else item
        for name, item in manifest.parameters.items()
    }
    return replace(manifest, parameters=parameters)


def of_numbers(source: Manifest, target: Manifest) -> list[State]:
    """Finds states with dictionaries whose keys are strings now, but may have been numbers.

    Only torch.distributed.checkpoint turns numbers into strings: the list is empty unless `source`
    comes from its files, and `target` does not.
    """
    if not has_texts_alone(source) or has_texts_alone(target):
        return []
    states = states_of(source)
    other_rows = source.states.of_form("other")
    doubtful = {str(row.key) for row in other_rows if any(in_doubt(row.value, str(row.key)))}
    return [replace(states[key], reason=OF_NUMBERS) for key in states if key in doubtful]


def _is_flat(manifest: Manifest) -> bool:
    return isinstance(manifest.run.engine, FlatBufferEngine) and bool(
        manifest.run.origin.zero_stage
    )


# -- a manifest with fewer states


def without(manifest: Manifest, keys: Collection[str]) -> Manifest:
    """Returns the manifest without the optimizer states of these keys; unknown keys are ignored."""
    if not keys:
        return manifest
    gone = {*keys}
    states = states_of(manifest)
    tensors = {
        tensor
        for key in gone & states.keys()
        for tensors_of_parameter in states[key].tensors.values()
        for tensor in tensors_of_parameter
    }
    return replace(
        manifest.map_ranks(lambda rank: without(rank, keys)),
        entries={key: entry for key, entry in manifest.entries.items() if key not in tensors},
        replicas=tuple(entry for entry in manifest.replicas if entry.key not in tensors),
        state=without_wrapped(manifest, gone),
        states=manifest.states.without(gone),
    )


def require_known(keys: Collection[str], manifests: Sequence[Manifest]) -> None:
    """Raises WrongOption for a key that is no optimizer state in any of the manifests."""
    if not keys:
        return
    all_keys = list(dict.fromkeys(key for manifest in manifests for key in states_of(manifest)))
    for key in keys:
        if key not in all_keys:
            raise WrongOption(
                "option-names-nothing",
                f"--drop-state {key}: the optimizer has no state of this name",
                hint=f"its states are {listed(all_keys)}" if all_keys else "leave it out",
            )


def as_unsupported(manifest: Manifest, reason: str) -> Manifest:
    """Turns the optimizer states that zckpt cannot write into states that it only compares.

    These are all states except numbers and tensors of a parameter's shape. Their tensors are
    removed from the manifest's entries. `reason` says why no target gets them.
    """
    apart = manifest.states.of_form("other", "partition")
    if not apart:
        return manifest
    held = by_key((str(row.key), row) for row in apart if row.value is not None)
    entries, states = dict(manifest.entries), []
    for key, rows in held.items():
        names = dict.fromkeys(name for row in rows for name in row.parameters)
        values = [row.value for row in rows]
        tensors = [entries.pop(name, None) for name in entries_in(values)]
        if None in tensors:  # a pipeline stage lacks the tensors of other stages
            states.append(StateRow(key, "unsupported", tuple(names), "", reason))
        else:
            states.append(unsupported(key, names, reason, values, filter(None, tensors)))
    gone = manifest.entries.keys() - entries.keys()
    return replace(
        manifest,
        entries=entries,
        replicas=tuple(entry for entry in manifest.replicas if entry.key not in gone),
        states=manifest.states.without_form("other", "partition") + states,
    )


def weights_alone(manifest: Manifest) -> Manifest:
    """The manifest with weights and buffers only: no optimizer states, no facts about the run."""
    return manifest.replace(
        entries={key: e for key, e in manifest.entries.items() if e.slot in WEIGHTS},
        replicas=tuple(entry for entry in manifest.replicas if entry.slot in WEIGHTS),
        parameters={
            name: replace(parameter, step=None, group=None, updated=True)
            for name, parameter in manifest.parameters.items()
        },
        groups=None,
        step_place=None,
        pipeline=None,
        tensor_parallel=None,
        state={},
        states=States(),
        steps=(),
        siblings=(),
        around=(),
        omitted_files=(),
    )


class Selection(Struct, frozen=True):
    """What a command compares: tensors that match a glob, only weights, or all but some states."""

    tensors: str | None = None
    weights_only: bool = False
    drop_state: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weights_only and self.drop_state:
            raise WrongOption(
                "options-conflict",
                "--drop-state does not apply with --weights-only",
                hint="leave --drop-state out: --weights-only compares no optimizer states",
            )

    def of(self, a: Manifest, b: Manifest) -> tuple[Manifest, Manifest]:
        """Removes from both manifests what is not compared.

        Raises WrongOption if `drop_state` names a state that neither has.
        """
        if self.weights_only:
            return weights_alone(a), weights_alone(b)
        require_known(self.drop_state, (a, b))
        return without(a, self.drop_state), without(b, self.drop_state)

    @property
    def flags(self) -> list[str]:
        """The command-line options that make this selection, such as `--weights-only`."""
        tensors = [] if self.tensors is None else [f"--tensors {shlex.quote(self.tensors)}"]
        weights = ["--weights-only"] if self.weights_only else []
        return [*tensors, *weights, *(f"--drop-state {shlex.quote(k)}" for k in self.drop_state)]


EVERYTHING = Selection()


def in_words(states: Iterable[State]) -> str:
    """Lists states and their parameters for a message: `GG and Q of fc1.weight, fc2.weight`."""
    keys = by_key((listed(state.parameters, 4), state.key) for state in states)
    return "; ".join(f"{joined(own)} of {names}" for names, own in keys.items())
