"""The model's name of every parameter that an optimizer knows, be it by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import InconsistentCheckpoint, MissingData, WrongOption, listed
from .finding import Optimizer
from .tree import Found, Leaf
from .twins import Seen, is_float, is_updated


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
    from ...naming import matched

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
    """Names for numbers: as groups tell them (torch 2.6's `param_names`), else by shapes."""
    numbers = [number for members in optimizer.members for number in members]
    if found.known is not None and len(found.known.get("numbers", ())) == len(numbers):
        return dict(zip(numbers, found.known["numbers"], strict=True))
    told = [name for group in optimizer.groups for name in group.get("param_names") or ()]
    if len(told) == len(numbers) and not set(told) <= model.keys():
        told = _without_wrappers(told, model)
    if len(told) == len(numbers):
        _refuse_mixed(found, [_shape(optimizer.state.get(n, {})) for n in numbers], told, model)
        return dict(zip(numbers, told, strict=True))
    if param_names is not None and not set(param_names) <= model.keys():
        from ...naming import matched

        param_names = list(matched(param_names, list(model)).values())
    from .matching import match

    orders = found.orders or optimizer.members
    shapes = {number: _shape(optimizer.state.get(number, {})) for number in numbers}
    owners = [name for name in model if is_float(model[name])]
    if len(owners) != len(numbers):  # else these are all, whichever hold the same
        owners = _owners(model, owners)
    candidates = [(name, model[name].shape) for name in owners]
    names = match([[shapes[n] for n in order] for order in orders], candidates, param_names)
    given = {
        number: name
        for order, each in zip(orders, names, strict=True)
        for number, name in zip(order, each, strict=True)
    }
    if param_names is None:
        _refuse_copies(model, optimizer, given, set(owners))
    found.warnings.append(
        "the optimizer knows its parameters by number: each was given the one name that its shape "
        "and its place allow"
        if param_names is None
        else "the optimizer knows its parameters by number: names are those of --param-names"
    )
    return given


def _refuse_copies(
    model: Mapping[str, Any], optimizer: Optimizer, given: Mapping[int, str], owners: set[str]
) -> None:
    """Raises where a number may as well be that of a copy: only an update tells copies apart."""
    from .matching import HINT

    rest = {held.twin: n for n, held in model.items() if is_float(held) and n not in owners}
    for number, name in given.items():
        held = model[name]
        known_apart = held.twin is None or held.place is not None
        if known_apart or held.twin not in rest or is_updated(optimizer.state.get(number, {})):
            continue
        raise MissingData(
            f"the optimizer knows its parameters by number, and {name} and {rest[held.twin]} hold "
            "the same: no update shows which of them it has",
            hint=HINT,
        )


def _without_wrappers(told: Sequence[str], model: Mapping[str, Any]) -> list[str]:
    """The model's names of those that a wrapper's optimizer was given; none where no rule fits."""
    from ...naming import matched

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
    """The shape of a parameter, as its states tell it; None without any."""
    shapes = [held.shape for key, held in state.items() if isinstance(held, Leaf) and key != "step"]
    return max(shapes, key=len, default=None)


def _owners(model: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Of several that hold the same the first.

    Where the file tells what is one memory, equal bytes are two weights: a frozen copy, as of a
    teacher or a reference, is the model's first as often as its second.
    """
    seen = Seen()

    def owner(name: str) -> str:
        held = model[name]
        return seen.owner(name, held if held.place is None else replace(held, twin=None))

    return [name for name in names if owner(name) == name]
