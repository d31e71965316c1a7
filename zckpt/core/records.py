"""Do the bytes that were read have the CRC-32s that their files state?

As soon as all bytes of a record have been read, in any order, their CRC-32 is compared with the one
that the file states.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from types import MappingProxyType

from msgspec import Struct

from ..errors import CorruptCheckpoint
from .checksum import Cover, crc32
from .fileio import Buffer, Reader
from .fragments import Extent, Record
from .grouping import by_key
from .sources import Fingerprints

LITTLE = 1 << 20  # bytes that may be read only to complete a record's CRC


class RecordCounts(Struct):
    """How many records were checked, or not; `bare` counts the unchecked that have no CRC-32."""

    checked: int = 0
    unchecked: int = 0
    bare: int = 0

    def report(self) -> dict[str, int]:
        """As the reports of all commands have it."""
        own = {"checked": self.checked, "unchecked": self.unchecked}
        return own | {"without_checksum": self.bare}


class Damage(Struct, frozen=True):
    """A record whose bytes have the CRC-32 `crc`, which is not the one that its file states."""

    record: Record
    crc: int


PassedRecord = tuple[Record, int, int, int]
"""Bytes [start, stop) of a record, and their CRC-32."""


class RecordChecker:
    """Do the records have the CRC-32 that their files state? Bytes may come in any order.

    Damage raises CorruptCheckpoint. With `collect` it is put into `damage` instead. `fingerprints`
    are those that the files must have. `counts` are known after `finish`.
    """

    def __init__(
        self,
        records: Sequence[Record],
        collect: bool = False,
        fingerprints: Fingerprints = MappingProxyType({}),
    ) -> None:
        self.fingerprints = fingerprints
        by_file = by_key((record.extent.file, record) for record in records if record.extent.length)
        self._records = {
            file: sorted(in_file, key=lambda record: record.extent.offset)
            for file, in_file in by_file.items()
        }
        self._starts = {
            file: [record.extent.offset for record in in_file]
            for file, in_file in self._records.items()
        }
        self._covers: dict[Extent, tuple[Record, Cover]] = {}
        self._lock = threading.Lock()
        self._required: set[Extent] = set()
        self._collect = collect
        self.damage: dict[Extent, Damage] = {}
        self.counts = RecordCounts()

    def passed(
        self, file: str, offset: int, data: memoryview, log: list[PassedRecord] | None = None
    ) -> int | None:
        """Counts the bytes at `offset`, also in `log`; raises CorruptCheckpoint for damage.

        Gives their CRC-32 if it was needed: if they lie in one record, whose CRC is known.
        """
        end, needed = offset + len(data), None
        for record in self._within(file, offset, end):  # one read may pass over several records
            begin = record.extent.offset
            start, stop = max(offset, begin), min(end, begin + record.extent.length)
            part = data[start - offset : stop - offset]
            crc = crc32(part) if record.crc is not None else 0
            self.passed_before(record, start - begin, stop - begin, crc)
            if log is not None:
                log.append((record, start - begin, stop - begin, crc))
            if len(part) == len(data) and record.crc is not None:
                needed = crc
        return needed

    def require(self, extent: Extent) -> None:
        """`finish` will read and check the records with any of these bytes, even if none passed."""
        for record in self._within(extent.file, extent.offset, extent.offset + extent.length):
            self._required.add(record.extent)
            with self._lock:
                self._cover(record)

    def _within(self, file: str, offset: int, end: int) -> Sequence[Record]:
        """The records that hold any of these bytes."""
        starts = self._starts.get(file)
        if not starts or offset == end:
            return ()
        records, first = self._records[file], max(0, bisect_right(starts, offset) - 1)
        if records[first].extent.offset + records[first].extent.length <= offset:
            first += 1
        return records[first : bisect_left(starts, end)]

    def passed_before(self, record: Record, start: int, stop: int, crc: int) -> None:
        """Counts bytes [start, stop) of a record, which have this CRC."""
        extent = record.extent
        with self._lock:
            cover = self._cover(record)
            cover.add(start, stop, crc)
            whole = cover.crc
            if record.crc is None or whole in (None, record.crc):
                return
            assert whole is not None
            self.damage[extent] = Damage(record, whole)
        if not self._collect:
            raise CorruptCheckpoint(
                "record-damaged",
                f"{extent.file} is damaged: the {extent.length} bytes at {extent.offset} do not "
                "have the CRC-32 that the file states",
                hint="take another copy of this file",
                file=extent.file,
            )

    def parts_of(self, records: Sequence[Record]) -> list[tuple[int, int, int, int]]:
        """What has been counted so far, as arguments of `passed_before`, with records by number."""
        numbers = {record.extent: number for number, record in enumerate(records)}
        return [
            (numbers[extent], *part)
            for extent, (_, cover) in self._covers.items()
            for part in cover.parts()
        ]

    def _cover(self, record: Record) -> Cover:
        return self._covers.setdefault(record.extent, (record, Cover(record.extent.length)))[1]

    def finish(
        self,
        reader: Reader,
        everything: bool = False,
        beside: Callable[[Record, Extent, memoryview], None] | None = None,
    ) -> None:
        """Reads the rest of records that lack little (padding); counts checked and unchecked ones.

        With `everything` it completes all records, also those that no tensor needed. `beside` is
        called with the bytes that lie beside tensors in their records.
        """
        buffer = Buffer(LITTLE)
        for records in self._records.values() if everything else ():
            for record in records:
                self._cover(record)
        for record, cover in list(self._covers.values()):
            gaps, padding = cover.gaps(), beside if cover.seen else None
            if gaps is None:  # tensors overlap: the whole record must be read again
                self._covers[record.extent] = record, Cover(record.extent.length)
                gaps, padding = [(0, record.extent.length)], None
            missing = sum(stop - start for start, stop in gaps)
            completed = everything or record.extent in self._required
            if record.crc is not None and (completed or missing <= max(cover.seen, LITTLE)):
                for start, stop in gaps:
                    self._pass_range(reader, buffer.view, record, (start, stop), padding)
                self.counts.checked += 1
            else:
                self.counts.unchecked += 1
                self.counts.bare += record.crc is None

    def _pass_range(
        self,
        reader: Reader,
        view: memoryview,
        record: Record,
        within: tuple[int, int],
        beside: Callable[[Record, Extent, memoryview], None] | None,
    ) -> None:
        for start in range(*within, len(view)):
            part = record.extent.part(start, min(start + len(view), within[1]))
            reader.read(part, view[: part.length])
            self.passed(part.file, part.offset, view[: part.length])
            if beside:
                beside(record, part, view[: part.length])
