"""Files that are placeholders on this disk, while their bytes lie elsewhere.

On the disk such a file has its name, size and time, but no data blocks. `sources` and `fileio` read
its bytes from the `ByteSource` that is registered for the file. Code that opens the file in any
other way reads zeros.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from msgspec import Struct

# Python's own number is 128 KiB since 3.14: a torch file in a store would need one more request
READ_AHEAD = 8 << 10
"""The least number of bytes that a file object asks for at a time."""


class ByteSource(Protocol):
    """Reads the bytes of one file from wherever they lie, such as an object store.

    Raises ZckptError or OSError with the path.
    """

    def pread(self, length: int, offset: int) -> bytes:
        """Reads bytes of headers or other metadata, fewer only at the end of the file."""
        ...

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` with bytes of tensors.

        Returns the number of bytes read, which is smaller than the view only at the end of the
        file.
        """
        ...


class Fingerprint(Struct, frozen=True):
    """Tells whether a file is the same one as before, and unchanged.

    Two files of a machine differ in `device` or `inode`; a changed file in `size` or `mtime` (ns).
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
    """Makes later reads of the file `path` use this byte source; returns its fingerprint."""
    fingerprint = Fingerprint.of(os.stat(path))
    _known[fingerprint] = where
    return fingerprint


def restore(fingerprint: Fingerprint, where: ByteSource) -> None:
    """Makes `where` the byte source of a file again, if it was replaced or forgotten."""
    _known[fingerprint] = where


def forget(fingerprint: Fingerprint) -> None:
    """Unregisters a file; call it before the file is removed, since another may get its inode."""
    _known.pop(fingerprint, None)


def of(file: int) -> ByteSource | None:
    """Where the bytes of an open file come from, such as a store; None for an ordinary file."""
    return _known.get(Fingerprint.of(os.fstat(file))) if _known else None


class Content(io.RawIOBase):
    """A file object that reads the bytes of an open file from its byte source.

    `fileno()` returns the descriptor of the open file.
    """

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
    """Yields a buffered file object that reads an open file's bytes from its byte source.

    Closes the file in the end.
    """
    try:
        raw: Any = Content(file, where)
        with io.BufferedReader(raw, READ_AHEAD) as reader:
            yield reader
    finally:
        os.close(file)
