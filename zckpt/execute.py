"""Carry out a plan: fill every chunk of every target file from the source, and hash on the way.

One chunk (4 MiB) is gathered into an aligned buffer, hashed while it is in the cache, and written.
 Sources are read where they lie; pieces that follow each other in source and target are
one read, and ZeRO-3's small slices are one read per rank and then one 2-D copy per tensor: 74 ns
a slice, against 2,200 for a read and a write of each. numpy is imported only where that, a cast or
a strided tensor asks for it.

CRC-32 of every source record is compared with what its file states as soon as all of it passed by.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from . import plan
from .checksum import Cover, crc32
from .dtypes import SIZES
from .errors import CorruptCheckpoint
from .fileio import Buffer, Reader, Writer, files_per_thread
from .manifest import Entry, Extent, Fragment, Manifest, Record, Slices
from .plan import Chunk, Pair, Piece

CHUNK = 4 << 20  # bytes
MANY = 4096  # slices from which on numpy copies them faster than it is imported
SMALL = 64 << 10  # bytes; a slice below this is read together with its neighbours
LITTLE = 1 << 20  # bytes that are read for the sake of a record's CRC alone
CAST_BLOCK = 1 << 18  # elements that are cast at a time

Progress = Callable[[int], None]


@dataclass(slots=True)
class Outcome:
    """What a copy found out on the way.

    `digests` of the target's entries by name; `files` size and CRC-32 by path; `records` CRC-32 of
    the target's records, by extent, in the files that were filled; `unchecked` counts
    source records that were read but not compared: saved without a CRC, or only touched.
    """

    digests: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    records: dict[Extent, int] = field(default_factory=dict)
    bytes: int = 0
    checked: int = 0
    unchecked: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements [start, stop) of an entry, to be put at byte `at` of a buffer.

    `check` where these bytes count for their record's CRC: what is read twice counts once.
    """

    entry: Entry
    start: int
    stop: int
    at: int
    check: bool = True

    @property
    def end(self) -> int:
        return self.at + (self.stop - self.start) * SIZES[self.entry.dtype]


def chunk_size(dp: int, jobs: int, memory: int) -> int:
    """Bytes per chunk: more at a large dp, where each chunk is read from every rank.

    Every thread has two buffers of this size; `memory` bounds them all.
    """
    wanted = CHUNK * max(1, dp // 16)
    return max(1 << 20, min(wanted, memory // (2 * jobs)) >> 20 << 20)


class Ledger:
    """Which source records passed by, and whether they are what their files state."""

    def __init__(self, records: Sequence[Record]) -> None:
        by_file: dict[str, list[Record]] = {}
        for record in records:
            if record.extent.length:
                by_file.setdefault(record.extent.file, []).append(record)
        self._records = {
            file: sorted(held, key=lambda record: record.extent.offset)
            for file, held in by_file.items()
        }
        self._starts = {
            file: [record.extent.offset for record in held] for file, held in self._records.items()
        }
        self._covers: dict[Extent, tuple[Record, Cover]] = {}
        self._lock = threading.Lock()

    def passed(self, file: str, offset: int, data: memoryview) -> None:
        """`data` were read at `offset`; raises CorruptCheckpoint if a record turns out wrong."""
        starts = self._starts.get(file)
        if not starts:
            return
        end = offset + len(data)
        first = max(0, bisect_right(starts, offset) - 1)
        for record in self._records[file][first : bisect_left(starts, end)]:
            extent = record.extent
            start, stop = max(offset, extent.offset), min(end, extent.offset + extent.length)
            if start < stop:  # one read may pass over several records
                self._add(record, start - extent.offset, data[start - offset : stop - offset])

    def _add(self, record: Record, start: int, data: memoryview) -> None:
        extent = record.extent
        crc = crc32(data) if record.crc is not None else 0
        with self._lock:
            if extent not in self._covers:
                self._covers[extent] = record, Cover(extent.length)
            cover = self._covers[extent][1]
            cover.add(start, start + len(data), crc)
        if record.crc is not None and cover.crc not in (None, record.crc):
            raise CorruptCheckpoint(
                f"{extent.file} is damaged: the {extent.length} bytes at {extent.offset} do not "
                "have the CRC-32 that the file states",
                hint="take another copy of this file; nothing was written",
            )

    def finish(self, reader: Reader) -> tuple[int, int]:
        """Completes records of which little is missing (padding); counts checked and unchecked."""
        buffer = Buffer(LITTLE)
        checked = unchecked = 0
        for record, cover in list(self._covers.values()):
            gaps = cover.gaps()
            if gaps is None:  # tensors that overlap: only a reading of the whole can tell
                self._covers[record.extent] = record, Cover(record.extent.length)
                gaps = [(0, record.extent.length)]
            missing = sum(stop - start for start, stop in gaps)
            if record.crc is not None and missing <= max(cover.seen, LITTLE):
                for start, stop in gaps:
                    self._pass_range(reader, buffer.view, record.extent.part(start, stop))
                checked += 1
            else:
                unchecked += 1
        return checked, unchecked

    def _pass_range(self, reader: Reader, view: memoryview, extent: Extent) -> None:
        for start in range(0, extent.length, len(view)):
            part = extent.part(start, min(start + len(view), extent.length))
            reader.read(part, view[: part.length])
            self.passed(part.file, part.offset, view[: part.length])


class Gatherer:
    """Reads elements of entries into buffers, for one thread."""

    def __init__(self, reader: Reader, ledger: Ledger, memory: int) -> None:
        self.reader = reader
        self.ledger = ledger
        self.memory = memory
        self._scratch: Buffer | None = None
        self._block: Buffer | None = None

    def block(self) -> memoryview:
        """What is to be cast, in the source's type."""
        self._block = self._block or Buffer(CAST_BLOCK * 8)
        return self._block.view

    def scratch(self) -> memoryview:
        """Working memory, taken when first needed: many copies never do."""
        self._scratch = self._scratch or Buffer(self.memory)
        return self._scratch.view

    def read(self, extent: Extent, into: memoryview, check: bool) -> None:
        self.reader.read(extent, into)
        if check:
            self.ledger.passed(extent.file, extent.offset, into)

    def gather(self, wanted: Sequence[Wanted], view: memoryview) -> None:
        """Puts every wanted piece at its place in `view`."""
        # a read that may still grow, its place, and whether it is checked
        pending: tuple[Extent, int, bool] | None = None
        place = 0
        while place < len(wanted):
            batch = self._batch(wanted, place)
            if batch:
                self._gather_slices(batch, view)
                place += len(batch)
                continue
            item = wanted[place]
            place += 1
            size = SIZES[item.entry.dtype]
            for fragment in item.entry.fragments.overlapping(item.start, item.stop):
                if fragment.count > 1:
                    self._gather_runs(item, fragment, view)
                    continue
                start, stop = max(item.start, fragment.start), min(item.stop, fragment.stop)
                extent = fragment.extent.part(
                    (start - fragment.start) * size, (stop - fragment.start) * size
                )
                at = item.at + (start - item.start) * size
                if pending is None:
                    pending = extent, at, item.check
                    continue
                before, here, check = pending
                follows = _follows(before, extent) and here + before.length == at
                if follows and check == item.check:
                    joined = Extent(before.file, before.offset, before.length + extent.length)
                    pending = joined, here, check
                else:
                    self.read(before, view[here : here + before.length], check)
                    pending = extent, at, item.check
        if pending is not None:
            extent, at, check = pending
            self.read(extent, view[at : at + extent.length], check)

    def _batch(self, wanted: Sequence[Wanted], place: int) -> list[Wanted]:
        """Whole tensors from `place` on whose small slices follow each other on every rank.

        Tensors that a chunk's edge cuts are left out: their slices would be read twice.
        """
        found: list[Wanted] = []
        width = 0
        for item in islice(wanted, place, None):
            slices = item.entry.fragments
            if not isinstance(slices, Slices) or item.start or item.stop != slices.numel:
                break
            if slices.width * slices.size >= SMALL:
                break
            if found:
                last = _slices(found[-1])
                if slices.flats is not last.flats or slices.offset != last.offset + last.width:
                    break
                if item.check != found[-1].check:
                    break
            width += slices.width
            if width * slices.size * len(slices.flats) > self.memory:
                break
            found.append(item)
        return found

    def _gather_slices(self, batch: Sequence[Wanted], view: memoryview) -> None:
        """One read per rank for all tensors of the batch, then a 2-D copy for each."""
        first, last = _slices(batch[0]), _slices(batch[-1])
        size, begin = first.size, first.offset
        width = last.offset + last.width - begin
        ranks = max(len(item.entry.fragments) for item in batch)
        scratch = self.scratch()[: ranks * width * size]
        for rank in range(ranks):
            row = scratch[rank * width * size : (rank + 1) * width * size]
            part = first.flats[rank].part(begin * size, (begin + width) * size)
            self.read(part, row, batch[0].check)
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
        batch: Sequence[Wanted],
        scratch: memoryview,
        begin: int,
        width: int,
        view: memoryview,
    ) -> None:
        """The same for few slices, without numpy, whose import alone takes 150 ms."""
        for item in batch:
            size, first = _slices(item).size, _slices(item).offset - begin
            for rank, slice_ in enumerate(_slices(item)):
                start, stop = item.at + slice_.start * size, item.at + slice_.stop * size
                source = (rank * width + first) * size
                view[start:stop] = scratch[source : source + stop - start]

    def _gather_runs(self, item: Wanted, fragment: Fragment, view: memoryview) -> None:
        """The part of a strided fragment that the item wants, through working memory."""
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
            self.read(extent, scratch, item.check)
            runs = np.frombuffer(scratch, dtype=f"V{size}").reshape(end - begin, length)
            at = fragment.start + np.arange(begin, end)[:, None] * fragment.stride
            at = at + np.arange(length)[None, :] - item.start
            inside = (at >= 0) & (at < item.stop - item.start)
            target[at[inside]] = runs[inside]


def _slices(item: Wanted) -> Slices:
    slices = item.entry.fragments
    assert isinstance(slices, Slices)
    return slices


def _follows(before: Extent, extent: Extent) -> bool:
    return before.file == extent.file and before.offset + before.length == extent.offset


class _Target:
    """One file that is being filled: its writer, its records, how many chunks are to come."""

    def __init__(self, path: str, records: Sequence[Extent], io: str, chunk: int) -> None:
        self.path = path
        self.size = os.path.getsize(path)
        self.left = -(-self.size // chunk)
        self.cover = Cover(self.size)
        self.records = {extent: Cover(extent.length) for extent in records}
        self._listed = sorted(records, key=lambda extent: extent.offset)
        self._starts = [extent.offset for extent in self._listed]
        self.stack = ExitStack()
        self.writer = self.stack.enter_context(Writer(path, self.size, io))

    def edges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the file, cut where records begin and end."""
        here = start
        place = max(0, bisect_right(self._starts, start) - 1)
        for extent in self._listed[place:]:
            for edge in (extent.offset, extent.offset + extent.length):
                if here < edge < stop:
                    yield here, edge
                    here = edge
            if extent.offset >= stop:
                break
        if here < stop:
            yield here, stop

    def passed(self, start: int, stop: int, crc: int) -> None:
        """Bytes [start, stop), which lie in one record or between two, have this CRC."""
        self.cover.add(start, stop, crc)
        place = bisect_right(self._starts, start) - 1
        if place >= 0:
            extent = self._listed[place]
            first = start - extent.offset
            if first < extent.length:
                self.records[extent].add(first, stop - extent.offset, crc)


class _Copy:
    """One copy in progress, shared by its threads."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        source: Manifest,
        target: Manifest,
        chunk: int,
        io: str,
        progress: Progress | None,
    ) -> None:
        self.chunk = chunk
        self.io = io
        self.progress = progress
        self.ledger = Ledger(source.records)
        self.records: dict[str, list[Extent]] = {}
        for record in target.records:
            self.records.setdefault(record.extent.file, []).append(record.extent)
        self.outcome = Outcome()
        self.covers = {id(pair): Cover(pair.target.length) for pair in pairs}
        self.cast_covers = {
            pair.source.name: Cover(pair.source.length)
            for pair in pairs
            if pair.source.digest is not None and pair.source.dtype != pair.target.dtype
        }
        self.pairs = pairs
        first = {pair.source.name: id(pair) for pair in reversed(pairs)}
        self.checking = set(first.values())  # one pair per source entry
        self.lock = threading.Lock()
        self.targets: list[_Target] = []
        self.tasks = self._tasks()
        self.error: BaseException | None = None

    def _tasks(self) -> Iterator[tuple[_Target, Chunk]]:
        for file, pieces in plan.files(self.pairs):
            if not os.path.getsize(file):
                continue
            records = self.records.get(file, ())
            target = _Target(file, records, self.io, self.chunk)
            self.targets.append(target)
            for chunk in plan.chunks(file, target.size, pieces, self.chunk):
                yield target, chunk

    def work(self, keep_open: int) -> None:
        """What each thread does: take a chunk, fill it, until none is left or one failed."""
        reader = Reader(keep_open)
        try:
            gatherer = Gatherer(reader, self.ledger, self.chunk)
            buffer = Buffer(self.chunk)
            while True:
                with self.lock:
                    task = None if self.error else next(self.tasks, None)
                if task is None:
                    return
                self._fill(*task, gatherer, buffer.view)
        except BaseException as error:
            with self.lock:
                self.error = self.error or error
        finally:
            reader.close()

    def _fill(self, target: _Target, chunk: Chunk, gatherer: Gatherer, buffer: memoryview) -> None:
        view = buffer[: chunk.length]
        self._keep_shell(target, chunk, gatherer.reader, view)
        same = [
            Wanted(
                piece.pair.source,
                piece.start,
                piece.stop,
                piece.offset - chunk.offset,
                id(piece.pair) in self.checking,
            )
            for piece in chunk.pieces
            if piece.pair.source.dtype == piece.pair.target.dtype
        ]
        gatherer.gather(same, view)
        for piece in chunk.pieces:
            if piece.pair.source.dtype != piece.pair.target.dtype:
                self._cast(piece, piece.offset - chunk.offset, gatherer, view)
        self._hash(target, chunk, view)
        target.writer.write(buffer, chunk.length, chunk.offset)
        with self.lock:
            self.outcome.bytes += chunk.length
            target.left -= 1
            done = not target.left
        if self.progress:
            self.progress(chunk.length)
        if done:
            target.stack.close()

    def _keep_shell(self, target: _Target, chunk: Chunk, reader: Reader, view: memoryview) -> None:
        """What lies between tensors (headers) is in the file already."""
        here = chunk.offset
        for start, stop in (
            *((piece.offset, piece.end) for piece in chunk.pieces),
            (chunk.offset + chunk.length, 0),
        ):
            if start > here:
                part = view[here - chunk.offset : start - chunk.offset]
                reader.read(Extent(target.path, here, start - here), part)
            here = max(here, stop)

    def _cast(self, piece: Piece, at: int, gatherer: Gatherer, view: memoryview) -> None:
        from .cast import cast

        source, to = piece.pair.source, piece.pair.target
        size, cast_size = SIZES[source.dtype], SIZES[to.dtype]
        block = gatherer.block()
        for start in range(piece.start, piece.stop, CAST_BLOCK):
            stop = min(start + CAST_BLOCK, piece.stop)
            held = block[: (stop - start) * size]
            check = id(piece.pair) in self.checking
            gatherer.gather([Wanted(source, start, stop, 0, check)], held)
            if source.name in self.cast_covers:
                crc = crc32(held)
                with self.lock:
                    self.cast_covers[source.name].add(start * size, stop * size, crc)
            into = at + (start - piece.start) * cast_size
            cast(held, source.dtype, view[into : into + (stop - start) * cast_size], to.dtype)

    def _hash(self, target: _Target, chunk: Chunk, view: memoryview) -> None:
        """CRCs of the chunk's pieces and gaps: for tensors, for records, for the file."""
        here = chunk.offset
        found: list[tuple[int, int, Piece | None]] = []
        for piece in chunk.pieces:
            found += [(*gap, None) for gap in target.edges(here, piece.offset)]
            found.append((piece.offset, piece.end, piece))
            here = piece.end
        found += [(*gap, None) for gap in target.edges(here, chunk.offset + chunk.length)]
        crcs = [crc32(view[a - chunk.offset : b - chunk.offset]) for a, b, _ in found]
        with self.lock:
            for (start, stop, own), crc in zip(found, crcs, strict=True):
                target.passed(start, stop, crc)
                if own is not None:
                    size = SIZES[own.pair.target.dtype]
                    self.covers[id(own.pair)].add(own.start * size, own.stop * size, crc)

    def close(self, error: BaseException) -> None:
        """Closes what a failure left open, without another sync, whose failure would hide it."""
        for target in self.targets:
            target.stack.__exit__(type(error), error, error.__traceback__)

    def finish(self) -> Outcome:
        """Checks the rest of the records and the source's digests; raises CorruptCheckpoint."""
        reader = Reader()
        try:
            self.outcome.checked, self.outcome.unchecked = self.ledger.finish(reader)
        finally:
            reader.close()
        for target in self.targets:
            crc = target.cover.crc
            assert crc is not None, target.path
            self.outcome.files[target.path] = target.size, crc
            for extent, cover in target.records.items():
                assert cover.crc is not None, extent
                self.outcome.records[extent] = cover.crc
        for pair in self.pairs:
            crc = self.covers[id(pair)].crc
            assert crc is not None, pair.target.name
            self.outcome.digests[pair.target.name] = crc
            cast_cover = self.cast_covers.get(pair.source.name)
            found = crc if cast_cover is None else cast_cover.crc
            if pair.source.digest not in (None, found):
                raise CorruptCheckpoint(
                    f"{pair.source.name} is damaged: its CRC-32 is not the manifest's",
                    hint="take another copy of the source; nothing was written",
                )
        return self.outcome


def copy(
    pairs: Sequence[Pair],
    source: Manifest,
    target: Manifest,
    *,
    jobs: int = 4,
    memory: int = 256 << 20,
    io: str = "auto",
    progress: Progress | None = None,
) -> Outcome:
    """Fills the target's files, which exist with their final sizes, from the source.

    `jobs` threads; `memory` bytes bound their buffers. Raises CorruptCheckpoint where the source's
    bytes are not what its files state, and OSError (a full disk).
    """
    chunk = chunk_size(source.dp, jobs, memory)
    running = _Copy(pairs, source, target, chunk, io, progress)
    keep_open = files_per_thread(jobs)
    threads = [
        threading.Thread(target=running.work, args=(keep_open,), name=f"zckpt-{place}")
        for place in range(jobs)
    ]
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # a limit of memory or processes: go on with fewer
                if threads[0].ident is None:
                    raise
                break
        _join(threads)
    except BaseException as error:  # Ctrl-C: let the threads end their chunks
        running.error = error
        _join(threads)
    if running.error:
        running.close(running.error)
        raise running.error
    return running.finish()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()
