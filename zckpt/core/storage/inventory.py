"""The inventory of a checkpoint: its files, the ranks that wrote them, and which are wrong.

Each format, and each trainer's program, has a table of roles. The name of a file gives its role and
the rank that wrote it. If a file is lost, the file of the same role and the nearest rank can stand
in for it.

torch.save names the folder in its zip after the file, without the ending (torch 1.6 to 2.13). So a
file that was renamed or copied still states its original name. A file states no original name in
three cases: it was saved into a buffer (torch calls the folder `archive`), it was saved before
torch 1.6, or its folder's name has another form than the file's, and no file beside it has that
name.
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
"""The state of a file.

    cut           the file ends too early
    unreadable    it cannot be parsed, or has a wrong checksum
    foreign       it is of another run, engine or rank
    unexpected    it is of a rank that the other files do not count
"""
Rank = tuple[tuple[str, int], ...]
"""The numbers in a file's name with their axes, the outermost axis first: dp 3, mp 0."""
Numbers = tuple[int, ...]
"""The numbers of a `Rank` alone: (3, 0) for dp 3, mp 0."""


class Role(Struct, frozen=True):
    """A kind of files with one form of names, such as `model`, `optimizer` or `scheduler`.

    names      a regular expression; its unnamed groups match the numbers of a rank ("" means 0),
               and its group `stem` matches text that the program chose
    axes       the axes of these numbers, such as `dp`, in order
    fixed      an axis, such as `layer`, along which files cannot replace each other
    is_last    whether the file is written after the files of all ranks
    """

    name: str
    names: re.Pattern[str]
    axes: tuple[str, ...] = ()
    fixed: str = ""
    is_last: bool = False

    def named(self, example: str, numbers: Numbers) -> str:
        """The name of the file with these numbers, formed like the name `example`."""
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
    """Makes a `Role` (a kind of files) from its fields.

    `names` is a regular expression, in which only ASCII digits count as digits.
    """
    return Role(name, re.compile(names, re.ASCII | re.DOTALL), axes, fixed, is_last)


ANY = role("file", r"(?P<stem>.*)")
"""A role that matches every name, for files whose names have no numbers of ranks."""


class ParsedName(Struct, frozen=True):
    """A file name, parsed: the file's role, its rank, and its `stem` (a part of the name)."""

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
        """The numbers in this name, with `number` in place of the number of `axis`."""
        return tuple(number if own == axis else same for own, same in self.rank)

    def is_like(self, other: ParsedName) -> bool:
        """Whether two names have the same role and stem, as the files of two ranks have."""
        return (self.role, self.stem) == (other.role, other.stem)

    def at(self, axis: str) -> int | None:
        """The number of this axis in the name, such as the `tp` rank; None if the name lacks it."""
        return dict(self.rank).get(axis)


class Row(Struct, frozen=True):
    """One file of a checkpoint in the inventory: role, name, path, rank and state.

    name        the path below the checkpoint, or only the file's name
    size        in bytes; None if unknown
    saved_as    the name under which torch.save wrote the file; None if unknown
    """

    role: str
    name: str
    path: str
    rank: Rank = ()
    state: State = "ok"
    size: int | None = None
    saved_as: str | None = None


def parse_name(roles: Iterable[Role], path: str) -> ParsedName | None:
    """Parses the name of a file, which is the last part of `path`; None if no role matches."""
    places = _places(path)
    for role in roles:
        if (match := _match(role, path, places)) is not None:
            pairs = zip(role.axes, (digits for _, digits in _groups(match)), strict=True)
            rank = tuple((axis, int(digits or 0)) for axis, digits in pairs if digits is not None)
            return ParsedName(role, rank, path[: match.start()] + match.groupdict().get("stem", ""))
    return None


def any_of(roles: Iterable[Role]) -> re.Pattern[str]:
    """Makes one regular expression that matches the file names of all roles, without folders.

    One expression is faster than an expression for each role.
    """
    names = (re.sub(r"\(\?P<\w+>", "(", own.names.pattern) for own in roles)
    return re.compile("|".join(f"(?:{each})" for each in names), re.ASCII | re.DOTALL)


def _places(path: str) -> list[int]:
    """Where the name of a file may begin in a path: at 0, and after each slash.

    A name may include a folder, as in `mp_rank_00/model_optim_rng.pt`.
    """
    if "/" not in path:  # there may be 50,000 of them
        return [0]
    return [0, *(at.end() for at in re.finditer("/", path))]


def _match(role: Role, path: str, places: Sequence[int]) -> re.Match[str] | None:
    for place in places:
        if match := role.names.fullmatch(path, place):
            return match
    return None


def _groups(match: re.Match[str]) -> list[tuple[int, str | None]]:
    """The index and the matched digits of each unnamed group."""
    first = 1 + len(match.re.groupindex)
    return [(group, match[group]) for group in range(first, 1 + match.re.groups)]


def nearest(roles: Sequence[Role], lost: str, paths: Iterable[str]) -> str | None:
    """Finds a file that can replace a lost one: its name differs in only one number.

    None if there is no such file. Lower numbers are preferred, then near ones: the last rank's file
    may have more padding, so the files of lower ranks are more alike.
    """
    lost_file = parse_name(roles, lost)
    candidates = []
    for path in paths:
        other = parse_name(roles, path)
        if (
            lost_file is None
            or other is None
            or not lost_file.is_like(other)
            or lost_file.axes != other.axes
        ):
            continue
        pairs = enumerate(zip(lost_file.numbers, other.numbers, strict=True))
        apart = [(place, mine, theirs) for place, (mine, theirs) in pairs if mine != theirs]
        if len(apart) == 1 and lost_file.axes[apart[0][0]] != lost_file.role.fixed:
            place, mine, theirs = apart[0]
            candidates.append(((place, theirs > mine, abs(theirs - mine)), path))
    return min(candidates)[1] if candidates else None


# -- files that are missing


MOST = 64
"""The largest number of missing files that are listed.

A damaged file may state a huge number of ranks.
"""


def every(*axes: range) -> Iterator[Numbers]:
    """Yields all combinations of one number from each range: (0, 0), (0, 1), (1, 0), ...

    They are made one by one, because a range that a damaged file states may be huge.
    """
    if not axes:
        yield ()
    else:
        yield from ((first, *rest) for first in axes[0] for rest in every(*axes[1:]))


def gaps(
    role: Role, there: Mapping[Numbers, str], wanted: Iterable[Numbers], example: str = ""
) -> list[Row]:
    """Makes a `Row` for each missing file, but for at most MOST files.

    `there` maps the numbers in the names of existing files to their paths. `wanted` yields the
    numbers of all files that should exist. A missing file's name is formed like `example`, or else
    like the first name in `there`.
    """
    missing = [*islice((numbers for numbers in wanted if numbers not in there), MOST)]
    example = example or there[min(there)]
    axes = parse_name((role,), example).axes  # type: ignore[union-attr]
    paths = [(numbers, role.named(example, numbers)) for numbers in missing]
    return [
        Row(
            role.name,
            os.path.basename(path),
            path,
            tuple(zip(axes, file_numbers, strict=True)),
            "missing",
        )
        for file_numbers, path in paths
    ]


def refuse_gaps(
    where: str,
    rows: Sequence[Row],
    reason: str = "",
    hint: str = "",
    code: str = "missing-rank-file",
) -> None:
    """Raises IncompleteCheckpoint with the missing files in `rows`; does nothing if it is empty.

        where     the directory of the checkpoint
        reason    how zckpt knows that the files are missing
        hint      what else the user can do
        code      the stable code of the error

    If no row has a file name, the message lists ranks.
    """
    if not rows:
        return
    paths = [row.path for row in rows if row.name]
    names = [os.path.relpath(path, where) for path in paths]
    # the training program may choose the names
    unnamed = [f"the file of rank {row.rank[0][1]}" for row in rows if not row.name]
    raise IncompleteCheckpoint(
        code,
        f"{where} lacks {listed(names or unnamed, 3)}" + (f" ({reason})" if reason else ""),
        "; ".join(filter(None, (expecting(len(names)) if names else "", hint))),
        paths,
        file=where,
    )


def missing_file(path: str, stated_by: str = "", hint: str = "") -> IncompleteCheckpoint:
    """Makes the error for a missing file; `stated_by` is the file that names it."""
    return IncompleteCheckpoint(
        "missing-file",
        f"{path} is missing" + (f", although {stated_by} lists it" if stated_by else ""),
        hint,
        [path],
        file=path,
    )


def expecting(count: int) -> str:
    """The hint of an error about `count` lost files: copy them again, or use an older save."""
    files = "it" if count == 1 else "them"
    earlier = "take an earlier checkpoint (--tag names another checkpoint of the run)"
    return f"copy {files} again, or {earlier}"


# -- files that were saved as another's


NAME_MAX = 255
"""The most letters that a file's name may have."""


class SavedName(Struct, frozen=True):
    """The present name of a rank's file, and the name under which torch.save wrote it.

    `saved_name` is None if the file states no name, or one that fits no file of this checkpoint.
    """

    row: Row
    parsed_name: ParsedName
    saved_name: ParsedName | None

    @property
    def is_other(self) -> bool:
        """Whether the file was saved as the file of another rank, and was renamed.

        Only numbers that are in both names are compared. False if the file states no saved name.
        """
        if self.saved_name is None:
            return False
        pairs = ((number, self.saved_name.at(axis)) for axis, number in self.parsed_name.rank)
        return not self.parsed_name.is_like(self.saved_name) or any(
            b not in (None, a) for a, b in pairs
        )


def saved_names(
    roles: Sequence[Role], folders: Mapping[str, str | None], beside: Iterable[str] = ()
) -> list[SavedName]:
    """Finds the name under which torch.save wrote each file that has one of these roles.

    `folders` maps the path of a file to the name of the folder in its zip, or to None for a file
    that is no zip. `beside` are names of further files in the same directory.
    """
    stems = {os.path.splitext(os.path.basename(name))[0] for name in (*folders, *beside)}
    names = []
    for path, folder in folders.items():
        name = os.path.basename(path)
        if (named_file := parse_name(roles, name)) is None:
            continue
        is_stated = folder is not None and not sources.is_stand_in(path)
        saved_as = f"{folder}{os.path.splitext(name)[1]}" if is_stated else None
        if saved_as is not None and len(saved_as) > NAME_MAX:
            saved_as = None  # no file has had this name
        saved_file = parse_name(roles, saved_as) if saved_as else None
        # a name that differs in more than numbers counts only if a file beside this one has it
        if saved_file is not None and not named_file.is_like(saved_file) and folder not in stems:
            saved_file = None
        row = Row(named_file.role.name, name, path, named_file.rank, saved_as=saved_as)
        names.append(SavedName(row, named_file, saved_file))
    return names


def refuse_others(names: Sequence[SavedName], what: str = "ranks") -> None:
    """Raises InconsistentCheckpoint if a file was saved as the file of another rank.

    `what` is the word for ranks in the message.
    """
    for row in (name.row for name in names if name.is_other):
        raise InconsistentCheckpoint(
            "swapped-files",
            f"{row.path} was saved as {row.saved_as}: files of two {what} are swapped, or one was "
            "renamed or copied",
            hint=f"copy all files again; if this one was only renamed, rename it to {row.saved_as}",
            file=row.path,
        )


def nameless(names: Sequence[SavedName]) -> list[Notice]:
    """Reports files that do not state the name under which they were saved: a list of one notice.

    `refuse_others` cannot check them. The list is empty if all files state the name.
    """
    count = sum(name.saved_name is None for name in names)
    if not count:
        return []
    return [
        note(
            "saved-name-unknown",
            f"{count} of {len(names)} rank files do not state the name under which they were "
            "saved: zckpt cannot see whether these were swapped or copied over each other",
        )
    ]
