"""A target file while it is filled: its regions (byte ranges), and their checksums."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from threading import Lock

from msgspec import Struct, field

from ..core.storage.checksum import Cover, Scattered, combine, crc32
from ..core.storage.fileio import Writer
from ..core.storage.folder import Folder
from ..core.storage.fragments import Extent
from .journal import Key, Passed

REGION = 256 << 20  # bytes
FILE, RECORD = "file", "record"
"""The kinds of CRC-32s that are collected here: of a target file, and of a record in it."""


CoverOf = Callable[[Key], Cover | Scattered]


class Sums(Struct, eq=False):
    """Combines the CRC-32s of parts to the CRC-32s of tensors, files and records.

    Parts may arrive in any order. A record is a byte range with a checksum. A small tensor has just
    one part, so a `Cover`, which joins parts, is created only for the second one.
    """

    _alone: dict[Key, Passed] = field(default_factory=dict)
    _covers: dict[Key, Cover | Scattered] = field(default_factory=dict)

    def add(self, passed: Iterable[Passed], cover_of: CoverOf) -> None:
        """Adds the CRC-32s of parts.

        The key of a part says which tensor, file or record it belongs to. `cover_of` gets the key
        and creates a `Cover`, which combines the CRC-32s of all parts with this key.
        """
        alone, covers = self._alone, self._covers
        for part in passed:
            key, start, stop, crc = part
            if key in covers:
                covers[key].add(start, stop, crc)
            elif key in alone:
                cover = covers[key] = cover_of(key)
                cover.add(*alone.pop(key)[1:])
                cover.add(start, stop, crc)
            else:
                alone[key] = part

    def crc(self, key: Key, length: int) -> int | None:
        """The CRC-32 of the tensor, file or record `key`, which has `length` bytes.

        None if some parts of it have not arrived yet.
        """
        if key in self._alone:
            _, start, stop, crc = self._alone[key]
            return crc if stop - start == length else None
        if key in self._covers:
            return self._covers[key].crc
        return None if length else 0

    def take(self) -> list[Passed]:
        """Returns and removes the CRC-32s of all parts so far; neighboring parts are merged."""
        covered = [(key, *part) for key, cover in self._covers.items() for part in cover.parts()]
        alone = self._alone.values()
        self._alone, self._covers = {}, {}
        return [*covered, *alone]


class UnfinishedRegion(Struct, eq=False):
    """A byte range [start, stop) of a target file that is not completely written yet.

    `left` is the number of its chunks that are missing. The CRC-32s are those of the written
    chunks.
    """

    start: int
    stop: int
    left: int
    sums: Sums = field(default_factory=Sums)


class TargetFile(Struct, eq=False, dict=True):
    """A target file below `root` while it is filled.

    It is divided into regions. `records` are its byte ranges that get a checksum.
    """

    number: int
    root: Folder
    name: str
    size: int
    records: Sequence[Extent]
    chunk: int

    def __post_init__(self) -> None:
        self.path = os.path.join(self.root.path, self.name)
        self.records = sorted(self.records, key=lambda extent: extent.offset)
        self._starts = [extent.offset for extent in self.records]
        self.width = max(1, REGION // self.chunk) * self.chunk
        self.regions = [
            UnfinishedRegion(start, stop, -(-(stop - start) // self.chunk))
            for start in range(0, self.size, self.width)
            for stop in [min(start + self.width, self.size)]
        ]
        self.stack = ExitStack()
        self._lock = Lock()
        self._open = 0  # the number of regions that are being written

    @property
    def file(self) -> int:
        """The descriptor of the open file."""
        return self.writer.file

    def open(self, io: str) -> None:
        """Opens the file to write one more region; `io` is `auto`, `direct` or `buffered`."""
        with self._lock:
            if not self._open:
                self.writer = self.stack.enter_context(Writer(self.root, self.path, self.size, io))
            self._open += 1

    def close(self) -> None:
        """Ends the writing of one region: syncs the file, and closes it after the last region."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self.stack.close()
                return
        self.writer.sync()

    def edges(self, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Cuts [start, stop) of the file at the edges of records (byte ranges with a checksum).

        Yields the start and the stop of each part, and the index of the record around it, or None.
        """
        offset = start
        for place in range(max(0, bisect_right(self._starts, start) - 1), len(self.records)):
            extent = self.records[place]
            if extent.offset >= stop:
                break
            if offset < extent.offset:
                yield offset, extent.offset, None
                offset = extent.offset
            end = min(extent.offset + extent.length, stop)
            if offset < end:
                yield offset, end, place
                offset = end
        if offset < stop:
            yield offset, stop, None

    def passed(self, data: memoryview, start: int) -> Iterator[Passed]:
        """Yields the CRC-32s of `data`, the bytes of the file from `start` on.

        First come the CRC-32s of the parts of `data` that lie in records (byte ranges with a
        checksum), then the CRC-32 of all of `data`.
        """
        crc, stop = 0, start + len(data)
        for first, last, place in self.edges(start, stop):
            part_crc = crc32(data[first - start : last - start])
            crc = combine(crc, part_crc, last - first)
            if place is not None:
                begin = self._starts[place]
                yield (RECORD, self.number, place), first - begin, last - begin, part_crc
        yield (FILE, self.number, 0), start, stop, crc
