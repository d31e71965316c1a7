"""Finds the model's names for parameters that an optimizer numbers, and marks inferred names.

    numbers of a group    0  1     2  3          torch.optim numbers parameters through its groups
    model's names         a  b  c  d  e  f       some of them are frozen, or buffers

A numbered parameter gets a name in one of three ways:

    shapes        only one name has the parameter's shape; orders do not matter
    order         names are in the module's order, and one assignment keeps that order: inferred
    param_names   the user states the names

A file with sorted names has lost the module's order: `layers.10` comes before `layers.2`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, islice
from typing import NamedTuple

from ...core.checkpoint.unlisted import LOST
from ...core.grouping import by_key
from ...errors import MissingData, WrongOption, listed

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]
Order = Sequence[Shape | None]
"""The shapes of an optimizer's parameters in its order; None for one without state."""

HINT = """\
name the optimizer's parameters with --param-names names.txt. Two lines in the training program \
write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"]))
or, with a Trainer of transformers or TRL, after it is built:
    names = {p: name for name, p in trainer.model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in trainer.create_optimizer().param_groups for p in g["params"]))"""  # noqa: E501


class MatchedNames(NamedTuple):
    """The names of an optimizer's parameters: one list for each order that was given to `match`.

    An order is a list of parameters in the order of the module, for example those of a group.
    `inferred` are the names that rest only on a parameter's position in this order.
    """

    names: list[list[str]]
    inferred: list[str]


def match(
    orders: Sequence[Order],
    names: Sequence[NamedShape],
    in_order: bool,
    param_names: Sequence[str] | None = None,
) -> MatchedNames:
    """Finds the names of all parameters in every order.

    An order lists the shapes of parameters in the module's order; None means an unknown shape, of a
    parameter without state. `names` are the model's names and shapes. `in_order` states whether
    they are in the module's order. `param_names` are the names that the user gives, order by order.
    Raises MissingData if no rule names every parameter, and WrongOption for given names that do not
    fit.
    """
    if param_names is not None:
        return MatchedNames(_stated(orders, names, param_names), [])
    names = candidates(names)
    by_shape = _by_shape(orders, names)
    if by_shape is not None:
        return MatchedNames(by_shape, [])
    if not in_order:
        raise MissingData(
            "names-needed",
            f"the optimizer lists its {sum(map(len, orders))} parameters by number, not by name, "
            "several weights have the same shape, and the file does not show the module's order",
            hint=_hint(sum(map(len, orders)), names),
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
    """Whether names in this order show the module's order of parameters.

    They do not if they are sorted, as text or by the numbers in them. safetensors sorts its keys,
    and a program may save again what it loaded from such a file.
    """
    return list(names) not in (sorted(names), sorted(names, key=_by_number))


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `layers.10` after `layers.2`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def candidates(names: Sequence[NamedShape]) -> list[NamedShape]:
    """The names that an optimizer may list: all but running statistics of normalizations.

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
    """The name of every numbered parameter, if shapes alone decide it; None if they do not."""
    by_shape: dict[Shape | None, list[str]] = {**by_key((shape, name) for name, shape in names)}
    numbers = Counter(shape for order in orders for shape in order)
    if None in numbers:  # it gets a name that no other number can have
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
            "names-do-not-fit",
            f"--param-names lists {listed(unknown, 4)}, which the model's state dict does not have",
        )
    if twice := [name for name, count in Counter(param_names).items() if count > 1]:
        raise WrongOption("names-do-not-fit", f"--param-names lists {listed(twice, 4)} twice")
    _check_stated(list(chain(*orders)), [(name, shapes[name]) for name in param_names])
    remaining = iter(param_names)
    return [list(islice(remaining, len(order))) for order in orders]


def _hint(total: int, names: Sequence[NamedShape]) -> str:
    """The hint to name an optimizer's `total` numbered parameters.

    If the model has more names, it adds that the optimizer may be only one rank's share.
    """
    return f"{HINT}\nBut {LOST}" if total < len(names) else HINT


def _evident(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[Order]:
    """Replaces shapes by None where they cannot be shapes of parameters.

    If more parameters have states of a shape than there are weights of this shape, then it is the
    shape of a state, not of a parameter. Amos, for example, keeps one number for each parameter.
    """
    shown = Counter(chain(*orders))
    shown.subtract(shape for _, shape in names)
    return [[None if shown[shape] > 0 else shape for shape in order] for order in orders]


def _check_stated(order: Order, named_shapes: Sequence[NamedShape]) -> None:
    """Raises WrongOption if the given names do not fit the optimizer, by count or by shapes."""
    hint = f"list only the optimizer's parameters, in its order, group after group: {HINT}"
    hint = f"{LOST}. If not, {hint}" if len(named_shapes) > len(order) else hint
    if len(named_shapes) != len(order):
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names lists {len(named_shapes)} parameters, but the optimizer has "
            f"{len(order)}",
            hint=hint,
        )
    for number, ((name, shape), shape_of_state) in enumerate(zip(named_shapes, order, strict=True)):
        if shape_of_state not in (None, shape):
            raise WrongOption(
                "names-do-not-fit",
                f"--param-names lists {name} of shape {list(shape)} as number {number}, but the "
                f"optimizer's parameter {number} has the shape {list(shape_of_state or ())}",
                hint=hint,
            )


# -- by order


def _by_order(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[list[str]]:
    """The names, if there is exactly one way to assign them in the module's order.

    An order is a list of shapes; None is an unknown shape. Each order is first matched by itself:
    its parameters get the earliest names that they can have, and then the latest. If a parameter
    gets the same name both times, the name belongs to it. The other orders then lose this name, and
    the search is repeated until no more names are decided. A parameter of unknown shape can have a
    name only if more names have its shape than there are parameters known to have this shape.

    Raises MissingData if no assignment fits, or if several do.
    """
    total = sum(map(len, orders))
    needed = Counter(shape for order in orders for shape in order if shape is not None)
    spare = Counter(shape for _, shape in names) - needed
    owners: dict[int, int] = {}  # the order that has a name, by the places of both
    owned_before = -1
    while owned_before < len(owners):
        owned_before = len(owners)
        for place, order in enumerate(orders):
            free = [n for n in enumerate(names) if owners.get(n[0], place) == place]
            first, last = _earliest(order, free, spare), _earliest(order[::-1], free[::-1], spare)
            if len(first) < len(order):
                reason = _why_not(orders, place, len(first), names)
                raise MissingData("names-needed", reason, hint=_hint(total, names))
            owners |= {a: place for a, b in zip(first, reversed(last), strict=True) if a == b}
    if owned_before < total:
        raise MissingData(
            "names-needed",
            f"the optimizer lists its {total} parameters by number, not by name, and their "
            f"shapes fit the model's {len(names)} weights in several ways, or in none",
            hint=_hint(total, names),
        )
    chosen = by_key((owners[index], names[index][0]) for index in sorted(owners))
    return [chosen.get(place, []) for place in range(len(orders))]


def _earliest(
    order: Order, names: Sequence[tuple[int, NamedShape]], spare: Collection[Shape]
) -> list[int]:
    """For each parameter of an order, the index of the first name that it can have.

    A parameter of unknown shape can have the names whose shapes are in `spare`. The result ends
    before the first parameter for which no name is left.
    """
    first: list[int] = []
    for index, (_, shape) in names:
        if len(first) == len(order):
            break
        wanted = order[len(first)]
        if wanted == shape or (wanted is None and shape in spare):
            first.append(index)
    return first


def _why_not(
    orders: Sequence[Order], place: int, position: int, names: Sequence[NamedShape]
) -> str:
    """The reason why the parameter `orders[place][position]` matches none of the model's names."""
    total = sum(map(len, orders))
    if total > len(names):
        return f"the optimizer lists {total} parameters by number, but the model has {len(names)}"
    shape = orders[place][position]
    states = "show no shape" if shape is None else f"have the shape {list(shape)}"
    return (
        f"the optimizer's parameter {sum(map(len, orders[:place])) + position}, whose states "
        f"{states}, matches none of the model's weights in their order: its state may have another "
        "shape than the parameter"
    )
