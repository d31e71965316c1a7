"""Which regions of a target file lack chunks, and to what do its bytes belong?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from threading import Lock

from .checksum import Cover, Scattered, combine
from .fileio import Writer
from .fragments import Extent
from .journal import Key, Passed

REGION = 256 << 20  # bytes
FILE, RECORD = "file", "record"
"""Of what a CRC-32 is: a target file, a record in it."""


class Neighbors:
    """CRC-32s of parts in the order of a file; those of neighbors with one key are joined."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[int, int, int]] = {}
        self._before: list[Passed] = []

    def add(self, parts: Iterable[Passed]) -> None:
        for key, start, stop, crc in parts:
            if (last := self._last.get(key)) is None:
                self._last[key] = start, stop, crc
            elif last[1] == start:
                self._last[key] = last[0], stop, combine(last[2], crc, stop - start)
            else:
                self._before.append((key, *last))
                self._last[key] = start, stop, crc

    @property
    def parts(self) -> list[Passed]:
        return self._before + [(key, *last) for key, last in self._last.items()]


class UnfinishedRegion:
    """Bytes [start, stop) of a target file, how many chunks they lack, and what has passed."""

    def __init__(self, start: int, stop: int, left: int) -> None:
        self.start = start
        self.stop = stop
        self.left = left
        self._covers: dict[Key, Cover | Scattered] = {}
        self._alone: dict[Key, Passed] = {}  # a small tensor is in one piece

    def add(self, passed: Iterable[Passed], wholes: Mapping[Key, Cover | Scattered]) -> None:
        """Takes CRC-32s of a chunk; `wholes` are those of everything that several regions share."""
        for part in passed:
            key = part[0]
            if key not in self._covers and key not in self._alone:
                self._alone[key] = part
                continue
            if key in self._alone:
                self._cover(self._alone.pop(key), wholes)
            self._cover(part, wholes)

    def _cover(self, part: Passed, wholes: Mapping[Key, Cover | Scattered]) -> None:
        key, start, stop, crc = part
        cover = self._covers.get(key)
        if cover is None:
            whole = wholes.get(key)
            cover = Scattered(whole.length) if isinstance(whole, Scattered) else Cover(0)
            self._covers[key] = cover
        cover.add(start, stop, crc)

    @property
    def passed(self) -> list[Passed]:
        """The CRC-32s of all chunks; neighboring bytes are one."""
        covered = [(key, *part) for key, cover in self._covers.items() for part in cover.parts()]
        return [*covered, *self._alone.values()]


class TargetFile:
    """A target file while it is filled: its writer, its records, its regions.

    `size` is given, since another process may have just written more, up to alignment.
    """

    def __init__(
        self, number: int, path: str, name: str, size: int, records: Sequence[Extent], chunk: int
    ) -> None:
        self.number = number
        self.path = path
        self.name = name
        self.size = size
        self.records = sorted(records, key=lambda extent: extent.offset)
        self._starts = [extent.offset for extent in self.records]
        self._width = max(1, REGION // chunk) * chunk
        self.regions = [
            UnfinishedRegion(start, stop, -(-(stop - start) // chunk))
            for start in range(0, self.size, self._width)
            for stop in [min(start + self._width, self.size)]
        ]
        self.stack = ExitStack()
        self._lock = Lock()
        self._open = 0  # regions that are being written

    def open(self, io: str) -> None:
        """Opens the file to write one more region; `io` is the mode of its writer."""
        with self._lock:
            if not self._open:
                self.writer = self.stack.enter_context(Writer(self.path, self.size, io))
            self._open += 1

    def close(self) -> None:
        """Syncs the file after a region, and closes it after the last one that was open."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self.stack.close()
                return
        self.writer.sync()

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
