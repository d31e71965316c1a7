"""Which portions of a target one of several processes writes."""

from __future__ import annotations

import random

import pytest

from zckpt.copying.sharing import Part, Portion, by_file, ended, largest_first, shares
from zckpt.copying.sharing import Sharing as Alone
from zckpt.errors import WrongOption

FILES = [
    Portion("a", 0, 10),
    Portion("a", 10, 13, is_complete=True),
    Portion("a", 13, 40),
    Portion("b", 0, 5, is_complete=True),
    Portion("c", 0, 20),
]
LEFT = [[FILES[0], FILES[2]], [FILES[4]]]


def test_what_is_written_already_is_left_out() -> None:
    assert [*by_file(FILES)] == LEFT
    assert [*Alone().mine(FILES, None)] == LEFT


def test_large_portions_are_handed_out_first() -> None:
    assert [portion.length for portion in largest_first(FILES)] == [27, 20, 10, 5, 3]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_even_and_lose_nothing(count: int) -> None:
    chosen = random.Random(count)
    portions = [
        Portion(f"file{number}", start, start + chosen.choice([1, 50, 256, 256, 256]))
        for number in range(9)
        for start in range(0, 2048, 256)
    ]
    parts = shares(portions, count)
    assert sorted(portions, key=str) == sorted((p for part in parts for p in part), key=str)
    loads = [sum(portion.length for portion in part) for part in parts]
    assert max(loads) - min(loads) <= 256
    assert all(part == sorted(part, key=portions.index) for part in parts)


def test_parts_are_the_shares_in_turn() -> None:
    portions = [Portion(name, 0, size) for name, size in (("a", 5), ("b", 9), ("c", 4))]
    mine = [[*Part(number, 2).mine(portions, None)] for number in (1, 2)]
    assert mine == [[portions[1:2]], [portions[:1], portions[2:]]]


@pytest.mark.parametrize(("number", "count"), [(0, 3), (4, 3), (1, 0), (-1, 3)])
def test_parts_that_do_not_exist(number: int, count: int) -> None:
    with pytest.raises(WrongOption, match=f"--part {number}/{count} does not exist"):
        Part(number, count)


def test_the_first_and_the_last_part_exist() -> None:
    assert [Part(1, 3).part, Part(3, 3).part] == ["1-of-3", "3-of-3"]


def test_a_failure_does_not_wait_for_others() -> None:
    seen: list[str] = []

    class Waiting(Alone):
        def end(self) -> None:
            seen.append("end")

    with ended(Waiting()):
        assert not seen
    assert seen == ["end"]
    with pytest.raises(KeyError), ended(Waiting()):
        raise KeyError
    assert seen == ["end"]
