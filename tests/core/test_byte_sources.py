"""Files whose bytes lie elsewhere are read from there, by each way in which a source is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from zckpt.core.storage import byte_sources, sources
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.fragments import Extent

BYTES = bytes(range(256)) * 40


class There:
    """Bytes in memory; `asked` has the length and offset of each call."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def pread(self, length: int, offset: int) -> bytes:
        self.asked.append((length, offset))
        return BYTES[offset : offset + length]

    def read_into(self, view: memoryview, offset: int) -> int:
        data = self.pread(min(len(view), 1000), offset)  # fewer than were asked for
        view[: len(data)] = data
        return len(data)


@pytest.fixture
def hole(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "hole"
    path.touch()
    os.truncate(path, len(BYTES))
    mark = byte_sources.register(str(path), There())
    yield str(path)
    byte_sources.forget(mark)


def test_a_file_object(hole: str) -> None:
    with sources.opened(hole) as file:
        assert file.read(3) == BYTES[:3]
        assert file.seek(-5, os.SEEK_END) == len(BYTES) - 5
        assert file.read() == BYTES[-5:]
        assert file.seek(7) == 7
        assert file.read() == BYTES[7:]
        assert os.fstat(file.fileno()).st_size == len(BYTES)
        number = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_each_read_begins_where_the_last_one_ended(hole: str) -> None:
    with open(hole, "rb") as file:
        raw = byte_sources.Content(file.fileno(), There())
        assert [raw.read(4), raw.read(3), raw.tell()] == [BYTES[:4], BYTES[4:7], 7]
        assert (raw.readall(), raw.tell()) == (BYTES[7:], len(BYTES))


def test_the_end_of_a_file_fills_a_part_of_a_buffer(hole: str) -> None:
    buffer = memoryview(bytearray(5))
    with open(hole, "rb") as file:
        raw = byte_sources.Content(file.fileno(), There())
        raw.seek(-3, os.SEEK_END)
        assert raw.readinto(buffer) == 3
        assert raw.tell() == len(BYTES)
    assert bytes(buffer) == BYTES[-3:] + bytes(2)


def test_no_more_is_asked_for_than_a_file_has(hole: str) -> None:
    where = There()
    with open(hole, "rb") as file:
        raw = byte_sources.Content(file.fileno(), where)
        raw.seek(100)
        raw.readall()
    assert where.asked == [(len(BYTES) - 100, 100)]


def test_reads_at_offsets(hole: str) -> None:
    file = sources.open_file(hole)
    try:
        assert sources.pread(file, 10, 300) == BYTES[300:310]
        assert sources.pread(file, 10, len(BYTES) - 4) == BYTES[-4:]
    finally:
        os.close(file)


def test_a_reader_goes_on_until_it_has_all(hole: str) -> None:
    view = memoryview(bytearray(5000))
    Reader().read(Extent(hole, 100, 5000), view)
    assert bytes(view) == BYTES[100:5100]


def test_other_files_have_their_own_bytes(hole: str, tmp_path: Path) -> None:
    (own := tmp_path / "own").write_bytes(b"own")
    with sources.opened(str(own)) as file:
        assert file.read() == b"own"
    with open(own, "rb") as file:
        assert byte_sources.of(file.fileno()) is None


def test_what_is_forgotten_is_a_file_again(hole: str) -> None:
    file = sources.open_file(hole)
    where = byte_sources.of(file)
    assert where is not None
    byte_sources.forget(byte_sources.register(hole, where))
    assert sources.pread(file, 4, 0) == bytes(4)
    os.close(file)
