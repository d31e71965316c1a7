"""Which of the model's names each number of an optimizer has, and whether that is inferred.

    numbers of a group    0  1     2  3          torch.optim counts through its groups
    model's names         a  b  c  d  e  f       of which some are frozen, or buffers

A number gets a name in three ways, and in no other:

    shapes        each number has the only name of its shape, in whatever order they stand
    order         the names stand in the module's order, and one order-preserving way fits: inferred
    param_names   the user says

A file whose names are sorted has lost the module's order: `layers.10` stands before `layers.2`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...errors import MissingData, WrongOption, listed

Shape = tuple[int, ...]
Named = tuple[str, Shape]
Order = Sequence[Shape | None]
MAX_STATES = 200_000
"""Partial matches that are looked at; where there are more, identical layers are left out."""
HINT = """\
name the optimizer's parameters with --param-names names.txt. Two lines in the training program \
write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"]))
or, with a Trainer of transformers or TRL, after it is built:
    names = {p: name for name, p in trainer.model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in trainer.create_optimizer().param_groups for p in g["params"]))"""  # noqa: E501


class Match(NamedTuple):
    """The names of every order's parameters; `inferred` are those that only their order tells."""

    names: list[list[str]]
    inferred: list[str]


def match(
    orders: Sequence[Order],
    names: Sequence[Named],
    in_order: bool,
    param_names: Sequence[str] | None = None,
) -> Match:
    """The names of every order's parameters.

    An order lists shapes, None for a parameter without state, which may have any. `in_order` says
    whether the names stand in the module's order. As many `param_names` as there are parameters are
    the optimizer's own, order by order, if all shapes fit; otherwise they are what to choose from,
    in that order. Raises MissingData where no rule gives a name to every number, and WrongOption
    where `param_names` has a name that the model lacks.
    """
    if param_names is not None:
        return Match(_chosen(orders, names, param_names), [])
    names = candidates(names)
    forced = _forced(orders, names)
    if forced is not None:
        return Match(forced, [])
    if not in_order:
        raise MissingData(
            f"the optimizer knows its {sum(map(len, orders))} parameters by number, several "
            "weights have the same shape, and the file does not show the order of the module",
            hint=HINT,
        )
    found = _only(orders, names)
    shapes = Counter(shape for _, shape in names)
    shape_of = dict(names)
    return Match(found, [name for each in found for name in each if shapes[shape_of[name]] > 1])


def keeps_order(names: Sequence[str]) -> bool:
    """Whether a dictionary with these keys shows the module's order.

    Keys in sorted order, as text or with their numbers by value, show nothing: safetensors sorts
    its keys, and what was loaded from it may have been saved again.
    """
    return list(names) not in (sorted(names), sorted(names, key=_by_number))


def _by_number(name: str) -> list[tuple[int, str]]:
    """`layers.10` after `layers.2`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _forced(orders: Sequence[Order], names: Sequence[Named]) -> list[list[str]] | None:
    """The names, where each number has one that no other could have; None where several fit."""
    by_shape: dict[Shape | None, list[str]] = {}
    for name, shape in names:
        by_shape.setdefault(shape, []).append(name)
    numbers = Counter(shape for order in orders for shape in order)
    if None in numbers:  # has what no other number can have
        by_shape[None] = [name for name, shape in names if not numbers[shape]]
    if any(count > 1 or len(by_shape.get(shape, ())) != 1 for shape, count in numbers.items()):
        return None
    return [[by_shape[shape][0] for shape in order] for order in orders]


def _chosen(
    orders: Sequence[Order], names: Sequence[Named], param_names: Sequence[str]
) -> list[list[str]]:
    shapes = dict(names)
    if unknown := [name for name in param_names if name not in shapes]:
        raise WrongOption(
            f"--param-names names {listed(unknown, 4)}, which the model's state does not have"
        )
    if twice := [name for name, count in Counter(param_names).items() if count > 1]:
        raise WrongOption(f"--param-names names {listed(twice, 4)} twice")
    chosen = [(name, shapes[name]) for name in param_names]
    if len(chosen) != sum(map(len, orders)):
        return _only(orders, chosen)
    stops = list(accumulate(map(len, orders)))
    try:
        return [
            _only([order], chosen[stop - len(order) : stop], stop - len(order))[0]
            for order, stop in zip(orders, stops, strict=True)
        ]
    except MissingData as error:
        try:
            return _only(orders, chosen)
        except MissingData:
            raise error from None


def candidates(names: Sequence[Named]) -> list[Named]:
    """The names that an optimizer may know: without the running statistics of normalisations.

    In a state dict nothing but their names tells torch.nn's `running_mean` and `running_var` from a
    weight.
    """
    known = {name for name, _ in names}

    def is_statistic(name: str) -> bool:
        start, _, last = name.rpartition("running_")
        return last in ("mean", "var") and {f"{start}running_mean", f"{start}running_var"} <= known

    return [named for named in names if not is_statistic(named[0])]


def _only(orders: Sequence[Order], names: Sequence[Named], base: int = 0) -> list[list[str]]:
    """The one match; orders that share no shape are matched apart, which keeps each search small.

    `base` is the number of the first parameter. Raises MissingData.
    """
    found: list[list[str]] = [[] for _ in orders]
    ways = 1
    for places, among in _independent(orders, names):
        count, matched = _count([orders[place] for place in places], among)
        if not count:
            raise MissingData(_stuck(orders, places, names, among, base), hint=HINT)
        ways = 0 if count < 0 else ways * count
        for place, chosen in zip(places, matched, strict=True):
            found[place] = chosen
    if ways != 1:
        told = f"{ways:,}" if 0 < ways < 1_000_000 else "very many"
        raise MissingData(
            f"the optimizer knows its {sum(map(len, orders))} parameters by number, and their "
            f"shapes fit the model's {len(names)} weights in {told} ways",
            hint=HINT,
        )
    return found


def _independent(
    orders: Sequence[Order], names: Sequence[Named]
) -> Iterator[tuple[list[int], list[Named]]]:
    """Orders that compete for names, by place, and the names that they compete for."""
    if any(shape is None for order in orders for shape in order):
        yield list(range(len(orders))), list(names)
        return
    sets: list[tuple[set[int], set[Shape | None]]] = []
    for place, order in enumerate(orders):
        here, shapes = {place}, set(order)
        for other in [each for each in sets if each[1] & shapes]:
            sets.remove(other)
            here, shapes = here | other[0], shapes | other[1]
        sets.append((here, shapes))
    for here, shapes in sets:
        yield sorted(here), [named for named in names if named[1] in shapes]


def _count(orders: Sequence[Order], names: Sequence[Named]) -> tuple[int, list[list[str]]]:
    """In how many ways names fit the orders (-1: more than are looked at), and the last of them.

    From name to name the states are how many parameters of every order have theirs; each is counted
    once, however many ways lead to it, and left where what is to come cannot suffice.
    """
    bounds = [_bounds(order, names) for order in orders]
    if any(bound is None for bound in bounds):
        return 0, []
    ranges = [bound for bound in bounds if bound is not None]
    places = [_places(order) for order in orders]
    left = Counter(shape for _, shape in names)
    wanted = sum(map(len, orders))

    states = {(0,) * len(orders): 1}
    came: list[dict[tuple[int, ...], int]] = []  # the order that a state's last name went to, or -1
    seen = 0
    for here, (_, shape) in enumerate(names):
        left[shape] -= 1
        after: dict[tuple[int, ...], int] = {}
        how: dict[tuple[int, ...], int] = {}
        for state, ways in states.items():
            needed = sum(
                _after(each.get(shape), at) for each, at in zip(places, state, strict=True)
            )
            spare = len(names) - here > wanted - sum(state) and needed <= left[shape]
            if spare and all(
                at == len(order) or here < last[at]
                for order, at, (_, last) in zip(orders, state, ranges, strict=True)
            ):
                after[state] = after.get(state, 0) + ways
                how[state] = -1
            for chosen, (order, at, (first, last)) in enumerate(
                zip(orders, state, ranges, strict=True)
            ):
                fits = at < len(order) and order[at] in (None, shape)
                if fits and first[at] <= here <= last[at]:
                    made = (*state[:chosen], at + 1, *state[chosen + 1 :])
                    after[made] = after.get(made, 0) + ways
                    how[made] = chosen
        states = after
        came.append(how)
        seen += len(states)
        if seen > MAX_STATES:
            return -1, [[] for _ in orders]
    end = tuple(map(len, orders))
    if end not in states:
        return 0, []
    found: list[list[str]] = [[] for _ in orders]
    state = end
    for (name, _), how in zip(reversed(names), reversed(came), strict=True):
        chosen = how[state]
        if chosen >= 0:
            found[chosen].append(name)
            state = (*state[:chosen], state[chosen] - 1, *state[chosen + 1 :])
    return states[end], [list(reversed(each)) for each in found]


def _bounds(order: Order, names: Sequence[Named]) -> tuple[list[int], list[int]] | None:
    """The first and the last name that each parameter of an order can have, were it alone."""
    shapes = [shape for _, shape in names]
    first = _earliest(order, shapes)
    last = _earliest(order[::-1], shapes[::-1])
    if len(first) < len(order):
        return None
    return first, [len(names) - 1 - place for place in reversed(last)]


def _earliest(order: Order, shapes: Sequence[Shape]) -> list[int]:
    """The first name of each parameter of an order, as far as there are any."""
    found: list[int] = []
    for place, shape in enumerate(shapes):
        if len(found) == len(order):
            break
        if order[len(found)] in (None, shape):
            found.append(place)
    return found


def _places(order: Order) -> dict[Shape | None, list[int]]:
    found: dict[Shape | None, list[int]] = {}
    for place, shape in enumerate(order):
        found.setdefault(shape, []).append(place)
    return found


def _after(places: list[int] | None, at: int) -> int:
    """How many of `places`, ascending, are not before `at`."""
    return len(places) - bisect_left(places, at) if places else 0


def _stuck(
    orders: Sequence[Order],
    places: Sequence[int],
    names: Sequence[Named],
    among: Sequence[Named],
    base: int,
) -> str:
    """What does not fit: the first parameter that finds no name of its shape, if it shows."""
    total = sum(map(len, orders))
    if total > len(names):
        return f"the optimizer knows {total} parameters by number, the model holds {len(names)}"
    for place in places:
        at = len(_earliest(orders[place], [shape for _, shape in among]))
        if at < len(orders[place]):
            shape = orders[place][at]
            number = base + sum(map(len, orders[:place])) + at
            told = "unknown shape" if shape is None else f"shape {list(shape)}"
            return (
                f"the optimizer's parameter {number}, of {told}, has no counterpart among the "
                "model's weights in their order"
            )
    return (
        f"the optimizer knows its {total} parameters by number, and their shapes do not fit the "
        "model's weights in any order-preserving way"
    )
