"""Finds parameters that lack a state of the optimizer which similar parameters have.

An optimizer usually keeps the same states for all parameters of a group. A parameter that lacks
some of them has probably lost them: a file or a key is damaged, and a resumed training would start
with other states. Not every difference is a loss:

    no state at all     never updated, unfrozen late, or frozen without the checkpoint stating it
    other states        Adafactor factors matrices only; Muon's class trains vectors as Adam does
    other groups        groups with other options: amsgrad, momentum 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from msgspec import Struct

from ...errors import Notice, listed, warning
from ..grouping import by_key
from .manifest import Manifest, slot_key
from .weights import is_optimizers

STEP = "step"


class _States(Struct, frozen=True):
    """The optimizer states of one parameter: their keys, and which have the parameter's shape."""

    name: str
    axes: int
    keys: frozenset[str]
    shaped: frozenset[str]


def missing_states(manifest: Manifest) -> tuple[list[Notice], list[Notice]]:
    """Warns about parameters that have lost some optimizer states, or all of them.

    Returns two lists of warnings: about parameters that lack states which similar parameters of
    their param group have, and about parameters without any state.
    """
    groups = list(_groups(manifest))
    return _missing_of_some(groups), _missing_all(groups)


def _missing_of_some(groups: Sequence[list[_States]]) -> list[Notice]:
    lost = by_key(
        (tuple(sorted(missing)), states.name)
        for group in groups
        for states, missing in _missing_in(group)
    )
    return [
        warning(
            "state-missing",
            f"{listed(names, 4)}: the optimizer's {listed(keys)} is missing, which other "
            "parameters of the same group have",
            subject=names[0],
        )
        for keys, names in lost.items()
    ]


def _missing_all(groups: Sequence[list[_States]]) -> list[Notice]:
    names = [
        states.name
        for group in groups
        if any(each.shaped for each in group)
        for states in group
        if not states.keys
    ]
    if not names:
        return []
    return [
        warning(
            "never-updated",
            f"{listed(names, 4)}: the optimizer has no state, although other parameters of the "
            "same group have one: never updated, or the state is lost",
            subject=names[0],
        )
    ]


def _groups(manifest: Manifest) -> Iterator[list[_States]]:
    """Yields a list for each param group: the states of each of its trained parameters."""
    slots = {entry.slot for rank in manifest.rank_manifests for entry in rank.entries.values()}
    key_of = {slot: slot_key(slot) for slot in slots if is_optimizers(slot)}
    # a group's step is stated also for parameters that were never updated
    own_steps = manifest.run.step_place is None or manifest.run.step_place.where == "state"
    groups: dict[int | None, list[_States]] = {}
    for rank in manifest.rank_manifests if key_of else ():
        entries = rank.entries.values()
        shaped = by_key((e.parameter, key_of[e.slot]) for e in entries if e.slot in key_of)
        scalars = rank.states.scalars
        other_states = by_key(
            (name, str(row.key))
            for row in rank.states.of_form("other", "unsupported")  # these are in the files too
            for name in row.parameters
        )
        for name, parameter in rank.parameters.items():
            if not parameter.trainable or not prod(parameter.shape):
                continue
            shaped_keys = tuple(shaped.get(name, ()))
            keys = (*shaped_keys, *scalars.get(name, ()), *other_states.get(name, ()))
            if own_steps and parameter.step is not None:
                keys += (STEP,)
            title, axes = rank.titled(name), len(parameter.shape)
            states = _States(title, axes, frozenset(keys), frozenset(shaped_keys))
            groups.setdefault(parameter.group, []).append(states)
    yield from groups.values()


class _Kinds:
    """Counts the parameters of a param group by the set of optimizer states that they have.

    `holders` maps the key of a state to the number of parameters that have it. `having` maps it to
    the sets that contain it.
    """

    def __init__(self, counts: Counter[frozenset[str]]) -> None:
        self.counts, self.total = counts, sum(counts.values())
        self.holders: Counter[str] = Counter()
        for keys, count in counts.items():
            self.holders.update(dict.fromkeys(keys, count))
        self.having = by_key((key, keys) for keys in counts for key in keys)


def _missing_in(group: list[_States]) -> Iterator[tuple[_States, set[str]]]:
    """Yields parameters of one group that have lost states, with the keys of these states."""
    kinds = Counter((states.axes, states.keys) for states in group if states.keys)
    if len(kinds) < 2:
        return
    by_axes = by_key((states.axes, states.keys) for states in group if states.keys)
    like = {axes: _Kinds(Counter(keys)) for axes, keys in by_axes.items()}
    every = _Kinds(Counter(states.keys for states in group if states.keys))
    # no other states, such as those in which Adafactor factors matrices only
    countable = {STEP}.union(*(states.shaped for states in group))
    missing = {kind: _missing(kind[1], like[kind[0]], every) & countable for kind in kinds}
    for states in group:
        if states.keys and (keys := missing[states.axes, states.keys]):
            yield states, keys


def _missing(keys: frozenset[str], like: _Kinds, every: _Kinds) -> set[str]:
    """Finds the states that a parameter with the optimizer states `keys` has lost.

    A state counts as lost if at least half of the group's parameters with as many axes (`like`)
    have it. If the parameter is the only one of these, all others of the group (`every`) must.
    """
    alone = len(like.counts) == 1 and like.counts[keys] == 1
    # the only parameter with this number of axes: all others must have the key
    most = every if alone else like
    rarest = min((most.having[key] for key in keys), key=len)  # every larger set contains this key
    # `keys < more`: otherwise the parameter has another state instead
    return {
        key
        for key in set().union(*(more - keys for more in rarest if keys < more))
        if (most.holders[key] == most.total - 1 if alone else 2 * most.holders[key] >= most.total)
    }
