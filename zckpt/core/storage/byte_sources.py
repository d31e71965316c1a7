"""Which files are here by name, size and time alone, while their bytes lie elsewhere?

Such a file is one hole on the disk. Whoever reads a source through `sources` and `fileio` gets its
bytes from the `ByteSource` that is registered for it; who opened it otherwise would read zeros.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from msgspec import Struct

READ_AHEAD = 8 << 10
"""Bytes that a file object asks for at least. Python's own number is 128 KiB since 3.14: of each
torch file in a store that would be one more request."""


class ByteSource(Protocol):
    """The bytes of one file, wherever they lie. Raises ZckptError or OSError with the path."""

    def pread(self, length: int, offset: int) -> bytes:
        """Bytes of metadata; fewer only if the file ends there."""
        ...

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` with bytes of tensors; fewer only if the file ends there."""
        ...


class Fingerprint(Struct, frozen=True):
    """What shows that a file is still the same: `size` in bytes, `mtime` in nanoseconds.

    No two files of this machine have the same one at the same time.
    """

    device: int
    inode: int
    size: int
    mtime: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


_known: dict[Fingerprint, ByteSource] = {}


def register(path: str, where: ByteSource) -> Fingerprint:
    """From now on the bytes of the file at `path` are those of `where`."""
    fingerprint = Fingerprint.of(os.stat(path))
    _known[fingerprint] = where
    return fingerprint


def restore(fingerprint: Fingerprint, where: ByteSource) -> None:
    """The bytes of the file are again those of `where`."""
    _known[fingerprint] = where


def forget(fingerprint: Fingerprint) -> None:
    """Ends that, before the file is removed: another file may get its inode."""
    _known.pop(fingerprint, None)


def of(file: int) -> ByteSource | None:
    """Where the bytes of an open file lie; None if they are its own."""
    return _known.get(Fingerprint.of(os.fstat(file))) if _known else None


class Content(io.RawIOBase):
    """A file object over an open file whose bytes lie elsewhere; `fileno` is the file's own."""

    def __init__(self, file: int, where: ByteSource) -> None:
        self._file, self._where, self._at = file, where, 0

    def fileno(self) -> int:
        return self._file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._file).st_size}
        self._at = start[whence] + offset
        return self._at

    def readall(self) -> bytes:
        data = self._where.pread(os.fstat(self._file).st_size - self._at, self._at)
        self._at += len(data)
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._where.pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextmanager
def content(file: int, where: ByteSource) -> Iterator[BinaryIO]:
    """A file object for readers that want one; closes the file."""
    try:
        raw: Any = Content(file, where)
        with io.BufferedReader(raw, READ_AHEAD) as reader:
            yield reader
    finally:
        os.close(file)
