"""The one room of an inventory: which files are there, whose they are, and which are another's.

A format, and each trainer's program, has a table of roles. So the name of a file says its role and
the rank that wrote it, and a file that stands in for a lost one is that of the same role, of the
next rank.

torch.save gives the folder in its zip the name of the file, without the ending (torch 1.6 to 2.13).
So a file that was renamed or copied still states whose it is. It states nothing if it was saved
into a buffer (torch calls the folder `archive`), under a name of another form that no file beside
it has, or before torch 1.6.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

from msgspec import Struct

from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, Notice, listed, note
from . import sources

State = Literal["ok", "missing", "empty", "zeros", "cut", "unreadable", "foreign", "unexpected"]
"""`cut` ends too early, `unreadable` cannot be parsed, or has a wrong checksum. `foreign` is a file
of another run, engine or rank, `unexpected` one of a rank that the others do not count."""
Rank = tuple[tuple[str, int], ...]
"""The number of each axis that the name of a file states, the outermost first: dp 3, mp 0."""
Numbers = tuple[int, ...]
"""The numbers of a rank alone."""


class Role(Struct, frozen=True):
    """What files of one form are for, such as `model`, `optimizer` or `scheduler`.

    `names` are the names, with the folders in them. Each group is the number of one of the `axes`,
    and an empty one is 0; a first group `stem` is what the program chose. Of a `fixed` axis (a
    layer's) no file is like that of another number. A program writes the `last` one when all ranks
    have written theirs.
    """

    name: str
    names: re.Pattern[str]
    axes: tuple[str, ...] = ()
    fixed: str = ""
    is_last: bool = False

    def named(self, example: str, numbers: Numbers) -> str:
        """The name of the file with these numbers; `example` is one of the same form."""
        match = _match(self, example, _places(example))
        assert match is not None
        groups = [(group, digits) for group, digits in _groups(match) if digits is not None]
        for (group, digits), number in reversed([*zip(groups, numbers, strict=True)]):
            if digits:
                width = len(digits) if digits.startswith("0") else 1
                start, stop = match.span(group)
                example = f"{example[:start]}{number:0{width}d}{example[stop:]}"
        return example


def role(name: str, names: str, *axes: str, fixed: str = "", is_last: bool = False) -> Role:
    """A role whose names are given as a regular expression, in which digits are ASCII."""
    return Role(name, re.compile(names, re.ASCII | re.DOTALL), axes, fixed, is_last)


ANY = role("file", r"(?P<stem>.*)")
"""Files that are told apart by their whole names."""


class Known(Struct, frozen=True):
    """What the name of a file says: its role, whose it is, and what stands before that."""

    role: Role
    rank: Rank
    stem: str

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.rank)

    @property
    def numbers(self) -> Numbers:
        return tuple(number for _, number in self.rank)

    def numbers_with(self, axis: str, number: int) -> Numbers:
        """The numbers of another rank of one axis."""
        return tuple(number if own == axis else same for own, same in self.rank)

    def is_like(self, other: Known) -> bool:
        """Whether the other name is that of a rank's file of the same kind."""
        return (self.role, self.stem) == (other.role, other.stem)

    def at(self, axis: str) -> int | None:
        """The number of one axis; None if the name has none."""
        return dict(self.rank).get(axis)


class Row(Struct, frozen=True):
    """One file: its role, its name below the checkpoint, whose it is, and its state.

    `size` is in bytes, None if it is not known. `saved_as` is the name under which torch.save wrote
    it, with the ending of today's, where a reader has looked for it.
    """

    role: str
    name: str
    path: str
    rank: Rank = ()
    state: State = "ok"
    size: int | None = None
    saved_as: str | None = None


def known(roles: Iterable[Role], path: str) -> Known | None:
    """What the name of a file says, which is the end of its path; None if no role has it."""
    places = _places(path)
    for role in roles:
        if (match := _match(role, path, places)) is not None:
            pairs = zip(role.axes, (digits for _, digits in _groups(match)), strict=True)
            rank = tuple((axis, int(digits or 0)) for axis, digits in pairs if digits is not None)
            return Known(role, rank, path[: match.start()] + match.groupdict().get("stem", ""))
    return None


def any_of(roles: Iterable[Role]) -> re.Pattern[str]:
    """What fits the names without folders that `known` knows: one expression instead of many."""
    names = (re.sub(r"\(\?P<\w+>", "(", own.names.pattern) for own in roles)
    return re.compile("|".join(f"(?:{each})" for each in names), re.ASCII | re.DOTALL)


def _places(path: str) -> list[int]:
    """Where the end of a path may begin that is a name with its folders."""
    if "/" not in path:  # there may be 50,000 of them
        return [0]
    return [0, *(at.end() for at in re.finditer("/", path))]


def _match(role: Role, path: str, places: Sequence[int]) -> re.Match[str] | None:
    for place in places:
        if match := role.names.fullmatch(path, place):
            return match
    return None


def _groups(match: re.Match[str]) -> list[tuple[int, str | None]]:
    """The groups of numbers, and the digits in each."""
    first = 1 + len(match.re.groupindex)
    return [(group, match[group]) for group in range(first, 1 + match.re.groups)]


def nearest(roles: Sequence[Role], lost: str, paths: Iterable[str]) -> str | None:
    """Which of the files has the lost one's role and the next rank; None if none is like it.

    The last rank's file may have more padding, so that those before the lost one are more alike.
    """
    own = known(roles, lost)
    found = []
    for path in paths:
        other = known(roles, path)
        if own is None or other is None or not own.is_like(other) or own.axes != other.axes:
            continue
        pairs = enumerate(zip(own.numbers, other.numbers, strict=True))
        apart = [(place, mine, theirs) for place, (mine, theirs) in pairs if mine != theirs]
        if len(apart) == 1 and own.axes[apart[0][0]] != own.role.fixed:
            place, mine, theirs = apart[0]
            found.append(((place, theirs > mine, abs(theirs - mine)), path))
    return min(found)[1] if found else None


# -- files that are missing


MOST = 64
"""So many missing files are named: a damaged number of ranks may be huge."""


def every(*axes: range) -> Iterator[Numbers]:
    """All numbers of these axes; the ranges are not held, as a damaged one may be huge."""
    if not axes:
        yield ()
    else:
        yield from ((first, *rest) for first in axes[0] for rest in every(*axes[1:]))


def gaps(
    role: Role, there: Mapping[Numbers, str], wanted: Iterable[Numbers], example: str = ""
) -> list[Row]:
    """Rows of the first files that are `wanted` and not `there`, which are paths by numbers.

    They have names like the `example`, or like the first one that is there.
    """
    missing = [*islice((numbers for numbers in wanted if numbers not in there), MOST)]
    example = example or there[min(there)]
    axes = known((role,), example).axes  # type: ignore[union-attr]
    paths = [(numbers, role.named(example, numbers)) for numbers in missing]
    return [
        Row(role.name, os.path.basename(path), path, tuple(zip(axes, own, strict=True)), "missing")
        for own, path in paths
    ]


def refuse_gaps(
    where: str,
    rows: Sequence[Row],
    reason: str = "",
    hint: str = "",
    code: str = "missing-rank-file",
) -> None:
    """Raises IncompleteCheckpoint if files of ranks are missing in a folder.

    `reason` says from what that is known, and `hint` what else helps. A row without a name is that
    of a file with a name of the program's own.
    """
    if not rows:
        return
    paths = [row.path for row in rows if row.name]
    names = [os.path.relpath(path, where) for path in paths]
    unnamed = [f"the file of rank {row.rank[0][1]}" for row in rows if not row.name]
    raise IncompleteCheckpoint(
        code,
        f"{where} lacks {listed(names or unnamed, 3)}" + (f" ({reason})" if reason else ""),
        "; ".join(filter(None, (expecting(len(names)) if names else "", hint))),
        paths,
        file=where,
    )


def missing_file(path: str, stated_by: str = "", hint: str = "") -> IncompleteCheckpoint:
    """The error of a file that is not there; `stated_by` is the file that names it."""
    return IncompleteCheckpoint(
        "missing-file",
        f"{path} is missing" + (f", which {stated_by} names" if stated_by else ""),
        hint,
        [path],
        file=path,
    )


def expecting(count: int) -> str:
    """The hint for so many files that are lost."""
    files = "it" if count == 1 else "them"
    return f"copy {files} again, or take an earlier checkpoint (of a run: --tag)"


# -- files that were saved as another's


NAME_MAX = 255
"""Letters that the name of a file may have at most."""


class SavedName(Struct, frozen=True):
    """What the name of a rank's file says, and what the one says under which it was saved.

    `stated` is None if the file states no name of the same form, and not the name of another file.
    """

    row: Row
    own: Known
    stated: Known | None

    @property
    def is_other(self) -> bool:
        """Whether the file was saved as that of another rank.

        An axis that only one of the two names has is not compared.
        """
        if self.stated is None:
            return False
        pairs = ((number, self.stated.at(axis)) for axis, number in self.own.rank)
        return not self.own.is_like(self.stated) or any(b not in (None, a) for a, b in pairs)


def saved_names(
    roles: Sequence[Role], folders: Mapping[str, str | None], beside: Iterable[str] = ()
) -> list[SavedName]:
    """The names of all files of a checkpoint that have one of these roles.

    `folders` are those in the zips: None without a zip. `beside` are names of further files in the
    same directory.
    """
    stems = {os.path.splitext(os.path.basename(name))[0] for name in (*folders, *beside)}
    names = []
    for path, folder in folders.items():
        name = os.path.basename(path)
        if (own := known(roles, name)) is None:
            continue
        is_stated = folder is not None and not sources.is_stand_in(path)
        saved_as = f"{folder}{os.path.splitext(name)[1]}" if is_stated else None
        if saved_as is not None and len(saved_as) > NAME_MAX:
            saved_as = None  # no file has had this name
        stated = known(roles, saved_as) if saved_as else None
        if stated is not None and not own.is_like(stated) and folder not in stems:
            stated = None
        row = Row(own.role.name, name, path, own.rank, saved_as=saved_as)
        names.append(SavedName(row, own, stated))
    return names


def refuse_others(names: Sequence[SavedName], what: str = "ranks") -> None:
    """Raises InconsistentCheckpoint if a file was saved as that of another one of `what`."""
    for row in (name.row for name in names if name.is_other):
        raise InconsistentCheckpoint(
            "swapped-files",
            f"{row.path} was saved as {row.saved_as}: files of two {what} are swapped, or one was "
            "renamed or copied",
            hint="copy all files again; if this one was only renamed, give it its own name again "
            f"({row.saved_as})",
            file=row.path,
        )


def nameless(names: Sequence[SavedName]) -> list[Notice]:
    """A note on files of ranks that state no name: for these, `refuse_others` says nothing."""
    count = sum(name.stated is None for name in names)
    if not count:
        return []
    return [
        note(
            "saved-name-unknown",
            f"{count} of {len(names)} rank files state no name of their own: if one of these was "
            "swapped or copied, no name shows it",
        )
    ]
