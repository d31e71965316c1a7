"""What does an optimizer's state dict have beside the states of its parameters?

A number or a text is kept, and a target may lack it: the report says so. Anything else is a state
of no parameter, which is not read: a target would lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.inert import PLAIN, inside
from ..core.checkpoint.optimizer_states import StateRow, unsupported
from ..core.checkpoint.states import NO_PARAMETER, REASONS

NO_NAMES = "it has no names: zckpt reads the states of a parameter by their names"

Keep = Callable[[Any, str, dict[Key, Entry]], Any]
"""Gives an inert value; the entries of its tensors, whose names begin with a path, are added."""


class ExtraState(Struct, frozen=True):
    """A value of an optimizer's state dict, and why it is not read."""

    key: Any
    value: Any
    reason: str
    parameters: tuple[str, ...] = (NO_PARAMETER,)


def sorted_out(extra_states: Iterable[ExtraState], keep: Keep) -> list[StateRow]:
    """Rows of what is kept, and of what is not read.

    A key that is no text could be a parameter's; and of two that are equal, only one has the place.
    """
    forms = {reason: form for form, reason in REASONS.items()}
    rows: dict[Any, StateRow] = {}
    for item in extra_states:
        form = forms.get(item.reason)
        is_named = type(item.key) is str and form is not None and (form, item.key) not in rows
        if form is not None and is_named and is_plain(item.value):
            rows[form, item.key] = StateRow(item.key, form, value=item.value)
            continue
        tensors: dict[Key, Entry] = {}
        value = keep(item.value, inside("optimizer.beside", item.key), tensors)
        own = unsupported(item.key, item.parameters, item.reason, value, tensors.values())
        rows[len(rows)] = own
    return [*rows.values()]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a container without anything in it."""
    return type(value) in PLAIN or (isinstance(value, (dict, list, tuple)) and not value)
