"""How is a byte hashed once, for its tensor and for its record in the file?

CRCs of parts combine. So the elements that were read are hashed in pieces, each of them contiguous
both in the tensor and in a file, and both CRC-32s come from the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from .checksum import combine, crc32
from .dtypes import SIZES
from .fileio import Reader
from .fragments import Extent, Record, Runs, Slices
from .manifest import Entry
from .pieces import SMALL, ReadRequest
from .records import PassedRecord, RecordChecker

BLOCK = 1 << 20  # bytes; what was just read is still in the processor's cache when it is hashed


def is_hashed_apart(entry: Entry) -> bool:
    """Whether the pieces of an entry serve its records too.

    Otherwise many small ones of several tensors are one read, whose bytes are hashed as they come.
    """
    fragments = entry.fragments
    if type(fragments) is Slices:  # isinstance takes long: a sequence has an abstract class
        return fragments.width * fragments.size >= SMALL
    return type(fragments) is Runs


def pieces_of(request: ReadRequest) -> Iterator[Extent]:
    """The bytes of an entry that `is_hashed_apart`, in the order of its elements."""
    entry = request.entry
    runs = entry.fragments.runs(request.start, request.stop, SIZES[entry.dtype])
    return (run.extent for run in runs)


class PieceHasher(Struct, eq=False):
    """Hashes requests that were read into `view`, for one thread.

    What follows each other in a file counts once for its record, in `flush`.
    """

    _checker: RecordChecker
    _log: list[PassedRecord] | None = None
    _pending: PassedRecord | None = None

    def crc(self, request: ReadRequest, view: memoryview, known: int | None = None) -> int:
        """The CRC-32 of a request's elements; `known` saves hashing them if they are one piece."""
        at, whole = request.at, 0
        for extent in pieces_of(request):
            for part, record in self._checker.cut(extent):
                if known is None or part.length < request.end - request.at:
                    crc = crc32(view[at : at + part.length])
                else:
                    crc = known
                if record is not None:
                    self._pass(part, record, crc)
                whole = combine(whole, crc, part.length) if at > request.at else crc
                at += part.length
        return whole

    def crc_from_files(self, request: ReadRequest, reader: Reader, buffer: memoryview) -> int:
        """The CRC-32 of a request's elements, which are read from their files block by block.

        `buffer` is overwritten.
        """
        block, whole = buffer[:BLOCK], 0
        for extent in pieces_of(request):
            for part, record in self._checker.cut(extent):
                crc = 0
                for start in range(0, part.length, len(block)):
                    piece = part.part(start, min(start + len(block), part.length))
                    reader.read(piece, block)
                    crc = crc32(block[: piece.length], crc)
                if record is not None:
                    self._pass(part, record, crc)
                whole = combine(whole, crc, part.length)
        return whole

    def _pass(self, extent: Extent, record: Record, crc: int) -> None:
        start = extent.offset - record.extent.offset
        stop = start + extent.length
        if self._pending is not None:
            before, first, end, known = self._pending
            if before is record and end == start:
                self._pending = record, first, stop, combine(known, crc, extent.length)
                return
            self.flush()
        self._pending = record, start, stop, crc

    def flush(self) -> None:
        """Counts what is pending for its record; raises CorruptCheckpoint for damage."""
        if self._pending is not None:
            self._checker.passed_before(*self._pending)
            if self._log is not None:
                self._log.append(self._pending)
            self._pending = None
