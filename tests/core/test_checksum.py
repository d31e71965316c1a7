"""CRC-32 of pieces in any order: zlib and the whole are the judges."""

from __future__ import annotations

import random
import zlib
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.storage.checksum import (
    Cover,
    Scattered,
    combine,
    crc32,
    crc_of_runs,
    crc_of_zeros,
    flipped_bit,
    flipped_bits,
)


def filled(data: bytes, pieces: list[tuple[int, int]]) -> Cover:
    cover = Cover(len(data))
    for start, stop in pieces:
        cover.add(start, stop, crc32(data[start:stop]))
    return cover


@st.composite
def partitions(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    data = draw(st.binary(min_size=1, max_size=200))
    cuts = sorted(draw(st.sets(st.integers(1, len(data)), max_size=20)) | {0, len(data)})
    return data, draw(st.permutations(list(pairwise(cuts))))


@given(st.binary(), st.binary())
def test_parts_combine_to_the_whole(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 255, 4096, 100_003])
def test_zeros(length: int) -> None:
    assert crc_of_zeros(length) == zlib.crc32(bytes(length))


def test_zeros_of_a_terabyte_take_no_time() -> None:
    half = crc_of_zeros(1 << 39)
    assert crc_of_zeros(1 << 40) == combine(half, half, 1 << 39)


@given(partitions())
def test_pieces_in_any_order_make_the_whole(partition: tuple[bytes, list[tuple[int, int]]]) -> None:
    data, pieces = partition
    cover = filled(data, pieces)
    assert cover.crc == zlib.crc32(data)
    assert (cover.seen, cover.gaps()) == (len(data), [])


@given(partitions(), st.data())
def test_missing_pieces_are_gaps(
    partition: tuple[bytes, list[tuple[int, int]]], draw: st.DataObject
) -> None:
    data, pieces = partition
    present = draw.draw(st.lists(st.sampled_from(pieces), unique=True, max_size=len(pieces) - 1))
    cover = filled(data, present)
    missing = {place for a, b in pieces if (a, b) not in present for place in range(a, b)}
    gaps = cover.gaps()
    assert cover.crc is None
    assert gaps is not None
    assert {place for a, b in gaps for place in range(a, b)} == missing
    assert all(a < b for a, b in gaps)
    assert all(before[1] < after[0] for before, after in pairwise(gaps))
    for start, stop in gaps:
        cover.add(start, stop, crc32(data[start:stop]))
    assert cover.crc == zlib.crc32(data)


@given(partitions(), st.data())
def test_overlaps_never_give_a_wrong_sum(
    partition: tuple[bytes, list[tuple[int, int]]], draw: st.DataObject
) -> None:
    data, pieces = partition
    ranges = st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(
        lambda pair: (min(pair), max(pair))
    )
    mixed = draw.draw(st.permutations(pieces + draw.draw(st.lists(ranges, max_size=8))))
    cover = filled(data, mixed)
    assert cover.crc in (None, zlib.crc32(data))
    if cover.gaps() is not None and cover.crc is None:
        assert cover.gaps()


@given(partitions(), st.data())
def test_a_piece_seen_twice_counts_once(
    partition: tuple[bytes, list[tuple[int, int]]], draw: st.DataObject
) -> None:
    data, pieces = partition
    again = draw.draw(st.sampled_from(pieces[:1]))
    cover = filled(data, [pieces[0], again, *pieces[1:]])
    assert (cover.crc, cover.seen) == (zlib.crc32(data), len(data))


def test_overlapping_pieces_have_no_gaps_to_name() -> None:
    data = bytes(range(20))
    assert filled(data, [(0, 10), (5, 15)]).gaps() is None


@pytest.mark.parametrize(
    ("pieces", "seen", "gaps"),
    [
        ([(5, 5), (5, 20), (0, 5), (20, 20)], 20, []),  # empty ones hide none
        ([(10, 15), (0, 5)], 10, [(5, 10), (15, 20)]),
        ([(0, 5), (0, 10), (5, 20)], 20, []),  # a longer one from the same byte is not taken
        ([(0, 10), (5, 10)], 10, [(10, 20)]),  # nor one that ends at the same byte
        ([], 0, [(0, 20)]),
    ],
)
def test_pieces_that_do_not_count(
    pieces: list[tuple[int, int]], seen: int, gaps: list[tuple[int, int]]
) -> None:
    data = bytes(range(20))
    cover = filled(data, pieces)
    assert (cover.seen, cover.gaps()) == (seen, gaps)
    assert cover.crc == (None if gaps else zlib.crc32(data))


def test_one_byte_is_not_covered_by_none() -> None:
    assert Cover(1).crc is None


def test_nothing_to_cover_is_covered() -> None:
    assert (Cover(0).crc, Cover(0).gaps()) == (zlib.crc32(b""), [])


@pytest.mark.parametrize("length", [1, 2, 3, 100, 8191, 8192, 8193, 70_000])
def test_a_flipped_bit_is_located(length: int) -> None:
    data = bytearray(random.Random(length).randbytes(length))
    stated = zlib.crc32(data)
    for byte, bit in {(0, 0), (length - 1, 7), (length // 2, 3)}:
        data[byte] ^= 1 << bit
        assert flipped_bit(stated, zlib.crc32(data), length) == (byte, bit)
        data[byte] ^= 1 << bit


def test_two_flipped_bits_are_not_one() -> None:
    data = bytearray(100)
    stated = zlib.crc32(data)
    data[3] ^= 1
    data[70] ^= 4
    assert flipped_bit(stated, zlib.crc32(data), 100) is None
    assert flipped_bit(0, 1, 0) is None
    assert flipped_bit(0, zlib.crc32(b"\0\0") ^ zlib.crc32(b"\1\0"), 1) is None  # of 2 bytes


def test_places_that_look_alike_are_not_told() -> None:
    """From 512 MiB on, two distances from the end leave the same difference."""
    last = zlib.crc32(b"\0") ^ zlib.crc32(b"\x80")
    assert flipped_bit(0, last, 1 << 20) == ((1 << 20) - 1, 7)
    assert flipped_bit(0, last, 1 << 30) is None
    cycle = (1 << 32) - 1  # bits after which the powers of x repeat
    three = [divmod((1 << 33) - 1 - distance, 8) for distance in (2 * cycle, cycle, 0)]
    assert flipped_bits(0, last, 1 << 30) == three


@given(st.binary(min_size=1, max_size=300), st.data())
def test_scattered_pieces_have_the_sum_of_the_whole(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted({0, len(data), *draw.draw(st.lists(st.integers(0, len(data)), max_size=9))})
    whole = Scattered(len(data))
    for start, stop in draw.draw(st.permutations(list(pairwise(cuts)))):
        assert whole.crc is None
        whole.add(start, stop, crc32(data[start:stop]))
    assert whole.crc == zlib.crc32(data)


@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.randoms())
def test_columns_have_the_sum_of_the_whole(
    count: int, widths: list[int], chosen: random.Random
) -> None:
    stride = sum(widths)
    data = chosen.randbytes(count * stride)
    whole = Scattered(len(data))
    starts = list(accumulate(widths, initial=0))
    for start, stop in pairwise(starts):
        rows = [data[row * stride + start : row * stride + stop] for row in range(count)]
        crc = crc_of_runs(memoryview(b"".join(rows)), stop - start, stride)
        whole.add_runs(count * (stop - start), (count - 1) * stride + stop, crc)
    assert whole.crc == zlib.crc32(data)
