"""The rows of an inventory: what each file of a checkpoint is for, whose it is, and its state.

A format, and each trainer's program, has a table of roles. So the name of a file says its role and
the rank that wrote it, and a file that stands in for a lost one is that of the same role, of the
next rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

State = Literal["ok", "missing", "empty", "zeros", "cut", "unreadable"]
"""`cut` ends too early, `unreadable` cannot be parsed, or has a wrong checksum."""
Rank = tuple[tuple[str, int], ...]
"""The number of each axis that the name of a file states, the outermost first: dp 3, mp 0."""


class Role(Struct, frozen=True):
    """What files of one form are for, such as `model`, `optimizer` or `scheduler`.

    `names` are the names, with the folders in them, and each group is the number of one of the
    `axes`. Of a `fixed` axis (a layer's) no file is like that of another number. A program writes
    the `last` one when all ranks have written theirs.
    """

    name: str
    names: re.Pattern[str]
    axes: tuple[str, ...] = ()
    fixed: str = ""
    is_last: bool = False


def role(name: str, names: str, *axes: str, fixed: str = "", is_last: bool = False) -> Role:
    """A role whose names are given as a regular expression, in which digits are ASCII."""
    return Role(name, re.compile(names, re.ASCII | re.DOTALL), axes, fixed, is_last)


class Known(Struct, frozen=True):
    """What the name of a file says: its role, whose it is, and the name without these numbers."""

    role: Role
    rank: Rank
    form: str


class Row(Struct, frozen=True):
    """One file: its role, its name below the checkpoint, whose it is, and its state."""

    role: str
    name: str
    path: str
    rank: Rank = ()
    state: State = "ok"


def known(roles: Iterable[Role], path: str) -> Known | None:
    """What the name of a file says, which is the end of its path; None if no role has it."""
    places = [0, *(at + 1 for at, letter in enumerate(path) if letter == "/")]
    for role in roles:
        for place in places:
            if match := role.names.fullmatch(path, place):
                return Known(role, _rank(role, match), _form(match))
    return None


def _rank(role: Role, match: re.Match[str]) -> Rank:
    pairs = zip(role.axes, match.groups(), strict=True)
    return tuple((axis, int(number)) for axis, number in pairs if number is not None)


def _form(match: re.Match[str]) -> str:
    text, end = "", 0
    for group in range(1, 1 + match.re.groups):
        if match[group] is not None:
            text += match.string[end : match.start(group)] + "#"
            end = match.end(group)
    return text + match.string[end:]


def nearest(roles: Sequence[Role], lost: str, paths: Iterable[str]) -> str | None:
    """Which of the files has the lost one's role and the next rank; None if none is like it.

    The last rank's file may have more padding, so that those before the lost one are more alike.
    """
    own = known(roles, lost)
    found = []
    for path in paths:
        other = known(roles, path)
        if own is None or other is None or (other.role, other.form) != (own.role, own.form):
            continue
        pairs = enumerate(zip(own.rank, other.rank, strict=True))
        apart = [(place, mine, theirs) for place, (mine, theirs) in pairs if mine != theirs]
        if len(apart) == 1 and apart[0][1][0] != own.role.fixed:
            place, (_, mine), (_, theirs) = apart[0]
            found.append(((place, theirs > mine, abs(theirs - mine)), path))
    return min(found)[1] if found else None
