"""Merges the manifests of the ranks of one parallel axis into one manifest.

Each rank was read as a checkpoint by itself. A table says which part of a complete tensor each
rank's tensor is. The parts become blocks of the complete tensors; no byte is read. The ranks'
groups, steps, counters and loss scales must come from one save. State that a program keeps per rank
is taken from the first rank; the state of the other ranks is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from math import prod
from typing import Any, TypeVar

from msgspec.structs import replace

from ...errors import InconsistentCheckpoint, Notice, UnsupportedCheckpoint, listed, note
from ..checkpoint import slicing
from ..checkpoint.agreement import KEEP, Step, agree
from ..checkpoint.dtypes import SIZES
from ..checkpoint.entries import Entry, Key, name_of
from ..checkpoint.inert import alike, to_json
from ..checkpoint.manifest import Manifest, Parameter
from ..checkpoint.optimizer_states import (
    OF_NO_PARAMETER,
    OF_OTHERS,
    StateRow,
    States,
    of_parameters,
    unsupported,
    with_states,
)
from ..checkpoint.placement import Table
from ..checkpoint.states import NO_PARAMETER, REASONS, tensors_in
from ..checkpoint.weights import WEIGHTS
from ..grouping import by_key

T = TypeVar("T")
Groups = tuple[dict[str, Any], ...] | None
# per-rank state of every format; `Files.rank_keys` lists a format's other keys
OF_RANKS = ("client_state", "module_extra")


def merge(
    ranks: Sequence[Manifest],
    table: Table,
    policy: str | None = None,
    beside: Manifest | None = None,
) -> Manifest:
    """Merges the manifests of the ranks of one parallel axis into one manifest.

        table     how the ranks cut each parameter
        policy    the value of --step-policy: which step counts if ranks differ; None: an error
        beside    tensors of no single rank, such as those in DeepSpeed's files of pipeline layers

    Raises InconsistentCheckpoint if ranks contradict each other or are of different saves, and
    UnsupportedCheckpoint if a rank's param groups cannot be identified.
    """
    whole = united(ranks)
    ranks, groups = numbered_alike(ranks)
    steps = agreed_steps(ranks, policy)
    ranks = [with_steps(rank, steps) for rank in ranks]
    every = [*([] if beside is None else [beside]), *ranks]
    entries: dict[Key, Entry] = {}
    copies: list[Entry] = []
    for key, held in _held(every, ranks[0]).items():
        entries[key], *further = tensor(key, held, table, whole.root)
        copies += further
    parameters, numbers = _parameters(every, table, whole.root)
    # other ranks may have dropped groups
    fullest = max(ranks, key=lambda rank: len(rank.groups or ()))
    state = {**whole.state, "module": _names(rank.state["module"] for rank in every)}
    if (scheduler := fullest.state.get("lr_scheduler")) is not None:
        state["lr_scheduler"] = scheduler
    return whole.replace(
        entries=entries,
        parameters=parameters,
        buffers=tuple(_names(rank.buffers for rank in every)),
        groups=groups,
        state=state,
        replicas=tuple(copies),
        states=States((*numbers, *_states(ranks, table.word), *_of_run(whole))),
        paths=(*whole.files.paths, *(() if beside is None else beside.files.paths)),
        records=(*whole.files.records, *(() if beside is None else beside.files.records)),
    )


def in_order(manifest: Manifest) -> Manifest:
    """Sorts the tensors of a manifest in the order of its parameters and buffers.

    Tensors of the program itself (slot `state`), such as random states, come last.
    """
    names = (*manifest.parameters, *manifest.buffers)
    place = {name: number for number, name in enumerate(names)}
    entries = sorted(
        manifest.entries.values(),
        key=lambda entry: len(names) if entry.slot == "state" else place[entry.parameter],
    )
    return replace(manifest, entries={entry.key: entry for entry in entries})


def _names(each: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(each)))


# -- tensors


def tensor(key: Key, held: Sequence[Sequence[Entry]], table: Table, root: str) -> list[Entry]:
    """Joins the parts of one tensor: returns the complete tensor, followed by its replicas.

    `held[r]` lists what rank r has of the tensor: its part, then its replicas. Raises
    InconsistentCheckpoint if ranks have different dtypes or shapes, or if a rank lacks its slice.
    """
    name, (parameter, slot) = name_of(key), key
    cut = table.cuts.get(parameter)
    entries = [entry for own in zip_longest(*held) for entry in own if entry is not None]
    if len(dtypes := {entry.dtype for entry in entries}) > 1:
        raise InconsistentCheckpoint(
            "ranks-disagree",
            f"{root}: {table.word}s keep {name} in different types: {listed(sorted(dtypes))}",
            file=root,
            subject=name,
        )
    if cut is None:
        if len({entry.shape for entry in entries}) > 1:
            message = f"{root}: the replicas of {name} have different shapes"
            raise InconsistentCheckpoint("ranks-disagree", message)
        return [entries[0], *(replace(each, axis=each.axis or table.word) for each in entries[1:])]
    for rank, (of_rank, shape) in enumerate(zip(held, cut.slicing.slices, strict=True)):
        if ({entry.numel for entry in of_rank} or {0}) != {prod(shape)}:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{root}: {table.word} {rank} lacks {name}, or its slice has a wrong size",
                file=root,
                subject=name,
            )
    size, wholes = SIZES[entries[0].dtype], []
    for copy in range(min(len(own) for own in held if own)):
        slices = [own[copy].fragments if own else None for own in held]
        axis = next(own[copy].axis for own in held if own)
        for holder in range(cut.slicing.copies):
            fragments = slicing.joined(cut.slicing, slices, size, holder)
            of_copy = axis or (table.word if holder else "")
            wholes.append(Entry(*key, entries[0].dtype, cut.shape, fragments, axis=of_copy))
    return wholes if cut.placement.agree(slot in WEIGHTS) else wholes[:1]


def _held(every: Sequence[Manifest], first: Manifest) -> dict[Key, list[list[Entry]]]:
    """Maps a tensor's key to what each rank has of it: a list of its part and its replicas.

    A tensor of the program's state is listed for a rank only if the first rank has one with the
    same key, type and shape.
    """
    held: dict[Key, list[list[Entry]]] = {}
    for number, rank in enumerate(every):
        for entry in chain(rank.entries.values(), rank.replicas):
            if entry.slot == "state" and not entry.parameter.startswith(f"{OF_OTHERS}."):
                first_entry = first.entries.get(entry.key)
                if first_entry is None or (first_entry.dtype, first_entry.shape) != (
                    entry.dtype,
                    entry.shape,
                ):
                    continue
            held.setdefault(entry.key, [[] for _ in every])[number].append(entry)
    return held


# -- parameters, their groups and steps


def _parameters(
    ranks: Sequence[Manifest], table: Table, root: str
) -> tuple[dict[str, Parameter], list[StateRow]]:
    """Merges the parameters of all ranks; also returns their one-number optimizer states.

    Trained parameters come first, in the order of their groups, then the frozen ones.
    """
    parameters, numbers = {}, {}
    held = by_key(
        (name, (item, rank.states.scalars.get(name, {})))
        for rank in ranks
        for name, item in rank.parameters.items()
    )
    for name, copies in held.items():
        cut = table.cuts.get(name)
        shape = copies[0][0].shape if cut is None else cut.shape
        wholes = [
            (replace(item, shape=item.shape if cut is None else shape), scalars)
            for item, scalars in copies
            if 0 in shape or 0 not in item.shape  # no optimizer owns an empty slice
        ]
        if any(each != wholes[0] for each in wholes):
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{root}: {table.word}s disagree on {name}: its shape, param group, step or a "
                "one-number state differs",
                file=root,
                subject=name,
            )
        parameters[name], numbers[name] = wholes[0]
    order = sorted(parameters.items(), key=lambda item: (not item[1].trainable, item[1].group or 0))
    return dict(order), of_parameters("number", numbers)


def numbered_alike(ranks: Sequence[Manifest]) -> tuple[list[Manifest], Groups]:
    """Gives a param group the same number in all ranks; returns the manifests, and all groups.

    A rank may lack groups; the others are recognized by their hyper-parameters. Raises
    InconsistentCheckpoint if hyper-parameters differ, and UnsupportedCheckpoint if they fit several
    groups. If some rank has no list of groups, nothing is changed, and the groups are None.
    """
    # a rank may have dropped groups of which it has no parameter; the rest keep their order
    groups: list[dict[str, Any]] = max((list(m.groups or ()) for m in ranks), key=len)
    every = [to_json(group) for group in groups]
    if any(manifest.groups is None for manifest in ranks):
        return list(ranks), None
    renumbered = []
    for manifest in ranks:
        own_groups = [to_json(group) for group in manifest.groups or ()]
        places = _places(own_groups, every)
        if -1 in places:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"the hyper-parameters of groups in {_file_of(manifest)} differ from those of "
                "other model ranks",
            )
        if places != [len(every) - 1 - n for n in _places(own_groups[::-1], every[::-1])][::-1]:
            raise UnsupportedCheckpoint(
                "grid-unsupported",
                f"{manifest.root}: a pipeline stage has {len(own_groups)} of {len(groups)} "
                "optimizer groups, and their hyper-parameters do not show which ones",
                hint="give each optimizer group a different hyper-parameter, such as a name, and "
                "save again",
                file=manifest.root,
            )
        parameters = {
            name: item if item.group is None else replace(item, group=places[item.group])
            for name, item in manifest.parameters.items()
        }
        renumbered.append(replace(manifest, parameters=parameters))
    return renumbered, tuple(groups)


def _places(some: Sequence[Any], groups: Sequence[Any]) -> list[int]:
    """Finds each group of `some` in `groups`, which has the same order: indices, -1 if missing."""
    rest = iter(enumerate(groups))
    return [next((place for place, group in rest if group == own), -1) for own in some]


def agreed_steps(ranks: Sequence[Manifest], policy: str | None) -> dict[str, Step]:
    """Maps each parameter that has a step to the step on which all ranks agree.

    If ranks disagree, `policy` (--step-policy) chooses the step, but None and `keep` raise
    InconsistentCheckpoint. Groups must have the same numbers in all ranks (`numbered_alike`).
    """
    steps_by_key: dict[str | int | None, dict[Step, str]] = {}
    groups: dict[str, int | None] = {}
    counts_each: set[int | None] = set()
    for rank in ranks:
        file, of_group = _file_of(rank), dict[int | None, set[Step]]()
        for name, item in rank.parameters.items():
            if item.step is not None:
                groups[name] = item.group
                of_group.setdefault(item.group, set()).add(item.step)
                for key in (name, item.group):
                    steps_by_key.setdefault(key, {}).setdefault(item.step, f"{name}, {file}")
        counts_each |= {group for group, steps in of_group.items() if len(steps) > 1}
    # all parameters of a group must have one step, unless a rank has several, or each is kept
    alone = {*groups.values()} if policy == KEEP else counts_each
    agreed = {
        key: agree([(where, step) for step, where in places.items()], policy)
        for key, places in steps_by_key.items()
        if key not in alone
    }
    steps = {name: agreed[name if group in alone else group] for name, group in groups.items()}
    return {name: step for name, step in steps.items() if step is not None}


def with_steps(manifest: Manifest, steps: Mapping[str, Step]) -> Manifest:
    """Replaces the steps of parameters by those in `steps`; parameters without a step keep none."""
    parameters = {
        name: item if item.step is None else replace(item, step=steps[name])
        for name, item in manifest.parameters.items()
    }
    return replace(manifest, parameters=parameters)


# -- what is not of parameters


def united(ranks: Sequence[Manifest]) -> Manifest:
    """Merges everything but tensors and parameters, which remain those of the first rank.

    Files, layout, steps and notices are those of all ranks. Raises InconsistentCheckpoint if
    counters or loss scales differ, as in files of two saves.
    """
    first = ranks[0]
    for other in ranks[1:]:
        for what, of_all in (("its counters", _counters), ("its loss scale", _of_optimizer)):
            if of_all(other) != of_all(first):
                raise InconsistentCheckpoint(
                    "ranks-disagree", f"{_file_of(other)} differs from {_file_of(first)} in {what}"
                )
    of_ranks, omitted = _own_values(ranks)
    return first.replace(
        place=None,
        states=_first_ranks_states(ranks),
        of_ranks=of_ranks,
        layout={name: values for each in ranks for name, values in each.files.layout.items()},
        paths=tuple(_names(each.files.paths for each in ranks)),
        records=_together(each.files.records for each in ranks),
        steps=_together(each.run.steps for each in ranks),
        omitted=_together([*(each.notices.omitted for each in ranks), omitted]),
        warnings=_together(each.notices.warnings for each in ranks),
        inferred=tuple(_names(each.notices.inferred for each in ranks)),
    )


def _together(of_each: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(of_each)))


def _states(ranks: Sequence[Manifest], word: str) -> list[StateRow]:
    """Collects all ranks' optimizer states of two forms: `other` and `unsupported`.

    A value that is not one number is `other`. A state that no target gets is `unsupported`.
    Messages call a rank `word`.
    """
    values_by_name = {name: own for rank in ranks for name, own in rank.states.other_values.items()}
    rows = of_parameters("other", values_by_name)
    for number, rank in enumerate(ranks):
        for row in rank.states.of_form("unsupported"):
            rank_word = f"{word} {number}"  # several ranks may have tensors of the same name
            tensors = (replace(e, parameter=f"{rank_word}: {e.parameter}") for e in row.tensors)
            rows.append(replace(row, tensors=tuple(tensors)))
    return rows


def _of_run(whole: Manifest) -> States:
    return whole.states.without_form("number", "other")


def _counters(manifest: Manifest) -> object:
    return to_json(manifest.state.get("counters") or {})


def _of_optimizer(manifest: Manifest) -> object:
    """The part of the optimizer's state that must be equal on all ranks, as JSON.

    One such value is the loss scale.
    """
    # no states of single parameters: pipeline stages have different parameters. Numbers that
    # belong to no parameter are left out too: `_first_ranks_states` compares them
    kept = manifest.states.of_form("partition", "estimate")
    state = with_states(manifest.state, States(tuple(kept)), len(manifest.groups or ()))
    optimizer = state.get("optimizer") or {}
    return to_json({key: value for key, value in optimizer.items() if key != "members"})


def _first_ranks_states(ranks: Sequence[Manifest]) -> States:
    """The first rank's optimizer states.

    If ranks differ in a number that belongs to no parameter, this number becomes an unsupported
    state, which is only compared.
    """
    rows = ranks[0].states.of_form("number", "other", "partition", "estimate")
    gone: list[StateRow] = []
    for form in OF_NO_PARAMETER:
        numbers_of_ranks = [rank.states.numbers(form) for rank in ranks]
        for key in dict.fromkeys(chain.from_iterable(numbers_of_ranks)):
            values = [own.get(key) for own in numbers_of_ranks]
            if not all(alike(value, values[0]) for value in values):
                gone.append(unsupported(key, (NO_PARAMETER,), REASONS[form], values, ()))
            elif key in numbers_of_ranks[0]:
                rows.append(StateRow(key, form, value=values[0]))
    return States((*rows, *gone))


def _file_of(manifest: Manifest) -> str:
    return manifest.files.stated_in or manifest.root


def _own_values(ranks: Sequence[Manifest]) -> tuple[dict[str, Mapping[str, Any]], list[Notice]]:
    """Finds the values of the program's state in which a rank differs from the first rank.

    Returns these values by the name of the rank's file, and notices about values that the merged
    state leaves out.
    """
    differing = {name: values for each in ranks for name, values in each.files.of_ranks.items()}
    keys = (*ranks[0].files.rank_keys, *OF_RANKS)
    first = {key: to_json(ranks[0].state.get(key)) for key in keys}
    lines: set[str] = set()
    for other in ranks[1:]:
        of_other = {key: to_json(other.state.get(key)) for key in keys}
        if differing_values := {k: value for k, value in of_other.items() if value != first[k]}:
            name = os.path.basename(_file_of(other))
            differing[name] = {**differing_values, **differing.get(name, {})}
        lines |= {key for key in ranks[0].files.rank_keys if key in differing_values}
        ours, theirs = (rank.state.get("client_state") or {} for rank in (ranks[0], other))
        for key in ours.keys() | theirs.keys():
            value = theirs.get(key)
            if value is ours.get(key):  # of the same file
                continue
            # a tensor counts as different, because it may be a random state
            if tensors_in(value) or to_json(ours.get(key)) != to_json(value):
                lines.add(f"client_state {key!r}")
    return differing, [
        note("rank-state-omitted", f"{line} of model ranks other than 0") for line in sorted(lines)
    ]
