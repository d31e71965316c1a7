"""What explains a wrong checksum, and how often by chance?"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from zckpt.core.storage.checksum import combine, flipped_bits
from zckpt.core.storage.fragments import Extent, Record
from zckpt.core.storage.records import Damage
from zckpt.mending.explaining import BELIEVED, SECTOR, Place, burst_in, chance_of, explained
from zckpt.mending.witnesses import Witnesses

NOBODY = Witnesses(None)


def damaged(path: Path, before: bytes, now: bytes, offset: int = 0) -> Place:
    """What is said of a record of a file, which `offset` bytes precede."""
    path.write_bytes(b"\xaa" * offset + now + b"\xaa" * 100)
    extent = Extent(str(path), offset, len(now))
    damage = Damage(Record(extent, zlib.crc32(before)), zlib.crc32(now))
    return explained(damage, (), NOBODY)


@pytest.mark.parametrize("offset", [0, 64, 700])
def test_a_bit_is_flipped_back(tmp_path: Path, offset: int) -> None:
    before = random.Random(1).randbytes(5000)
    now = bytearray(before)
    now[1234] ^= 8
    place = damaged(tmp_path / "file", before, bytes(now), offset)
    (correction,) = place.corrections
    assert (correction.offset, correction.after) == (offset + 1234, before[1234:1235])
    assert (place.by, place.is_written(False)) == ("checksum", True)


def test_chances() -> None:
    assert round(1 / chance_of(BELIEVED)) == 2048
    assert round(1 / chance_of(4 << 20)) == 128
    assert round(1 / chance_of(256 << 20)) == 2
    assert chance_of(1 << 30) == 1


def test_a_block_of_one_value_is_a_burst(tmp_path: Path) -> None:
    """Only an aligned one, and of any value."""
    path, data = tmp_path / "file", random.Random(2).randbytes(8 * SECTOR)
    for value in (b"\0", b"\xff", b"\x5a"):
        for start, expected in ((2 * SECTOR, 2 * SECTOR), (2 * SECTOR + 8, None)):
            now = data[:start] + value * SECTOR + data[start + SECTOR :]
            path.write_bytes(now)
            assert burst_in(Extent(str(path), 0, len(now))) == expected
            assert burst_in(Extent(str(path), 100, len(now) - 100)) == expected
    words = b"\0\1" * (SECTOR // 2)  # it repeats, but no single value
    path.write_bytes(words * 4)
    assert burst_in(Extent(str(path), 0, 4 * SECTOR)) is None
    path.write_bytes(b"\1" * 1000)
    assert burst_in(Extent(str(path), 100, 600)) is None  # no whole block


def test_a_burst_needs_a_word(tmp_path: Path) -> None:
    """Also if a bit is flipped in a record that had such a block before."""
    before = bytearray(random.Random(3).randbytes(8 * SECTOR))
    before[SECTOR : 2 * SECTOR] = bytes(SECTOR)
    now = bytearray(before)
    now[9] ^= 1
    place = damaged(tmp_path / "file", bytes(before), bytes(now))
    assert place.by == "chance"
    assert not place.is_written(False)
    assert place.is_written(True)
    assert f"the {SECTOR} bytes at {SECTOR} have one value" in place.why


def zeroed(path: Path, tries: int, length: int, seed: int) -> tuple[int, int]:
    """How often a lost sector looks like one bit, and how often it would be written unasked.

    CRCs are linear: how they change is known from the sector alone, and the rest of the record is
    made for those that look like one bit.
    """
    chosen = random.Random(seed)
    looks = written = 0
    for _ in range(tries):
        sector, start = chosen.randbytes(SECTOR), chosen.randrange(length // SECTOR) * SECTOR
        change = zlib.crc32(sector) ^ zlib.crc32(bytes(SECTOR))
        if not flipped_bits(combine(change, 0, length - start - SECTOR), 0, length):
            continue
        looks += 1
        around = chosen.randbytes(length)
        before = around[:start] + sector + around[start + SECTOR :]
        place = damaged(path, before, around[:start] + bytes(SECTOR) + around[start + SECTOR :])
        assert len(place.bits) == 1
        written += place.is_written(False)
    return looks, written


def test_lost_sectors_are_never_written_unasked(tmp_path: Path) -> None:
    assert zeroed(tmp_path / "file", 100, 64 << 10, seed=5)[1] == 0


def test_a_lost_sector_that_looks_like_one_bit_is_a_burst(tmp_path: Path) -> None:
    """Found once among many: the CRC-32 is that of one flipped bit elsewhere."""
    before = bytearray(random.Random(6).randbytes(4 * SECTOR))
    now = bytearray(before)
    now[SECTOR : 2 * SECTOR] = bytes(SECTOR)
    looks = bytearray(now)
    looks[3 * SECTOR + 7] ^= 16
    place = damaged(tmp_path / "file", bytes(looks), bytes(now))
    assert (place.by, len(place.bits)) == ("chance", 1)
    assert not place.is_written(False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [256 << 10, 4 << 20])
def test_many_lost_sectors(size: int, tmp_path: Path) -> None:
    tries = 10_000
    looks, written = zeroed(tmp_path / "file", tries, size, seed=7)
    print(f"{size} bytes: {looks} of {tries} look like one bit, computed {chance_of(size) * tries}")
    assert 0 < looks < 4 * chance_of(size) * tries
    assert written == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [256 << 10, 4 << 20])
def test_every_flip_is_found(size: int) -> None:
    chosen = random.Random(8)
    for _ in range(2000):
        place = chosen.randrange(size), chosen.randrange(8)
        assert flipped_bits(flipped(*place, size), 0, size) == [place]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [11 << 10, 256 << 10, 4 << 20])
def test_many_pairs_of_flips(size: int) -> None:
    """They look like one bit as often as the formula says, and never in 11 kB."""
    chosen, tries, looks = random.Random(9), 10_000, 0
    for _ in range(tries):
        first, second = (divmod(each, 8) for each in chosen.sample(range(size * 8), 2))
        looks += bool(flipped_bits(flipped(*first, size) ^ flipped(*second, size), 0, size))
    computed = chance_of(size) * tries
    print(f"{size} bytes: {looks} of {tries} pairs look like one bit, computed {computed:.1f}")
    assert looks <= (4 * computed if size > 11 << 10 else 0)


def flipped(byte: int, bit: int, size: int) -> int:
    """How the CRC-32 of so many bytes changes if one bit is flipped."""
    change = zlib.crc32(bytes([1 << bit])) ^ zlib.crc32(b"\0")
    return combine(change, 0, size - byte - 1)


def test_several_bits_explain_a_long_record(tmp_path: Path) -> None:
    """From 512 MiB on: it is refused, whatever the user types."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    last = zlib.crc32(b"\0") ^ zlib.crc32(b"\x80")
    damage = Damage(Record(Extent(str(path), 0, 1 << 30), 0), last)
    place = explained(damage, (), NOBODY)
    assert len(place.bits) == 3
    assert (place.by, place.corrections) == (None, ())
    assert "flipping any one of 3 bits would make the checksum match" in place.why
