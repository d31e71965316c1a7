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
    """The result of `match`: a list of parameter names for each list of shapes that it was given.

    `inferred` are the names that only the order of the model's parameters shows.
    """

    names: list[list[str]]
    inferred: list[str]


def match(
    orders: Sequence[Order],
    names: Sequence[NamedShape],
    in_order: bool,
    param_names: Sequence[str] | None = None,
) -> MatchedNames:
    """Finds the model's name for every parameter that an optimizer numbers.

    orders         lists of parameters' shapes, in the module's order; None if unknown
    names          the model's names with their shapes
    in_order       whether `names` are in the module's order too
    param_names    the user's names

    Raises MissingData if the names cannot be found, and WrongOption if the user's do not fit.
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
    """Whether the order of these names is the order in which the module defines its parameters.

    It is not if the names are sorted, as strings or by the numbers in them. safetensors files sort
    names, and so does a program that saves again what it loaded from such a file.
    """
    return list(names) not in (sorted(names), sorted(names, key=_by_number))


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `layers.10` after `layers.2`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def candidates(names: Sequence[NamedShape]) -> list[NamedShape]:
    """Removes the running statistics of normalization layers, which no optimizer lists, from names.

    Only the names `running_mean` and `running_var` show that these tensors are not weights.
    """
    every = {name for name, _ in names}

    def is_statistic(name: str) -> bool:
        start, _, last = name.rpartition("running_")
        return last in ("mean", "var") and {f"{start}running_mean", f"{start}running_var"} <= every

    return [named for named in names if not is_statistic(named[0])]


# -- by shapes alone


def _by_shape(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[list[str]] | None:
    """Names every numbered parameter if each shape fits only one name; else None."""
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
    return f"{HINT}\nBut {LOST}" if total < len(names) else HINT


def _evident(orders: Sequence[Order], names: Sequence[NamedShape]) -> list[Order]:
    """Replaces shapes that cannot be a parameter's shape by None.

    A shape comes from optimizer states. If more parameters seem to have a shape than there are
    weights of this shape, it is not a parameter's shape.
    """
    # some states have another shape than the parameter: Amos keeps one number for each
    shown = Counter(chain(*orders))
    shown.subtract(shape for _, shape in names)
    return [[None if shown[shape] > 0 else shape for shape in order] for order in orders]


def _check_stated(order: Order, named_shapes: Sequence[NamedShape]) -> None:
    """Raises WrongOption if the user's names do not fit the optimizer, by number or by shapes."""
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
    """Names all parameters if exactly one assignment keeps the module's order in every list.

    `orders` has lists of shapes; None is an unknown shape. Raises MissingData if no assignment
    fits, or if several do.
    """
    total = sum(map(len, orders))
    needed = Counter(shape for order in orders for shape in order if shape is not None)
    # shapes that more weights have than parameters: only these fit a parameter of unknown shape
    spare = Counter(shape for _, shape in names) - needed
    owners: dict[int, int] = {}  # the order that has a name, by the places of both
    owned_before = -1
    while owned_before < len(owners):
        owned_before = len(owners)
        for place, order in enumerate(orders):
            free = [n for n in enumerate(names) if owners.get(n[0], place) == place]
            # a parameter's name is decided if the earliest and the latest assignment agree on it
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
    """Assigns to each parameter of a list the first name that fits; returns the names' indexes.

    A parameter of unknown shape fits the names whose shapes are in `spare`. The result is shorter
    than the list if a parameter finds no name.
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
    """Explains for an error why the parameter `orders[place][position]` fits no name."""
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
