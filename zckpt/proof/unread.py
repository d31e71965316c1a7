"""Are states equal that are not read, if both checkpoints have them?

What they mean need not be known: their values are compared as JSON, and their tensors, one by one,
with the tensors of the same places.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..core.manifest import Manifest, Unread
from ..core.plan import Match
from ..errors import listed

Report = dict[str, Any]
Owned = tuple[str, tuple[str, ...]]


def pairs(a: Manifest, b: Manifest) -> list[Match]:
    """The tensors that both have in the same place of such a state."""
    ours, theirs = _known(a), _known(b)
    return [
        Match(one, other)
        for key in ours
        if _form(ours[key]) == _form(theirs.get(key, []))
        for mine, its in zip(ours[key], theirs[key], strict=True)
        for one, other in zip(mine.tensors, its.tensors, strict=True)
    ]


def rest(a: Manifest, b: Manifest) -> tuple[Manifest, Manifest, list[Report], list[str]]:
    """Both sides without such states of both; those that differ as lines, the others as notes.

    What differs in its tensors alone is no line: `pairs` are compared with all tensors.
    """
    ours, theirs = _known(a), _known(b)
    shared = [key for key in ours if key in theirs]
    lines, notes = [], []
    for key, owners in shared:
        one, other = (_form(side[key, owners]) for side in (ours, theirs))
        name = f"{key} of {listed(owners, 4)}"
        if one == other:
            notes.append(f"{name}: not read, and compared as it is")
        else:
            lines.append({"key": name, "a": one, "b": other})
    a, b = (
        replace(side, unread=tuple(i for i in side.unread if (i.key, i.parameters) not in shared))
        for side in (a, b)
    )
    return a, b, lines, notes


def _known(manifest: Manifest) -> dict[Owned, list[Unread]]:
    """The states whose values are known; each model rank has its own."""
    states: dict[Owned, list[Unread]] = {}
    for item in manifest.unread:
        if item.content:
            states.setdefault((item.key, item.parameters), []).append(item)
    return states


def _form(states: list[Unread]) -> str:
    """The values, and the types and shapes of their tensors."""
    return ", ".join(
        " ".join([item.content, *(f"{each.dtype} {list(each.shape)}" for each in item.tensors)])
        for item in states
    )
