"""The model's name of every parameter that an optimizer knows, be it by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InconsistentCheckpoint, MissingData, WrongOption, listed
from .finding import Optimizer
from .matching import keeps_order, match
from .tree import Found, Leaf
from .twins import is_float

ELEMENTWISE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg")
)
"""States that have a parameter's shape in every optimizer that keeps them (torch 2.13)."""


def names_of(
    found: Found,
    model: Mapping[str, Any],
    optimizer: Optimizer,
    param_names: Sequence[str] | None,
) -> dict[Any, str]:
    """The model's name of every parameter that the optimizer knows."""
    if optimizer.is_numbered:
        return _matched(found, model, optimizer, param_names)
    known = [name for members in optimizer.members for name in members]
    if all(name in model for name in known):
        return {name: name for name in known}
    from ...training.names import matched

    return dict(matched(known, [name for name in model if isinstance(model[name], Leaf)]))


def refuse_twice(found: Found, members: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(members).items() if count > 1]:
        raise InconsistentCheckpoint(
            f"{found.root}: the optimizer holds {listed(twice)} more than once",
            hint="the file was edited: torch gives every parameter to one group, once",
        )


def _matched(
    found: Found,
    model: Mapping[str, Any],
    optimizer: Optimizer,
    param_names: Sequence[str] | None,
) -> dict[int, str]:
    """Names for numbers: as groups state them (torch 2.6's `param_names`), else by `match`."""
    numbers = [number for members in optimizer.members for number in members]
    if found.known is not None and len(found.known.get("numbers", ())) == len(numbers):
        return dict(zip(numbers, found.known["numbers"], strict=True))
    stated = [name for group in optimizer.groups for name in group.get("param_names") or ()]
    if len(stated) == len(numbers) and not set(stated) <= model.keys():
        stated = _without_wrappers(stated, model)
    if len(stated) == len(numbers):
        _refuse_mixed(found, [_shape(optimizer.state.get(n, {})) for n in numbers], stated, model)
        return dict(zip(numbers, stated, strict=True))
    if param_names is not None and not set(param_names) <= model.keys():
        from ...training.names import matched

        param_names = list(matched(param_names, list(model)).values())
    orders = found.orders or optimizer.members
    shapes = {number: _shape(optimizer.state.get(number, {})) for number in numbers}
    names = _candidates(model)
    made = match(
        [[shapes[number] for number in order] for order in orders],
        [(name, model[name].shape) for name in names],
        found.in_order and keeps_order([str(name) for name in model]),
        param_names,
    )
    found.inferred = made.inferred
    if param_names is not None:
        found.warnings.append(
            "the optimizer knows its parameters by number: names are those of --param-names"
        )
    elif made.inferred:
        found.warnings.append(
            "the optimizer knows its parameters by number: the names of "
            f"{listed(made.inferred, 4)} are inferred from the order of the model's state"
        )
    return {
        number: name
        for order, each in zip(orders, made.names, strict=True)
        for number, name in zip(order, each, strict=True)
    }


def _candidates(model: Mapping[str, Any]) -> list[str]:
    """Names of weights that an optimizer may know; of several that share one memory the first."""
    owners: dict[Any, str] = {}
    return [
        name
        for name, leaf in model.items()
        if is_float(leaf) and owners.setdefault(leaf.place or name, name) == name
    ]


def _without_wrappers(told: Sequence[str], model: Mapping[str, Any]) -> list[str]:
    """The model's names of those that a wrapper's optimizer was given; none where no rule fits."""
    from ...training.names import matched

    held = [name for name, leaf in model.items() if isinstance(leaf, Leaf)]
    try:
        return list(matched(told, held).values())
    except (MissingData, WrongOption):
        return []


def _refuse_mixed(
    found: Found,
    shapes: Sequence[tuple[int, ...] | None],
    told: Sequence[str],
    model: Mapping[str, Any],
) -> None:
    """Raises where names have the shapes that states have, but in another order.

    Some optimizers keep states of other shapes than their weights: these tell nothing.
    """
    pairs = [(name, model[name].shape, shape) for name, shape in zip(told, shapes, strict=True)]
    held = [pair for pair in pairs if pair[2] is not None]
    if Counter(own for _, own, _ in held) == Counter(shape for _, _, shape in held):
        for name, own, shape in held:
            if shape != own:
                raise InconsistentCheckpoint(
                    f"{found.root}: param_names gives {name} of shape {list(own)} a state of shape "
                    f"{list(shape or ())}",
                    hint="names and states are of two different orders of parameters",
                )


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, as its states show it; None where they do not.

    Adafactor keeps rows and columns, 8-bit optimizers their scales: of those no shape is taken.
    """
    tensors = {key: leaf for key, leaf in state.items() if isinstance(leaf, Leaf) and key != "step"}
    shapes = {leaf.shape for key, leaf in tensors.items() if key in ELEMENTWISE}
    shapes = shapes or {leaf.shape for leaf in tensors.values()}
    return shapes.pop() if len(shapes) == 1 else None
