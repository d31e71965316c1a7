"""Checks that bytes have the CRC-32s that their files state.

A record is a byte range with a stated CRC-32, such as a zip member. As soon as all its bytes have
been read, in any order, their CRC-32 is compared with the stated one.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType

from msgspec import Struct

from ...errors import RESTORABLE, CorruptCheckpoint
from .checksum import Cover, crc32
from .fileio import Buffer, Reader
from .fragments import Extent, Record
from .sources import Fingerprints

LITTLE = 1 << 20  # bytes; a record that lacks no more is read to its end, to check its CRC-32


class RecordCounts(Struct):
    """How many records were checked: byte ranges whose file may state a CRC-32 (zip members etc.).

    `unchecked` counts records that were read only in part, or whose file states no CRC-32. `bare`
    counts only the records without a stated CRC-32.
    """

    checked: int = 0
    unchecked: int = 0
    bare: int = 0

    def report(self) -> dict[str, int]:
        """The counts as JSON, for the reports of all commands."""
        counts = {"checked": self.checked, "unchecked": self.unchecked}
        return counts | {"without_checksum": self.bare}


class Damage(Struct, frozen=True):
    """A damaged byte range: its bytes have the CRC-32 `crc`, but its file states another one."""

    record: Record
    crc: int


def damaged(extent: Extent) -> CorruptCheckpoint:
    """Makes the error for a byte range whose CRC-32 differs from the one that its file states."""
    return CorruptCheckpoint(
        "record-damaged",
        f"{extent.file} is damaged: the {extent.length} bytes at {extent.offset} do not "
        "have the CRC-32 that the file states",
        hint=RESTORABLE,
        file=extent.file,
    )


def mark_of(records: Iterable[Record]) -> int:
    """A checksum that identifies a source, computed from the stated CRC-32s of all its files."""
    crc = 0
    for record in records:
        place = record.extent
        crc = crc32(b"%d %d %d;" % (place.offset, place.length, record.crc or 0), crc)
    return crc


PassedRecord = tuple[int, int, int, int]
"""The number of a record (such as a zip member), and start, stop and CRC-32 of a part of it.

These are arguments of `RecordChecker.passed_before`.
"""


class RecordChecker:
    """Checks the CRC-32s of records (such as zip members) whose bytes may arrive in any order.

    The number of a record is its index in `records`. Damage raises CorruptCheckpoint; with
    `collect`, it is added to `damage` instead. `counts` is complete after `finish`.
    """

    def __init__(
        self,
        records: Sequence[Record],
        collect: bool = False,
        fingerprints: Fingerprints = MappingProxyType({}),
    ) -> None:
        self.fingerprints = fingerprints  # for those who open the files
        self._records = records  # perhaps millions, each made when it is accessed
        self._numbers: dict[str, array[int]] = {}  # of each file's records, in order
        self._starts: dict[str, array[int]] = {}  # where they begin
        self._index()
        self._covers: dict[int, Cover] = {}
        self._whole: dict[int, int] = {}  # the CRC-32s of records whose bytes have all passed
        self._lock = threading.Lock()
        self._required: set[int] = set()
        self._collect = collect
        self.damage: dict[Extent, Damage] = {}
        self.counts = RecordCounts()

    def _index(self) -> None:
        in_files: dict[str, list[tuple[int, int, int]]] = {}
        for number, record in enumerate(self._records):
            extent = record.extent
            if extent.length:
                record_place = extent.offset, extent.length, number
                in_files.setdefault(extent.file, []).append(record_place)
        for file, in_file in in_files.items():
            in_file.sort()
            # two records with the same bytes are one
            kept = [
                item
                for before, item in zip([(-1, -1, -1), *in_file], in_file, strict=False)
                if item[:2] != before[:2]
            ]
            self._starts[file] = array("q", [start for start, _, _ in kept])
            self._numbers[file] = array("q", [number for _, _, number in kept])
            in_file.clear()

    def passed(
        self, file: str, offset: int, data: memoryview, log: list[PassedRecord] | None = None
    ) -> int | None:
        """Hashes bytes that were read from a file, for each record that contains some of them.

        Appends the hashed parts of records to `log`. Returns the CRC-32 of the bytes if they lie
        within one record whose CRC-32 is stated, otherwise None. Raises CorruptCheckpoint for
        damage, unless damage is collected.
        """
        end, needed = offset + len(data), None
        for number in self._within(file, offset, end):  # one read may pass over several records
            record = self._records[number]
            begin, stated_crc = record.extent.offset, record.crc
            start, stop = max(offset, begin), min(end, begin + record.extent.length)
            part = data[start - offset : stop - offset]
            crc = crc32(part) if stated_crc is not None else 0
            self.passed_before(number, start - begin, stop - begin, crc)
            if log is not None:
                log.append((number, start - begin, stop - begin, crc))
            if len(part) == len(data) and stated_crc is not None:
                needed = crc
        return needed

    def require(self, extent: Extent) -> None:
        """Makes `finish` read and check all records (zip members etc.) with any of these bytes."""
        for number in self._within(extent.file, extent.offset, extent.offset + extent.length):
            with self._lock:
                self._required.add(number)
                if number not in self._whole:
                    self._cover(number)

    def _within(self, file: str, offset: int, end: int) -> Sequence[int]:
        """The numbers of the records (zip members etc.) that hold any of these bytes."""
        starts = self._starts.get(file)
        if not starts or offset == end:
            return ()
        numbers, first = self._numbers[file], max(0, bisect_right(starts, offset) - 1)
        extent = self._records[numbers[first]].extent
        if extent.offset + extent.length <= offset:
            first += 1
        return numbers[first : bisect_left(starts, end)]

    def passed_before(self, number: int, start: int, stop: int, crc: int) -> None:
        """Adds the CRC-32 of bytes [start, stop) of a record that this process did not read.

        An earlier run or another process has read them. `number` is the index of the record.
        """
        record = self._records[number]
        extent = record.extent
        with self._lock:
            if number in self._whole:
                return
            cover = self._cover(number)
            cover.add(start, stop, crc)
            whole = cover.crc
            if whole is None:
                return
            del self._covers[number]
            self._whole[number] = whole
            if record.crc in (None, whole):
                return
            self.damage[extent] = Damage(record, whole)
        if not self._collect:
            raise damaged(extent)

    def parts(self) -> Iterator[PassedRecord]:
        """Yields the parts of records that were read, with their CRC-32s.

        Another process gives them to its checker, as arguments of `passed_before`.
        """
        for number, crc in self._whole.items():
            yield number, 0, self._records[number].extent.length, crc
        for number, cover in self._covers.items():
            for part in cover.parts():
                yield number, *part

    def _cover(self, number: int) -> Cover:
        if number not in self._covers:
            self._covers[number] = Cover(self._records[number].extent.length)
        return self._covers[number]

    def finish(
        self,
        reader: Reader,
        everything: bool = False,
        beside: Callable[[Record, Extent, memoryview], None] | None = None,
    ) -> None:
        """Reads missing bytes of records that were read in part, to check them; counts records.

            everything    reads all records with a CRC-32, even those that no tensor needed
            beside        called with the bytes of a record that belong to no tensor

        A record stays unchecked if more than half of it and more than 1 MiB is missing, unless
        `require` was called for a part of it.
        """
        buffer = Buffer(LITTLE)
        for number in self._whole:
            self._count(self._records[number].crc is not None, True)
        for numbers in self._numbers.values() if everything else ():
            for number in numbers:
                if number not in self._whole:
                    self._cover(number)
        for number, cover in list(self._covers.items()):
            record, gaps = self._records[number], cover.gaps()
            padding = beside if cover.seen else None
            if gaps is None:  # tensors overlap: the complete record must be read again
                self._covers[number] = Cover(record.extent.length)
                gaps, padding = [(0, record.extent.length)], None
            missing = sum(stop - start for start, stop in gaps)
            completed = everything or number in self._required
            has_crc, completes = (
                record.crc is not None,
                completed or missing <= max(cover.seen, LITTLE),
            )
            for start, stop in gaps if has_crc and completes else ():
                self._pass_range(reader, buffer.view, record, (start, stop), padding)
            self._count(has_crc, completes)

    def _count(self, has_crc: bool, is_whole: bool) -> None:
        self.counts.checked += has_crc and is_whole
        self.counts.unchecked += not (has_crc and is_whole)
        self.counts.bare += not has_crc

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
