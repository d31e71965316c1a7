"""What does an optimizer's state dict have beside the states of its parameters?

A number or a text is kept in `state.optimizer.beside`, and a target may lack it: the report says
so. Anything else is a state of no parameter, which is not read: a target would lack it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from ..core.inert import PLAIN, inside, to_json
from ..core.manifest import Entry, Unread
from ..core.states import NO_PARAMETER

OF_NO_GROUP = "no group contains it: zckpt reads the states of parameters alone"
BESIDE_STATE = "it stands beside the optimizer's `state`, which alone zckpt reads"

Keep = Callable[[Any, str, dict[str, Entry]], Any]
"""Gives an inert value; the entries of its tensors, whose names begin with a path, are added."""


class Stranger(Struct, frozen=True):
    """A value of an optimizer's state dict, and why it is not read."""

    key: Any
    value: Any
    reason: str
    parameters: tuple[str, ...] = (NO_PARAMETER,)


def sorted_out(strangers: Iterable[Stranger], keep: Keep) -> tuple[dict[str, Any], list[Unread]]:
    """The numbers and texts by their keys, and what is not read."""
    numbers: dict[str, Any] = {}
    states = []
    for item in strangers:
        if is_plain(item.value):
            numbers[str(item.key)] = item.value
            continue
        tensors: dict[str, Entry] = {}
        value = keep(item.value, inside("optimizer.beside", item.key), tensors)
        states.append(unread(item.key, item.parameters, item.reason, value, tensors.values()))
    return numbers, states


def unread(
    key: Any, parameters: Iterable[str], reason: str, value: Any, tensors: Iterable[Entry]
) -> Unread:
    """A state that is compared as it is; `tensors` are those in its inert value."""
    content = json.dumps(to_json(value), sort_keys=True)
    return Unread(str(key), tuple(parameters), reason, content, tuple(tensors))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a container without anything in it."""
    return type(value) in PLAIN or (isinstance(value, (dict, list, tuple)) and not value)
