"""Files are read with other bytes than they have, and only inside of the block."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from zckpt.core.storage import sources
from zckpt.core.storage.corrections import Correction, corrected
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.fragments import Extent


def read(path: Path, offset: int, length: int) -> list[bytes]:
    """The bytes in each of the ways in which readers get them."""
    view = memoryview(bytearray(length))
    with closing(Reader()) as reader:
        reader.read(Extent(str(path), offset, length), view)
    with sources.opened(str(path)) as file:
        direct = sources.pread(file.fileno(), length, offset)
        file.seek(offset)
        return [bytes(view), direct, file.read(length)]


def test_bytes_are_corrected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    own = [
        Correction(str(path), 10, b"\x0a\x0b\x0c", b"abc"),
        Correction.of_bit(str(path), 50, 7, 50),
    ]
    with corrected(own):
        for offset, length in ((0, 100), (11, 1), (12, 39), (13, 20), (40, 60)):
            expected = bytearray(range(100))
            expected[10:13], expected[50] = b"abc", 50 ^ 128
            for data in read(path, offset, length):
                assert data == bytes(expected[offset : offset + length])
        with corrected([Correction(str(path), 11, b"b", b"x")]):
            assert read(path, 9, 4) == [b"\x09axc"] * 3
        assert read(path, 9, 4) == [b"\x09abc"] * 3
    assert read(path, 9, 4) == [bytes(range(9, 13))] * 3
    assert path.read_bytes() == bytes(range(100))
