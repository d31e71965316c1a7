"""Sequences whose items are made when they are asked for."""

from __future__ import annotations

import pytest

from zckpt.core.storage.sequences import Joined, Made


def test_items_are_made_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def make(number: int) -> str:
        asked.append(number)
        return str(number)

    made = Made(make, range(10, 20))
    assert len(made) == 10
    assert (made[0], made[-1], made[3:5]) == ("10", "19", ["13", "14"])
    assert asked == [10, 19, 13, 14]
    assert [*made] == [str(number) for number in range(10, 20)]
    with pytest.raises(IndexError):
        made[10]


def test_items_and_sequences_one_behind_the_other() -> None:
    joined = Joined[int]()
    assert not joined
    joined.append(1)
    joined += [2, 3]
    joined.join(range(4, 7))
    joined.join(())
    joined.append(7)
    assert [*joined] == [1, 2, 3, 4, 5, 6, 7]
    assert [joined[place] for place in range(-7, 7)] == [*joined] * 2
    assert joined[2:5] == [3, 4, 5]
    with pytest.raises(IndexError):
        joined[7]
