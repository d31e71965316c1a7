"""The CRC-32s of records, of which a tensor is read part by part."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from zckpt.core.fileio import Buffer, Reader
from zckpt.core.fragments import Extent, Fragment, Record, Runs
from zckpt.core.manifest import Entry
from zckpt.core.pieces import ElementReader, ReadRequest
from zckpt.core.records import RecordChecker
from zckpt.errors import CorruptCheckpoint

BLOCK = 1 << 20  # bytes
SKIPPED = 24  # bytes before the tensor's in each of its two files
LENGTHS = (2 * BLOCK + 12, BLOCK - 4)  # bytes in each file


def two_files(tmp_path: Path) -> tuple[Entry, list[Record], bytes]:
    """A tensor of U8 in two files, each of which is two records; and its bytes."""
    fragments, records, whole = [], [], b""
    for number, length in enumerate(LENGTHS):
        data = random.Random(number).randbytes(SKIPPED + length)
        path = tmp_path / str(number)
        path.write_bytes(data)
        middle = len(data) // 2
        for start, stop in ((0, middle), (middle, len(data))):
            crc = zlib.crc32(data[start:stop])
            records.append(Record(Extent(str(path), start, stop - start), crc))
        start = len(whole)
        extent = Extent(str(path), SKIPPED, length)
        fragments.append(Fragment(start, start + length, extent))
        whole += data[SKIPPED:]
    return Entry("x/param", "U8", (len(whole),), Runs(fragments)), records, whole


def read(entry: Entry, checker: RecordChecker, start: int, stop: int) -> int:
    reader, view = Reader(), Buffer(4 * BLOCK).view
    try:
        request = ReadRequest(entry, start, stop, 0)
        ElementReader(reader, checker, BLOCK).read([request], view)
        checker.finish(reader)
        return zlib.crc32(view[: request.end])
    finally:
        reader.close()


@pytest.mark.parametrize("cuts", [(), (1,), (BLOCK,), (LENGTHS[0],), (5, LENGTHS[0] + 5)])
def test_are_those_of_all_bytes(cuts: tuple[int, ...], tmp_path: Path) -> None:
    entry, records, whole = two_files(tmp_path)
    edges = [0, *cuts, len(whole)]
    checker = RecordChecker(records, collect=True)
    for start, stop in pairwise(edges):
        assert read(entry, checker, start, stop) == zlib.crc32(whole[start:stop])
    assert not checker.damage
    covered = {number: stop - start for number, start, stop, _ in checker.parts_of(records)}
    assert covered == {number: record.extent.length for number, record in enumerate(records)}


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, LENGTHS[0] - 1, LENGTHS[0]])
def test_a_flipped_bit_is_the_damage_of_its_record(place: int, tmp_path: Path) -> None:
    entry, records, whole = two_files(tmp_path)
    number, at = (0, place) if place < LENGTHS[0] else (1, place - LENGTHS[0])
    path = tmp_path / str(number)
    data = bytearray(path.read_bytes())
    data[SKIPPED + at] ^= 16
    path.write_bytes(data)
    checker = RecordChecker(records, collect=True)
    read(entry, checker, 0, len(whole))
    (damaged,) = checker.damage
    assert damaged.file == str(path)
    assert damaged.offset <= SKIPPED + at < damaged.offset + damaged.length


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    entry, records, whole = two_files(tmp_path)
    path = tmp_path / "0"
    path.write_bytes(path.read_bytes()[: BLOCK + 7])
    with pytest.raises(CorruptCheckpoint, match=f"ends at byte {BLOCK + 7}"):
        read(entry, RecordChecker(records), 0, len(whole))
