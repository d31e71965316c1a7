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
"""A function that converts a value for the manifest: `Keep(value, path, tensors)`.

Objects become records of their class and state. Tensors become entries under the path, which the
function adds to `tensors`.
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
    """Decides for each value whether conversions keep it, or zckpt only compares it.

    A conversion keeps a value that is plain (`is_plain`), if its key is a text that no other kept
    value has. zckpt only compares all other values. A key that is not a text, for example, may be
    the number of a parameter.

    Returns a `StateRow` for every value: a row of the manifest's table. `keep(value, path,
    tensors)` converts a value that is only compared into the row's value, and adds the value's
    tensors to `tensors`.
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
        row = unsupported(item.key, item.parameters, item.reason, value, tensors.values())
        rows[len(rows)] = row
    return [*rows.values()]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or an empty container."""
    return type(value) in PLAIN or (isinstance(value, (dict, list, tuple)) and not value)
