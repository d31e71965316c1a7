"""Names for an optimizer that knows its parameters by number alone.

    numbers of a group    0  1     2  3          torch.optim counts through its groups
    model's names         a  b  c  d  e  f       in the order of its state dict

A program gives parameters to its optimizer in the model's order, some left out (frozen ones,
buffers): each order of numbers is a subsequence of the names, with equal shapes. That is taken
where it is so in one way alone; no guess is made between two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ...errors import MissingData, WrongOption, listed

Shape = tuple[int, ...]
Named = tuple[str, Shape]
Order = Sequence[Shape | None]
MAX_STATES = 200_000
"""Partial matches that are looked at; where there are more, identical layers are left out."""
HINT = (
    "name them with --param-names FILE (the names of the optimizer's parameters, one per line, "
    "group by group)"
)


def match(
    orders: Sequence[Order],
    names: Sequence[Named],
    param_names: Sequence[str] | None = None,
) -> list[list[str]]:
    """The names of every order's parameters.

    An order lists shapes, None for a parameter without state, which may have any. As many
    `param_names` as there are parameters are the optimizer's own, order by order, if all shapes
    fit; otherwise they are what to choose from, in that order. Raises MissingData where no way
    fits, or more than one, and WrongOption where `param_names` holds a name that the model does
    not.
    """
    if param_names is None:
        return _only(orders, candidates(names))
    shapes = dict(names)
    if unknown := [name for name in param_names if name not in shapes]:
        raise WrongOption(
            f"--param-names names {listed(unknown, 4)}, which the model's state does not hold"
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
