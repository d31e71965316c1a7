"""How do elements of tensors get from files into a buffer, and how are they checked on the way?

Pieces that follow each other both in a file and in the buffer are one read. Small slices of ZeRO-3
are one read per rank and then one 2-D copy per tensor. That takes 74 ns a slice, where a read and a
write of each slice take 2,200. numpy is imported only for many slices or for strided tensors.

As soon as all bytes of a record have been read, their CRC-32 is compared with what the file states.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from ..errors import CorruptCheckpoint
from .checksum import Cover, crc32
from .dtypes import SIZES
from .fileio import Buffer, Reader
from .fragments import Extent, Fragment, Record, Slices
from .manifest import Entry
from .sources import Fingerprints

MANY = 4096  # slices; copying more of them takes longer than importing numpy
SMALL = 64 << 10  # bytes; a slice below this is read together with its neighbors
SHORT = 4 << 10  # bytes; runs of a strided tensor below this are read together
LITTLE = 1 << 20  # bytes that may be read only to complete a record's CRC
CAST_BLOCK = 1 << 18  # elements that are cast at a time


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Elements [start, stop) of an entry, to be put at byte `at` of a buffer.

    `check` is True if these bytes count for the CRC of their record. Bytes that are read twice
    count once.
    """

    entry: Entry
    start: int
    stop: int
    at: int
    check: bool = True

    @property
    def end(self) -> int:
        return self.at + (self.stop - self.start) * SIZES[self.entry.dtype]


@dataclass(frozen=True, slots=True)
class Damage:
    """A record whose bytes have the CRC-32 `crc`, which is not the one that its file states."""

    record: Record
    crc: int


PassedRecord = tuple[Record, int, int, int]
"""Bytes [start, stop) of a record, and their CRC-32."""


class RecordChecker:
    """Do the records have the CRC-32 that their files state? Bytes may come in any order.

    Damage raises CorruptCheckpoint. With `collect` it is put into `damage` instead. `fingerprints`
    are those that the files must have. `bare` counts unchecked records without a stored checksum.
    """

    def __init__(
        self,
        records: Sequence[Record],
        collect: bool = False,
        fingerprints: Fingerprints = MappingProxyType({}),
    ) -> None:
        self.fingerprints = fingerprints
        by_file: dict[str, list[Record]] = {}
        for record in records:
            if record.extent.length:
                by_file.setdefault(record.extent.file, []).append(record)
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
        self.bare = 0

    def passed(
        self, file: str, offset: int, data: memoryview, log: list[PassedRecord] | None = None
    ) -> None:
        """Counts the bytes at `offset`, also in `log`; raises CorruptCheckpoint for damage."""
        end = offset + len(data)
        for record in self._within(file, offset, end):  # one read may pass over several records
            begin = record.extent.offset
            start, stop = max(offset, begin), min(end, begin + record.extent.length)
            part = data[start - offset : stop - offset]
            crc = crc32(part) if record.crc is not None else 0
            self.passed_before(record, start - begin, stop - begin, crc)
            if log is not None:
                log.append((record, start - begin, stop - begin, crc))

    def passed_crc(self, extent: Extent, crc: int) -> None:
        """Counts bytes of one record whose CRC-32 is known already."""
        for record in self._within(extent.file, extent.offset, extent.offset + extent.length):
            start = extent.offset - record.extent.offset
            self.passed_before(record, start, start + extent.length, crc)

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
                f"{extent.file} is damaged: the {extent.length} bytes at {extent.offset} do not "
                "have the CRC-32 that the file states",
                hint="take another copy of this file; nothing was written",
            )

    def _cover(self, record: Record) -> Cover:
        return self._covers.setdefault(record.extent, (record, Cover(record.extent.length)))[1]

    def finish(
        self,
        reader: Reader,
        everything: bool = False,
        beside: Callable[[Record, Extent, memoryview], None] | None = None,
    ) -> tuple[int, int]:
        """Reads the rest of records that lack little (padding); counts checked and unchecked ones.

        With `everything` it completes all records, also those that no tensor needed. `beside` is
        called with the bytes that lie beside tensors in their records.
        """
        buffer = Buffer(LITTLE)
        checked = unchecked = 0
        for records in self._records.values() if everything else ():
            for record in records:
                self._cover(record)
        for record, cover in list(self._covers.values()):
            gaps = cover.gaps()
            if gaps is None:  # tensors overlap: the whole record must be read again
                self._covers[record.extent] = record, Cover(record.extent.length)
                gaps = [(0, record.extent.length)]
            missing = sum(stop - start for start, stop in gaps)
            completed = everything or record.extent in self._required
            if record.crc is not None and (completed or missing <= max(cover.seen, LITTLE)):
                padding = beside if cover.seen else None
                for start, stop in gaps:
                    self._pass_range(reader, buffer.view, record, (start, stop), padding)
                checked += 1
            else:
                unchecked += 1
                self.bare += record.crc is None
        return checked, unchecked

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


class ElementReader:
    """Reads elements of entries into buffers, for one thread.

    `passed`, if it is a list, gets what was read of records.
    """

    def __init__(self, reader: Reader, checker: RecordChecker, memory: int) -> None:
        self.reader = reader
        self.checker = checker
        self.memory = memory
        self.passed: list[PassedRecord] | None = None
        self._scratch: Buffer | None = None
        self._block: Buffer | None = None

    def block(self) -> memoryview:
        """Memory for elements in the source's type, before they are cast."""
        self._block = self._block or Buffer(CAST_BLOCK * 8)
        return self._block.view

    def scratch(self) -> memoryview:
        """Working memory, allocated when first needed; many copies never need it."""
        self._scratch = self._scratch or Buffer(self.memory)
        return self._scratch.view

    def _read(self, extent: Extent, into: memoryview, check: bool) -> None:
        self.reader.read(extent, into)
        if check:
            self.checker.passed(extent.file, extent.offset, into, self.passed)

    def read(self, requests: Sequence[ReadRequest], view: memoryview) -> None:
        """Puts the elements of every item at its place in `view`."""
        # a read that may still grow, its byte in the buffer, and whether it is checked
        pending: tuple[Extent, int, bool] | None = None
        place = 0
        while place < len(requests):
            batch = self._batch(requests, place)
            if batch:
                self._read_slices(batch, view)
                place += len(batch)
                continue
            item = requests[place]
            place += 1
            size = SIZES[item.entry.dtype]
            for start, extent in self._long(item, view):
                at = item.at + (start - item.start) * size
                if pending is None:
                    pending = extent, at, item.check
                    continue
                before, begin, check = pending
                follows = _follows(before, extent) and begin + before.length == at
                if follows and check == item.check:
                    joined = Extent(before.file, before.offset, before.length + extent.length)
                    pending = joined, begin, check
                else:
                    self._read(before, view[begin : begin + before.length], check)
                    pending = extent, at, item.check
        if pending is not None:
            extent, at, check = pending
            self._read(extent, view[at : at + extent.length], check)

    def read_as(
        self,
        dtype: str,
        request: ReadRequest,
        view: memoryview,
        passed: Callable[[int, int, memoryview], None] | None = None,
    ) -> None:
        """Puts the elements, cast to `dtype`, at byte `request.at` of `view`, block by block.

        `passed` is called with the first element of a block, its end, and its bytes before the
        cast. Raises UnsupportedCheckpoint for types that are not floats.
        """
        if dtype == request.entry.dtype and passed is None:
            self.read([request], view)
            return
        from .cast import cast

        entry, size, cast_size = request.entry, SIZES[request.entry.dtype], SIZES[dtype]
        block = self.block()
        for start in range(request.start, request.stop, CAST_BLOCK):
            stop = min(start + CAST_BLOCK, request.stop)
            elements = block[: (stop - start) * size]
            self.read([ReadRequest(entry, start, stop, 0, request.check)], elements)
            if passed is not None:
                passed(start, stop, elements)
            at = request.at + (start - request.start) * cast_size
            cast(elements, entry.dtype, view[at : at + (stop - start) * cast_size], dtype)

    def _long(self, item: ReadRequest, view: memoryview) -> Iterator[tuple[int, Extent]]:
        """The long runs of an item, each with its first element; copies the short ones at once."""
        size = SIZES[item.entry.dtype]
        for fragment in item.entry.fragments.overlapping(item.start, item.stop):
            if fragment.count > 1 and (fragment.stop - fragment.start) * size < SHORT:
                self._read_runs(item, fragment, view)
                continue
            for run in fragment.runs(item.start, item.stop):
                start, stop = max(item.start, run.start), min(item.stop, run.stop)
                first = run.start
                yield start, run.extent.part((start - first) * size, (stop - first) * size)

    def _batch(self, requests: Sequence[ReadRequest], place: int) -> list[ReadRequest]:
        """Whole tensors from `place` on whose small slices follow each other on every rank.

        A tensor that the edge of a chunk cuts ends the batch: its slices would be read twice.
        """
        batch: list[ReadRequest] = []
        width = 0
        for item in islice(requests, place, None):
            slices = item.entry.fragments
            if not isinstance(slices, Slices) or item.start or item.stop != slices.numel:
                break
            if slices.width * slices.size >= SMALL:
                break
            if batch:
                last = _slices(batch[-1])
                if slices.flats is not last.flats or slices.offset != last.offset + last.width:
                    break
                if item.check != batch[-1].check:
                    break
            width += slices.width
            if width * slices.size * len(slices.flats) > self.memory:
                break
            batch.append(item)
        return batch

    def _read_slices(self, batch: Sequence[ReadRequest], view: memoryview) -> None:
        """One read per rank for all tensors of the batch, then a 2-D copy for each."""
        first, last = _slices(batch[0]), _slices(batch[-1])
        size, begin = first.size, first.offset
        width = last.offset + last.width - begin
        ranks = max(len(item.entry.fragments) for item in batch)
        scratch = self.scratch()[: ranks * width * size]
        for rank in range(ranks):
            row = scratch[rank * width * size : (rank + 1) * width * size]
            part = first.flats[rank].part(begin * size, (begin + width) * size)
            self._read(part, row, batch[0].check)
        if sum(len(item.entry.fragments) for item in batch) < MANY:
            self._spread(batch, scratch, begin, width, view)
            return
        import numpy as np

        table = np.frombuffer(scratch, dtype=f"u{size}").reshape(ranks, width)
        for item in batch:
            slices = _slices(item)
            mine = table[:, slices.offset - begin : slices.offset - begin + slices.width]
            whole, rest = divmod(slices.numel, slices.width)
            target = np.frombuffer(view[item.at : item.end], dtype=f"u{size}")
            target[: slices.numel - rest].reshape(whole, slices.width)[:] = mine[:whole]
            if rest:
                target[-rest:] = mine[whole, :rest]

    def _spread(
        self,
        batch: Sequence[ReadRequest],
        scratch: memoryview,
        begin: int,
        width: int,
        view: memoryview,
    ) -> None:
        """Copies few slices to their places without numpy, whose import alone takes 150 ms."""
        for item in batch:
            size, first = _slices(item).size, _slices(item).offset - begin
            for rank, slice_ in enumerate(_slices(item)):
                start, stop = item.at + slice_.start * size, item.at + slice_.stop * size
                source = (rank * width + first) * size
                view[start:stop] = scratch[source : source + stop - start]

    def _read_runs(self, item: ReadRequest, fragment: Fragment, view: memoryview) -> None:
        """Copies an item's part of a strided fragment, by way of the working memory."""
        import numpy as np

        size, length = SIZES[item.entry.dtype], fragment.stop - fragment.start
        target = np.frombuffer(view[item.at : item.end], dtype=f"V{size}")
        first = max(0, (item.start - fragment.stop) // fragment.stride + 1)
        stop = min(fragment.count, -(-(item.stop - fragment.start) // fragment.stride))
        step = max(1, self.memory // (length * size))
        for begin in range(first, stop, step):
            end = min(begin + step, stop)
            extent = fragment.extent.part(begin * length * size, end * length * size)
            scratch = self.scratch()[: extent.length]
            self._read(extent, scratch, item.check)
            runs = np.frombuffer(scratch, dtype=f"V{size}").reshape(end - begin, length)
            at = fragment.start + np.arange(begin, end)[:, None] * fragment.stride
            at = at + np.arange(length)[None, :] - item.start
            inside = (at >= 0) & (at < item.stop - item.start)
            target[at[inside]] = runs[inside]


def _slices(item: ReadRequest) -> Slices:
    slices = item.entry.fragments
    assert isinstance(slices, Slices)
    return slices


def _follows(before: Extent, extent: Extent) -> bool:
    return before.file == extent.file and before.offset + before.length == extent.offset
