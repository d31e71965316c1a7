"""Which of the model's names each number of an optimizer has, and whether that is inferred.

    numbers of a group    0  1     2  3          torch.optim numbers parameters through its groups
    model's names         a  b  c  d  e  f       some of them are frozen, or buffers

A number gets a name in one of three ways:

    shapes        only one name has the number's shape, whatever the order
    order         the names are in the module's order, and only one way keeps that order: inferred
    param_names   the user states the names

A file with sorted names has lost the module's order: `layers.10` comes before `layers.2`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from ...core.grouping import by_key
from ...errors import MissingData, WrongOption, listed

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]
Order = Sequence[Shape | None]
"""The shapes of an optimizer's parameters in its order; None for one without state."""

Positions = tuple[int, ...]
"""How many parameters of every order have a name."""

MAX_STATES = 200_000
"""The search looks at this many partial matches; a model that needs more has very many ways."""

HINT = """\
name the optimizer's parameters with --param-names names.txt. Two lines in the training program \
write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"]))
or, with a Trainer of transformers or TRL, after it is built:
    names = {p: name for name, p in trainer.model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in trainer.create_optimizer().param_groups for p in g["params"]))"""  # noqa: E501


class MatchedNames(NamedTuple):
    """The names of every order's parameters; `inferred` are those that only the order shows."""

    names: list[list[str]]
    inferred: list[str]


def match(
    orders: Sequence[Order],
    names: Sequence[NamedShape],
    in_order: bool,
    param_names: Sequence[str] | None = None,
) -> MatchedNames:
    """The names of every order's parameters.

    A parameter without state (None) may have any shape. `in_order` says whether `names` are in the
    module's order. `param_names` are those of the optimizer's parameters, order by order. Raises
    MissingData if no rule gives a name to every number, and WrongOption for names that do not fit.
    """
    if param_names is not None:
        return MatchedNames(_stated(orders, names, param_names), [])
    names = candidates(names)
    by_shape = _by_shape(orders, names)
    if by_shape is not None:
        return MatchedNames(by_shape, [])
    if not in_order:
        raise MissingData(
            f"the optimizer knows its {sum(map(len, orders))} parameters by number, several "
            "weights have the same shape, and the file does not show the order of the module",
            hint=HINT,
        )
    by_order = _by_order(orders, names)
    counts = Counter(shape for _, shape in names)
    inferred = [
        name
        for order, own_names in zip(orders, by_order, strict=True)
        for shape, name in zip(order, own_names, strict=True)
        if shape is None or counts[shape] > 1
    ]
    return MatchedNames(by_order, inferred)


def keeps_order(names: Sequence[str]) -> bool:
    """Whether a dictionary with these keys shows the module's order.

    Sorted keys, as text or with their numbers by value, show nothing: safetensors sorts its keys,
    and a program may save again what it loaded from there.
    """
    return list(names) not in (sorted(names), sorted(names, key=_by_number))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts `layers.10` after `layers.2`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def candidates(names: Sequence[NamedShape]) -> list[NamedShape]:
    """The names that an optimizer may know: without the running statistics of normalisations.

    In a state dict, only their names distinguish torch.nn's `running_mean` and `running_var` from
    weights.
    """
    every = {name for name, _ in names}

    def is_statistic(name: str) -> bool:
        start, _, last = name.rpartition("running_")
        return last in ("mean", "var") and {f"{start}running_mean", f"{start}running_var"} <= every

    return [named for named in names if not is_statistic(named[0])]


# -- by shapes alone


def _by_shape(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[list[str]] | None:
    """The names, if each number can have only one; None if several assignments fit, or none."""
    by_shape: dict[Shape | None, list[str]] = {**by_key((shape, name) for name, shape in names)}
    numbers = Counter(shape for order in orders for shape in order)
    if None in numbers:  # gets what no other number can have
        by_shape[None] = [name for name, shape in names if not numbers[shape]]
    if any(count > 1 or len(by_shape.get(shape, ())) != 1 for shape, count in numbers.items()):
        return None
    return [[by_shape[shape][0] for shape in order] for order in orders]


# -- by names that the user states


def _stated(
    orders: Sequence[Order], names: Sequence[NamedShape], param_names: Sequence[str]
) -> list[list[str]]:
    shapes = dict(names)
    orders = _evident(orders, names)
    if unknown := [name for name in param_names if name not in shapes]:
        raise WrongOption(
            f"--param-names names {listed(unknown, 4)}, which the model's state does not have"
        )
    if twice := [name for name, count in Counter(param_names).items() if count > 1]:
        raise WrongOption(f"--param-names names {listed(twice, 4)} twice")
    _check_stated(list(chain(*orders)), [(name, shapes[name]) for name in param_names])
    remaining = iter(param_names)
    return [list(islice(remaining, len(order))) for order in orders]


def _evident(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[Order]:
    """The orders without shapes that more parameters show than weights have: Amos keeps numbers.

    Such a shape is that of a state alone, and proves nothing about the parameter.
    """
    shown = Counter(chain(*orders))
    shown.subtract(shape for _, shape in names)
    return [[None if shown[shape] > 0 else shape for shape in order] for order in orders]


def _check_stated(order: Order, stated: Sequence[NamedShape]) -> None:
    """Raises WrongOption if these names are not those of the optimizer's parameters."""
    hint = f"give the optimizer's names alone, in its own order, group after group: {HINT}"
    if len(stated) != len(order):
        raise WrongOption(
            f"--param-names names {len(stated)} parameters, and the optimizer has {len(order)}",
            hint=hint,
        )
    for number, ((name, shape), own) in enumerate(zip(stated, order, strict=True)):
        if own not in (None, shape):
            raise WrongOption(
                f"--param-names has {name} of shape {list(shape)} in place {number}, where the "
                f"optimizer has a parameter of shape {list(own or ())}",
                hint=hint,
            )


# -- by order


def _by_order(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[list[str]]:
    """The names in the only way that keeps their order; raises MissingData for none or several.

    Orders without a common shape are matched separately, which keeps each search small. If an order
    shares none of its shapes, and has each once, it may be any order.
    """
    chosen: list[list[str]] = [[] for _ in orders]
    ways = 1
    for places, rivals in _independent(orders, names):
        own = [orders[place] for place in places]
        certain = _by_shape(own, rivals)  # though shapes of other orders are not unique
        count, matched = _count(own, rivals) if certain is None else (1, certain)
        if not count:
            raise MissingData(_why_not(orders, places, names, rivals), hint=HINT)
        ways = 0 if count < 0 else ways * count
        for place, order in zip(places, matched, strict=True):
            chosen[place] = order
    if ways != 1:
        number = f"{ways:,}" if 0 < ways < 1_000_000 else "very many"
        raise MissingData(
            f"the optimizer knows its {sum(map(len, orders))} parameters by number, and their "
            f"shapes fit the model's {len(names)} weights in {number} ways",
            hint=HINT,
        )
    return chosen


def _independent(
    orders: Sequence[Order], names: Sequence[NamedShape]
) -> Iterator[tuple[list[int], list[NamedShape]]]:
    """Sets of orders that compete for names, by place, and the names that they compete for."""
    if any(shape is None for order in orders for shape in order):
        yield list(range(len(orders))), list(names)
        return
    sets: list[tuple[set[int], set[Shape | None]]] = []
    for place, order in enumerate(orders):
        places, shapes = {place}, set(order)
        for other in [each for each in sets if each[1] & shapes]:
            sets.remove(other)
            places, shapes = places | other[0], shapes | other[1]
        sets.append((places, shapes))
    for places, shapes in sets:
        yield sorted(places), [named for named in names if named[1] in shapes]


def _count(orders: Sequence[Order], names: Sequence[NamedShape]) -> tuple[int, list[list[str]]]:
    """In how many ways names fit the orders (-1: more than are looked at), and one of them.

    Goes from name to name. A state is how many parameters of every order have a name; each state is
    visited once, whatever number of ways lead to it, and dropped if the remaining names cannot
    suffice.
    """
    bounds = [_bounds(order, names) for order in orders]
    if any(bound is None for bound in bounds):
        return 0, []
    ranges = [bound for bound in bounds if bound is not None]
    numbers = [by_key((shape, number) for number, shape in enumerate(order)) for order in orders]
    left = Counter(shape for _, shape in names)
    wanted = sum(map(len, orders))

    states: dict[Positions, int] = {(0,) * len(orders): 1}
    choices: list[dict[Positions, int]] = []  # by name and state: the order that got it, or -1
    visited = 0
    for index, (_, shape) in enumerate(names):
        left[shape] -= 1
        following: dict[Positions, int] = {}
        choice: dict[Positions, int] = {}
        for state, ways in states.items():
            needed = sum(
                _not_before(each.get(shape), position)
                for each, position in zip(numbers, state, strict=True)
            )
            spare = len(names) - index > wanted - sum(state) and needed <= left[shape]
            if spare and all(
                position == len(order) or index < last[position]
                for order, position, (_, last) in zip(orders, state, ranges, strict=True)
            ):
                following[state] = following.get(state, 0) + ways
                choice[state] = -1
            for place, (order, position, (first, last)) in enumerate(
                zip(orders, state, ranges, strict=True)
            ):
                fits = position < len(order) and order[position] in (None, shape)
                if fits and first[position] <= index <= last[position]:
                    taken = (*state[:place], position + 1, *state[place + 1 :])
                    following[taken] = following.get(taken, 0) + ways
                    choice[taken] = place
        states = following
        choices.append(choice)
        visited += len(states)
        if visited > MAX_STATES:
            return -1, [[] for _ in orders]
    end = tuple(map(len, orders))
    if end not in states:
        return 0, []
    return states[end], _traced(end, names, choices)


def _traced(
    end: Positions, names: Sequence[NamedShape], choices: Sequence[dict[Positions, int]]
) -> list[list[str]]:
    """The names of every order on one way to the last state, followed backwards."""
    chosen: list[list[str]] = [[] for _ in end]
    state = end
    for (name, _), choice in zip(reversed(names), reversed(choices), strict=True):
        place = choice[state]
        if place >= 0:
            chosen[place].append(name)
            state = (*state[:place], state[place] - 1, *state[place + 1 :])
    return [list(reversed(order)) for order in chosen]


def _bounds(order: Order, names: Sequence[NamedShape]) -> tuple[list[int], list[int]] | None:
    """The first and the last name that each parameter of an order can have, were it alone."""
    shapes = [shape for _, shape in names]
    first = _earliest(order, shapes)
    last = _earliest(order[::-1], shapes[::-1])
    if len(first) < len(order):
        return None
    return first, [len(names) - 1 - index for index in reversed(last)]


def _earliest(order: Order, shapes: Sequence[Shape]) -> list[int]:
    """The first name that each parameter of an order can have, up to one that finds none."""
    first: list[int] = []
    for index, shape in enumerate(shapes):
        if len(first) == len(order):
            break
        if order[len(first)] in (None, shape):
            first.append(index)
    return first


def _not_before(numbers: list[int] | None, position: int) -> int:
    """How many of `numbers`, which ascend, are not before a position."""
    return len(numbers) - bisect_left(numbers, position) if numbers else 0


def _why_not(
    orders: Sequence[Order],
    places: Sequence[int],
    names: Sequence[NamedShape],
    rivals: Sequence[NamedShape],
) -> str:
    """Why nothing fits: the first parameter for which no name is left, if one order shows it."""
    total = sum(map(len, orders))
    if total > len(names):
        return f"the optimizer knows {total} parameters by number, the model holds {len(names)}"
    for place in places:
        position = len(_earliest(orders[place], [shape for _, shape in rivals]))
        if position < len(orders[place]):
            shape = orders[place][position]
            number = sum(map(len, orders[:place])) + position
            states = "show no shape" if shape is None else f"have the shape {list(shape)}"
            return (
                f"the optimizer's parameter {number}, whose states {states}, has no counterpart "
                "among the model's weights in their order: its own shape may be another"
            )
    return (
        f"the optimizer knows its {total} parameters by number, and the shapes of their states do "
        "not fit the model's weights in any way that keeps their order"
    )
