"""The CRC-32s of what a copy writes, while their parts arrive."""

from __future__ import annotations

import zlib

import pytest

from zckpt.copying.filling import Sums
from zckpt.copying.journal import Key
from zckpt.core.checksum import Cover, Scattered

DATA = b"the bytes of a tensor"
WHOLE: Key = ("tensor", 3, 0)


def cover(_: Key) -> Cover:
    return Cover(len(DATA))


def scattered(_: Key) -> Scattered:
    return Scattered(len(DATA))


def part(start: int, stop: int) -> tuple[Key, int, int, int]:
    return WHOLE, start, stop, zlib.crc32(DATA[start:stop])


def test_what_comes_as_one_part_needs_no_cover() -> None:
    def never(key: Key) -> Cover:
        raise AssertionError(key)

    sums = Sums()
    sums.add([part(0, len(DATA))], never)
    assert sums.crc(WHOLE, len(DATA)) == zlib.crc32(DATA)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_parts_in_any_order(order: tuple[int, ...]) -> None:
    parts = [part(0, 5), part(5, 9), part(9, len(DATA))]
    sums = Sums()
    for place in order:
        assert sums.crc(WHOLE, len(DATA)) is None
        sums.add([parts[place]], cover)
    assert sums.crc(WHOLE, len(DATA)) == zlib.crc32(DATA)


def test_scattered_parts() -> None:
    sums = Sums()
    sums.add([part(0, 5), part(9, len(DATA)), part(5, 9)], scattered)
    assert sums.crc(WHOLE, len(DATA)) == zlib.crc32(DATA)


def test_nothing_is_the_whole_of_an_empty_tensor_alone() -> None:
    assert Sums().crc(WHOLE, 0) == 0
    assert Sums().crc(WHOLE, 1) is None


def test_what_is_taken_is_joined_and_forgotten() -> None:
    other: Key = ("tensor", 4, 0)
    sums = Sums()
    sums.add([part(0, 5), (other, 0, 4, 7), part(5, 9)], cover)
    assert sorted(sums.take()) == [part(0, 9), (other, 0, 4, 7)]
    assert sums.take() == []
