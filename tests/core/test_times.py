"""Files that were not written with the others: times in, names out."""

from __future__ import annotations

import pytest

from zckpt.core.storage.times import OddTimes, odd_times

MINUTE = 60 * 10**9


def odd(*minutes: float, last: float | None = None) -> OddTimes:
    """What is odd of files a, b, c, ... that were written in these minutes."""
    times = {chr(ord("a") + n): int(each * MINUTE) for n, each in enumerate(minutes)}
    return odd_times(times, None if last is None else int(last * MINUTE))


@pytest.mark.parametrize(
    ("minutes", "last", "early", "late"),
    [
        # one save, however long it takes
        ((0, 1, 2, 3), 4, "", ""),
        ((0, 9, 18, 27), 36, "", ""),
        ((0, 1, 2, 3), 500, "", ""),
        ((0, 1, 2, 30), 31, "", ""),
        # a file that is older than all others
        ((-11, 0, 0, 0), 0, "a", ""),
        ((-10, 0, 0, 0), 0, "", ""),
        ((-10.01, 0, 0, 0), 0, "a", ""),
        ((0, -5000, 0, 1), None, "b", ""),
        ((-5000, 0), 0, "a", ""),
        ((-5000, -4000, 0, 1, 2), 3, "ab", ""),
        # a file that is newer than the last one
        ((0, 0, 12, 0), 1, "", "c"),
        ((0, 0, 11, 0), 1, "", ""),
        ((0, 5000), 1, "", "b"),
        ((0, 0, 0, 5000), None, "", ""),
        ((-5000, 0, 0, 0, 5000), 0, "a", "e"),
        # most are out of order: a copy, git, a download
        ((0, 20, 40, 60), 80, "", ""),
        ((20, 40, 60, 80), 0, "", ""),
        ((30, 31, 32, 33), 0, "", ""),
        ((-5000, 30, 31, 32, 33), 0, "", ""),
        ((1, 2, 30, 31), None, "", ""),
        ((0, 5, 10, 15, 20, 25), 5, "", ""),
        # too few to tell
        ((), None, "", ""),
        ((), 0, "", ""),
        ((0,), 5000, "", ""),
        ((5000,), 0, "", ""),
        ((0, 5000), None, "", ""),
    ],
)
def test_odd_times(minutes: tuple[float, ...], last: float | None, early: str, late: str) -> None:
    assert odd(*minutes, last=last) == OddTimes(tuple(early), tuple(late))
