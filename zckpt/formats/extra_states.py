"""Values in an optimizer's state dict beside the states of its parameters.

zckpt keeps such a value if it is a number or a text. If a target cannot store it, the report says
so. Any other value is only compared with the values in other checkpoints: no target gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.inert import PLAIN, inside
from ..core.checkpoint.optimizer_states import StateRow, unsupported
from ..core.checkpoint.states import NO_PARAMETER, REASONS

NO_NAMES = "it is no dictionary, from which zckpt could read the parameter's states by their names"

Keep = Callable[[Any, str, dict[Key, Entry]], Any]
"""A function `Keep(value, path, tensors)` that converts a value for the manifest.

Objects become records of their class and state. Tensors become entries below `path` in the
dictionary `tensors`.
"""


class ExtraState(Struct, frozen=True):
    """A value in an optimizer's state dict beside the usual states of parameters, such as moments.

    `reason` is a text that says why zckpt does not use the value as a parameter's state.
    """

    key: Any
    value: Any
    reason: str
    parameters: tuple[str, ...] = (NO_PARAMETER,)


def sorted_out(extra_states: Iterable[ExtraState], keep: Keep) -> list[StateRow]:
    """Makes a `StateRow`, a row of the manifest's table, for each value.

    A conversion keeps a plain value (`is_plain`) that belongs to no parameter, if its key is a text
    and no kept value of the same form has this key. All other values serve only comparisons of
    checkpoints; `keep` converts them for the manifest.
    """
    forms = {reason: form for form, reason in REASONS.items()}
    rows: dict[Any, StateRow] = {}
    for item in extra_states:
        # only a value that belongs to no parameter has one of these reasons
        form = forms.get(item.reason)
        # a key that is not a text may be the number of a parameter
        is_named = type(item.key) is str and form is not None and (form, item.key) not in rows
        if form is not None and is_named and is_plain(item.value):
            rows[form, item.key] = StateRow(item.key, form, value=item.value)
            continue
        tensors: dict[Key, Entry] = {}
        value = keep(item.value, inside("optimizer.beside", item.key), tensors)
        row = unsupported(item.key, item.parameters, item.reason, value, tensors.values())
        rows[len(rows)] = row
    return [*rows.values()]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or an empty container."""
    return type(value) in PLAIN or (isinstance(value, (dict, list, tuple)) and not value)
