"""The CRC-32s of what a copy writes, while their parts arrive; regions, and edges of records."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from zckpt.copying import filling
from zckpt.copying.filling import FILE, RECORD, Sums, TargetFile
from zckpt.copying.journal import Key
from zckpt.core.storage.checksum import Cover, Scattered
from zckpt.core.storage.fileio import Writer
from zckpt.core.storage.fragments import Extent

from .conftest import folder_at

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


def target(
    folder: Path, size: int, records: Sequence[tuple[int, int]] = (), chunk: int = 4
) -> TargetFile:
    """A file of zeros, whose records are at [start, stop)."""
    (folder / "f").write_bytes(bytes(size))
    extents = [Extent("f", start, stop - start) for start, stop in records]
    return TargetFile(7, folder_at(folder), "f", size, extents, chunk)


@pytest.mark.parametrize(
    ("size", "regions"),
    [
        (0, []),
        (3, [(0, 3, 1)]),
        (12, [(0, 12, 3)]),
        (13, [(0, 12, 3), (12, 13, 1)]),
        (29, [(0, 12, 3), (12, 24, 3), (24, 29, 2)]),
    ],
)
def test_regions_are_whole_chunks(
    size: int, regions: list[tuple[int, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks of 4 bytes fit into a region of 14."""
    monkeypatch.setattr(filling, "REGION", 14)
    made = target(tmp_path, size).regions
    assert [(region.start, region.stop, region.left) for region in made] == regions


def test_a_region_has_a_chunk_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "REGION", 3)
    assert [region.stop for region in target(tmp_path, 9).regions] == [4, 8, 9]


def test_bytes_are_cut_where_records_begin_and_end(tmp_path: Path) -> None:
    file = target(tmp_path, 12, [(5, 8), (2, 4), (8, 10)])
    for begin, end in combinations(range(13), 2):
        inside = [edge for edge in (2, 4, 5, 8, 10) if begin < edge < end]
        edges = [*file.edges(begin, end)]
        assert [edge[:2] for edge in edges] == [*pairwise([begin, *inside, end])]
        records = [(2, 4), (5, 8), (8, 10)]
        for start, _, place in edges:
            around = [n for n, (first, last) in enumerate(records) if first <= start < last]
            assert [place] == (around or [None])


def test_bytes_are_of_the_file_and_of_one_record(tmp_path: Path) -> None:
    records = [(5, 8), (2, 4), (8, 10)]
    file = target(tmp_path, 12, records)
    for start, stop in pairwise(range(13)):
        crc = zlib.crc32(DATA[start:stop])
        *of_record, whole = file.passed(memoryview(DATA)[start:stop], start)
        assert whole == ((FILE, 7, 0), start, stop, crc)
        assert of_record == [
            ((RECORD, 7, place), start - first, stop - first, crc)
            for place, (first, last) in enumerate(sorted(records))
            if first <= start < last
        ]


def test_many_records_are_one_part_of_the_file(tmp_path: Path) -> None:
    file = target(tmp_path, 12, [(5, 8), (2, 4), (8, 10)])
    *of_records, whole = file.passed(memoryview(DATA)[3:9], 3)
    assert whole == ((FILE, 7, 0), 3, 9, zlib.crc32(DATA[3:9]))
    assert of_records == [
        ((RECORD, 7, 0), 1, 2, zlib.crc32(DATA[3:4])),
        ((RECORD, 7, 1), 0, 3, zlib.crc32(DATA[5:8])),
        ((RECORD, 7, 2), 0, 1, zlib.crc32(DATA[8:9])),
    ]


def test_a_file_is_open_while_a_region_is_written(tmp_path: Path) -> None:
    file = target(tmp_path, 12)
    file.open("buffered")
    writer = file.writer
    assert writer.mode == "buffered"
    file.open("buffered")
    assert file.writer is writer
    file.close()
    os.fstat(writer.file)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer.file)
    file.open("buffered")
    assert file.writer is not writer
    file.close()


def test_a_region_is_synced_while_another_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = target(tmp_path, 12), []
    monkeypatch.setattr(Writer, "sync", lambda writer: synced.append(writer.path))
    file.open("buffered")
    file.open("buffered")
    file.close()
    assert synced == [file.path]
    file.close()


def test_a_part_alone_is_the_whole_if_it_is_as_long() -> None:
    sums = Sums()
    sums.add([part(5, 9)], cover)
    assert sums.crc(WHOLE, len(DATA)) is None
    assert sums.crc(WHOLE, 4) == zlib.crc32(DATA[5:9])
