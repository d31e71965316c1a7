"""Compares optimizer states that zckpt does not support, if both checkpoints have them.

zckpt does not know what such a state means, but can compare it: values as JSON, and tensors one by
one in their order.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.optimizer_states import StateRow
from ..core.grouping import by_key
from ..core.passes.description import Report
from ..core.passes.plan import Match
from ..errors import Notice, listed, note

Owned = tuple[str, tuple[str, ...]]
Form = tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]
"""What is compared of an unsupported state: per rank, its value and tensors' types and shapes."""


def pairs(a: Manifest, b: Manifest) -> list[Match]:
    """Pairs the tensors of unsupported optimizer states that both checkpoints have.

    A state's tensors are paired one by one, and only if its values, and the types and shapes of its
    tensors, are equal in both checkpoints.
    """
    return [
        Match(one, other)
        for ours, theirs in _shared(a, b).values()
        if _form(ours) == _form(theirs)
        for mine, its in zip(ours, theirs, strict=True)
        for one, other in zip(mine.tensors, its.tensors, strict=True)
    ]


def rest(a: Manifest, b: Manifest) -> tuple[Manifest, Manifest, list[Report], list[Notice]]:
    """Compares unsupported optimizer states that both checkpoints have, and removes them from both.

    Returns both manifests without these states, a report line for each state that differs, and a
    notice for each that is equal. The elements of their tensors are compared elsewhere: see
    `pairs`.
    """
    shared = _shared(a, b)
    lines, notes = [], []
    for (key, owners), (ours, theirs) in shared.items():
        name = f"{key} of {listed(owners, 4)}"
        if _form(ours) == _form(theirs):
            message = f"{name}: zckpt does not support this state; only its bytes were compared"
            notes.append(note("state-unsupported", message, subject=key))
        else:
            lines.append({"key": name, "a": _text(ours), "b": _text(theirs)})

    def is_alone(row: StateRow) -> bool:
        return row.form != "unsupported" or (row.key, row.parameters) not in shared

    a, b = (replace(side, states=side.states.where(is_alone)) for side in (a, b))
    return a, b, lines, notes


def _shared(a: Manifest, b: Manifest) -> dict[Owned, tuple[list[StateRow], list[StateRow]]]:
    """The unsupported optimizer states that both checkpoints have and zckpt could read.

    For each state there are two lists, for `a` and for `b`, with a value of each model-parallel
    rank.
    """
    ours, theirs = _by_owner(a), _by_owner(b)
    return {
        key: (rows, theirs[key])
        for key, rows in ours.items()
        if key in theirs and all(item.value for item in (*rows, *theirs[key]))
    }


def _by_owner(manifest: Manifest) -> dict[Owned, list[StateRow]]:
    rows = manifest.states.of_form("unsupported")
    return by_key(((row.key, row.parameters), row) for row in rows)


def _form(states: list[StateRow]) -> Form:
    return tuple(
        (item.value, tuple((each.dtype, each.shape) for each in item.tensors)) for item in states
    )


def _text(states: list[StateRow]) -> str:
    return ", ".join(
        " ".join([content, *(f"{dtype} {list(shape)}" for dtype, shape in tensors)])
        for content, tensors in _form(states)
    )
