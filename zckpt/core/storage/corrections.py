"""Reads source files with some bytes replaced by other values.

`zckpt mend` uses this: inside a `corrected` block, every reader sees the files as they were before
they were damaged, and a copy of the files has the corrected bytes. No file is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec import Struct

from ..grouping import by_key
from . import byte_sources, sources
from .byte_sources import ByteSource


class Correction(Struct, frozen=True):
    """Makes readers of `file` see the bytes `after` at `offset`, where the file has `before`.

    The file itself is not changed.
    """

    file: str
    offset: int
    before: bytes
    after: bytes

    @classmethod
    def of_bit(cls, file: str, offset: int, bit: int, byte: int) -> Correction:
        """Makes the correction that flips one bit of the byte at `offset`.

        `byte` is the present value of this byte.
        """
        return cls(file, offset, bytes([byte]), bytes([byte ^ 1 << bit]))

    @property
    def undone(self) -> Correction:
        """The opposite correction, which replaces `after` by `before`."""
        return Correction(self.file, self.offset, self.after, self.before)


@contextmanager
def corrected(corrections: Iterable[Correction]) -> Iterator[None]:
    """Inside the block, everything that reads the files sees the corrected bytes.

    Such blocks may be nested. Raises the errors of `sources.open_file`.
    """
    by_file = by_key((each.file, each) for each in corrections)
    with ExitStack() as stack:
        for path, corrections_of_file in by_file.items():
            number = sources.open_file(path)
            stack.callback(sources.close, number)
            below = byte_sources.of(number)
            fingerprint = byte_sources.register(
                path, _Corrected(number, below, corrections_of_file)
            )
            stack.callback(_end, fingerprint, below)
        yield


def _end(fingerprint: byte_sources.Fingerprint, below: ByteSource | None) -> None:
    if below is None:
        byte_sources.forget(fingerprint)
    else:
        byte_sources.restore(fingerprint, below)


class _Corrected:
    """A byte source of a file, which replaces some bytes as the `Correction`s say.

    `below` is the byte source of the uncorrected file; None if that is an ordinary file.
    """

    def __init__(self, file: int, below: ByteSource | None, own: Sequence[Correction]) -> None:
        self._file, self._below, self._own = file, below, own

    def pread(self, length: int, offset: int) -> bytes:
        if self._below is not None:
            data = bytearray(self._below.pread(length, offset))
        else:
            data = bytearray()
            while more := os.pread(self._file, length - len(data), offset + len(data)):
                data += more
        self._correct(memoryview(data), offset)
        return bytes(data)

    def read_into(self, view: memoryview, offset: int) -> int:
        if self._below is not None:
            count = self._below.read_into(view, offset)
        else:
            count = os.preadv(self._file, (view,), offset)
        self._correct(view[:count], offset)
        return count

    def _correct(self, view: memoryview, offset: int) -> None:
        for correction in self._own:
            start = max(correction.offset, offset)
            stop = min(correction.offset + len(correction.after), offset + len(view))
            if start < stop:
                part = correction.after[start - correction.offset : stop - correction.offset]
                view[start - offset : stop - offset] = part
