"""The CRC-32s of records, of which a tensor is read part by part."""

from __future__ import annotations

import random
import zlib
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.passes.pieces import ElementReader, ReadRequest
from zckpt.core.storage.fileio import Buffer, Reader
from zckpt.core.storage.fragments import Extent, Fragment, Record, Runs
from zckpt.core.storage.records import PassedRecord, RecordChecker
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
    return Entry("x", "param", "U8", (len(whole),), Runs(fragments)), records, whole


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
    covered = {number: stop - start for number, start, stop, _ in checker.parts()}
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


class OneFile:
    """A file with records at [start, stop), and a checker of them."""

    def __init__(self, folder: Path, *ranges: tuple[int, int], stated: bool = True) -> None:
        self.data = random.Random(1).randbytes(64)
        self.path = str(folder / "file")
        Path(self.path).write_bytes(self.data)
        self.records = [
            Record(
                Extent(self.path, start, stop - start),
                zlib.crc32(self.data[start:stop]) if stated else None,
            )
            for start, stop in ranges
        ]
        self.checker = RecordChecker(self.records)

    def passed(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """What is counted of a read: the number of a record, the bytes of it, and their CRC-32."""
        log: list[PassedRecord] = []
        self.checker.passed(self.path, start, memoryview(self.data)[start:stop], log)
        return log

    def finish(self, everything: bool = False) -> list[tuple[int, Extent, bytes]]:
        """What lies beside the tensors."""
        beside: list[tuple[int, Extent, bytes]] = []

        def found(record: Record, extent: Extent, data: memoryview) -> None:
            beside.append((self.records.index(record), extent, bytes(data)))

        with closing(Reader()) as reader:
            if everything:
                self.checker.finish(reader, everything, found)
            else:
                self.checker.finish(reader, beside=found)
        return beside

    @property
    def counts(self) -> tuple[int, int, int]:
        counts = self.checker.counts
        return counts.checked, counts.unchecked, counts.bare


def test_a_read_counts_for_every_record_that_it_passes_over(tmp_path: Path) -> None:
    file = OneFile(tmp_path, (8, 16), (24, 32))
    data = file.data
    assert file.passed(0, 8) == file.passed(16, 24) == file.passed(32, 40) == []
    assert [*file.checker.parts()] == []
    assert file.passed(12, 28) == [
        (0, 4, 8, zlib.crc32(data[12:16])),
        (1, 0, 4, zlib.crc32(data[24:28])),
    ]
    assert file.passed(20, 32) == [(1, 0, 8, zlib.crc32(data[24:32]))]


def test_a_crc_that_was_needed_is_given(tmp_path: Path) -> None:
    """It spares the caller one more look at bytes that one record has."""
    file = OneFile(tmp_path, (8, 16), (16, 24))
    bare = OneFile(tmp_path, (8, 16), stated=False)

    def crc(of: OneFile, start: int, stop: int) -> int | None:
        return of.checker.passed(of.path, start, memoryview(of.data)[start:stop])

    assert crc(file, 9, 14) == zlib.crc32(file.data[9:14])
    assert crc(file, 16, 24) == zlib.crc32(file.data[16:24])
    for start, stop in ((6, 10), (22, 26), (12, 20), (30, 40)):
        assert crc(file, start, stop) is None
    assert crc(bare, 9, 14) is None


def test_an_empty_record_hides_no_other(tmp_path: Path) -> None:
    file = OneFile(tmp_path, (8, 16), (8, 8))
    assert file.passed(8, 16) == [(0, 0, 8, zlib.crc32(file.data[8:16]))]


@pytest.mark.parametrize(
    ("stop", "seen", "counts"),
    [
        (16, 8, (1, 0, 0)),  # as many are missing as are little
        (24, 12, (1, 0, 0)),  # as many are missing as were read
        (24, 11, (0, 1, 0)),
        (8, 0, (0, 0, 0)),
    ],
)
def test_records_that_lack_little_are_completed(
    stop: int,
    seen: int,
    counts: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zckpt.core.storage.records.LITTLE", 8)
    file = OneFile(tmp_path, (0, stop))
    file.passed(0, seen)
    file.finish()
    assert file.counts == counts


def test_records_without_a_checksum_are_not_checked(tmp_path: Path) -> None:
    file = OneFile(tmp_path, (0, 8), stated=False)
    file.passed(0, 8)
    file.finish(everything=True)
    assert file.counts == (0, 1, 1)
    assert file.checker.counts.report() == {"checked": 0, "unchecked": 1, "without_checksum": 1}


@pytest.mark.parametrize(("everything", "required"), [(True, False), (False, True)])
def test_records_of_which_nothing_was_read(
    everything: bool, required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.core.storage.records.LITTLE", 8)
    file = OneFile(tmp_path, (0, 32))
    file.checker.require(Extent(file.path, 4, 0))
    file.finish()
    assert file.counts == (0, 0, 0)
    if required:
        file.checker.require(Extent(file.path, 4, 1))
    assert file.finish(everything) == []  # nothing lies beside a tensor, since there was none
    assert file.counts == (1, 0, 0)


def test_what_lies_beside_tensors_is_told(tmp_path: Path) -> None:
    file = OneFile(tmp_path, (8, 24), (32, 40))
    file.passed(12, 20)
    assert file.finish(everything=True) == [
        (0, Extent(file.path, start, 4), file.data[start : start + 4]) for start in (8, 20)
    ]
    assert file.counts == (2, 0, 0)


@pytest.mark.parametrize("place", [None, 0, 7, 19])
def test_bytes_that_passed_twice_are_read_again(place: int | None, tmp_path: Path) -> None:
    file = OneFile(tmp_path, (0, 20))
    file.passed(0, 10)
    file.passed(5, 15)
    if place is None:
        assert file.finish() == []
        assert file.counts == (1, 0, 0)
        return
    data = bytearray(file.data)
    data[place] ^= 1
    Path(file.path).write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="the 20 bytes at 0"):
        file.finish()
