"""The rows of an inventory: what each file of a checkpoint is for, whose it is, and its state.

A format, and each trainer's program, has a table of roles. So the name of a file says its role and
the rank that wrote it, and a file that stands in for a lost one is that of the same role, of the
next rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from msgspec import Struct

State = Literal["ok", "missing", "empty", "zeros", "cut", "unreadable", "foreign", "unexpected"]
"""`cut` ends too early, `unreadable` cannot be parsed or has a wrong checksum, `foreign` was saved
as that of another rank or save, `unexpected` is of a rank that there cannot be."""
Rank = tuple[tuple[str, int], ...]
"""The number of each axis that the name of a file states, the outermost first: dp 3, mp 0."""


class Role(Struct, frozen=True):
    """What files of one form are for, such as `model`, `optimizer` or `scheduler`.

    `names` are the names, and each group in it is the number of one of the `axes`. A file of a
    fixed `place` (a layer's) is like none of another number there.
    """

    name: str
    names: re.Pattern[str]
    axes: tuple[str, ...] = ()
    place: str = ""

    def rank(self, name: str) -> Rank | None:
        """Whose a file of this name is; None for a name of another form."""
        match = self.names.fullmatch(name)
        if match is None:
            return None
        pairs = zip(self.axes, match.groups(), strict=True)
        return tuple((axis, int(number)) for axis, number in pairs if number is not None)


class Row(Struct, frozen=True):
    """One file: its role and rank, its name below the checkpoint, and the state in which it is.

    `size` is in bytes, and None for a file that is not there. `saved_as` is the name under which a
    foreign one was saved, if it states that.
    """

    role: str
    name: str
    path: str
    rank: Rank = ()
    size: int | None = None
    state: State = "ok"
    saved_as: str | None = None


def role_of(roles: Iterable[Role], name: str) -> tuple[Role, Rank] | None:
    """The role of a file by its name, or by its folder and name, and whose it is."""
    base = name.rpartition("/")[2]
    for role in roles:
        for form in (name, base):
            if (rank := role.rank(form)) is not None:
                return role, rank
    return None


def nearest(roles: Sequence[Role], lost: str, names: Iterable[str]) -> str | None:
    """Which of the files has the lost one's role and the next rank; None if none is like it.

    The last rank's file may have more padding, so that those before the lost one are more alike.
    """
    known = role_of(roles, lost)
    best: tuple[tuple[int, bool, int, str], str] | None = None
    for name in names:
        other = role_of(roles, name)
        if known is None or other is None or other[0] != known[0] or name == lost:
            continue
        role, rank = known
        if [axis for axis, _ in other[1]] != [axis for axis, _ in rank]:
            continue
        pairs = zip(rank, other[1], strict=True)
        apart = [(n, mine, theirs) for n, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if len(apart) != 1 or apart[0][1][0] == role.place:
            continue
        number, (_, mine), (_, theirs) = apart[0]
        how_far = (number, theirs > mine, abs(theirs - mine), name)
        best = min(best, (how_far, name)) if best else (how_far, name)
    return best and best[1]


def missing(rows: Iterable[Row], of: Collection[str] = ()) -> list[Row]:
    """The rows of files that are not there, of some roles or of all."""
    return [row for row in rows if row.state == "missing" and (not of or row.role in of)]
