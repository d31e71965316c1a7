"""Finds files of a save that were not written together with its other files.

The ranks of a run write their files at about the same time, and some programs write one more file
after that. So a file whose time is far from that of the other files may belong to another save.
Times prove nothing: a copy, git and a download give files new times. Therefore files are reported
only if most of the other files were written together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

APART = 600 * 10**9
"""Nanoseconds. Files of one save follow each other within this time."""


class OddTimes(Struct, frozen=True):
    """Names of files with odd times.

    `early` files were written before the other files of the save, `late` files after the file that
    the program writes last.
    """

    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


def odd_times(times: Mapping[str, int], last: int | None) -> OddTimes:
    """Finds files that were written at another time than the other files of the save.

    `times` maps names to nanoseconds. `last` is the time of the file that the program writes after
    all others; None if there is no such file. The result is empty unless more than half of the
    files were written together, and not after `last`.
    """
    every = [*times.values()] if last is None else [*times.values(), last]
    most = max(_together(every), key=len, default=[])
    if 2 * len(most) <= len(every) or (last is not None and last < most[0]):
        return OddTimes()
    early = tuple(name for name, time in times.items() if time < most[0])
    if last is None:
        return OddTimes(early)
    end = max(most[-1], last + APART)
    return OddTimes(early, tuple(name for name, time in times.items() if time > end))


def _together(times: Iterable[int]) -> list[list[int]]:
    """Sorts the times and cuts them into groups at gaps longer than APART; both in nanoseconds."""
    groups: list[list[int]] = []
    for time in sorted(times):
        if not groups or time - groups[-1][-1] > APART:
            groups.append([])
        groups[-1].append(time)
    return groups
