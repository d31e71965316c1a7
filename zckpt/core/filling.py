"""Which regions of a target file lack chunks, and to what do its bytes belong?"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from .checksum import Cover, Scattered
from .fileio import Writer
from .fragments import Extent
from .journal import Key, Passed

REGION = 256 << 20  # bytes
FILE, RECORD = "file", "record"
"""Of what a CRC-32 is: a target file, a record in it."""


class UnfinishedRegion:
    """Bytes [start, stop) of a target file, how many chunks they lack, and what has passed."""

    def __init__(self, start: int, stop: int, left: int) -> None:
        self.start = start
        self.stop = stop
        self.left = left
        self._covers: dict[Key, Cover | Scattered] = {}

    def add(self, passed: Iterable[Passed], wholes: Mapping[Key, Cover | Scattered]) -> None:
        """Takes CRC-32s of a chunk; `wholes` are those of everything that several regions share."""
        for key, start, stop, crc in passed:
            cover = self._covers.get(key)
            if cover is None:
                whole = wholes.get(key)
                cover = Scattered(whole.length) if isinstance(whole, Scattered) else Cover(0)
                self._covers[key] = cover
            cover.add(start, stop, crc)

    @property
    def passed(self) -> list[Passed]:
        """The CRC-32s of all chunks; neighboring bytes are one."""
        return [(key, *part) for key, cover in self._covers.items() for part in cover.parts()]


class TargetFile:
    """A target file while it is filled: its writer, its records, its regions."""

    def __init__(
        self, number: int, path: str, name: str, records: Sequence[Extent], chunk: int
    ) -> None:
        self.number = number
        self.path = path
        self.name = name
        self.size = os.path.getsize(path)
        self.records = sorted(records, key=lambda extent: extent.offset)
        self._starts = [extent.offset for extent in self.records]
        self._width = max(1, REGION // chunk) * chunk
        self.regions = [
            UnfinishedRegion(start, stop, -(-(stop - start) // chunk))
            for start in range(0, self.size, self._width)
            for stop in [min(start + self._width, self.size)]
        ]
        self.left = len(self.regions)
        self.stack = ExitStack()

    def open(self, io: str) -> None:
        self.writer = self.stack.enter_context(Writer(self.path, self.size, io))

    def covers(self) -> Iterator[tuple[Key, Cover]]:
        """Of the whole file and of its records, all of them empty."""
        yield (FILE, self.number, 0), Cover(self.size)
        for place, extent in enumerate(self.records):
            yield (RECORD, self.number, place), Cover(extent.length)

    def region_at(self, offset: int) -> UnfinishedRegion:
        return self.regions[offset // self._width]

    def edges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the file, cut where records begin and end."""
        offset = start
        first = max(0, bisect_right(self._starts, start) - 1)
        for extent in self.records[first:]:
            for edge in (extent.offset, extent.offset + extent.length):
                if offset < edge < stop:
                    yield offset, edge
                    offset = edge
            if extent.offset >= stop:
                break
        if offset < stop:
            yield offset, stop

    def passed(self, start: int, stop: int, crc: int) -> Iterator[Passed]:
        """What bytes [start, stop) with this CRC are of: they lie in one record, or between two."""
        yield (FILE, self.number, 0), start, stop, crc
        place = bisect_right(self._starts, start) - 1
        if place >= 0:
            extent = self.records[place]
            first = start - extent.offset
            if first < extent.length:
                yield (RECORD, self.number, place), first, stop - extent.offset, crc
