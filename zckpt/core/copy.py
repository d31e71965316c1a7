"""How does a copy fill the files of a target from a source?

Chunk by chunk (4 MiB): elements are read into an aligned buffer, hashed while they are in the
processor's cache, and written. A region is some chunks that follow each other. When all of them are
written, the file is synced, and the region goes into the journal with the CRC-32s of its parts. A
later run takes these and skips the region.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..errors import CorruptCheckpoint
from . import plan
from .checksum import Cover, Scattered, crc32, crc_of_runs
from .dtypes import SIZES
from .fileio import Buffer, Reader
from .filling import FILE, RECORD, TargetFile, UnfinishedRegion
from .fragments import Extent, Record, Runs, Slices
from .journal import Journal, Key, Passed, Region
from .manifest import Entry, Manifest
from .pieces import CAST_BLOCK, SMALL, ElementReader, ReadRequest, RecordChecker
from .plan import Chunk, Pair, TargetPiece
from .resources import DEFAULT_COPYING, Copying, Progress, describe
from .streaming import chunk_size, finish, stream

# of what a CRC-32 is, beside files and records of the target: a tensor of the target, a tensor of
# the source before it is cast, a record of the source
TENSOR, SOURCE, CHECKED = "tensor", "source", "checked"


@dataclass(slots=True)
class CopyOutcome:
    """What a copy knows in the end.

    `digests` are those of the target's entries, by name. `files` are sizes and CRC-32s, by path.
    `records` are the CRC-32s of the target's records in the files that were filled, by extent.
    `checked` and `unchecked` count source records. A record stays unchecked if it was saved without
    a CRC (`bare` counts these), or if only a small part of it was read.
    """

    digests: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    records: dict[Extent, int] = field(default_factory=dict)
    bytes: int = 0
    checked: int = 0
    unchecked: int = 0
    bare: int = 0


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
        journal: Journal | None,
    ) -> None:
        self.chunk = chunk
        self.io = io
        self.progress = progress
        self.journal = journal
        self.source_records = source.records
        self.record_numbers = {id(record): n for n, record in enumerate(source.records)}
        self.checker = RecordChecker(source.records, fingerprints=source.fingerprints)
        self.records: dict[str, list[Extent]] = {}
        for record in target.records:
            self.records.setdefault(record.extent.file, []).append(record.extent)
        self.outcome = CopyOutcome()
        in_order = [pair for pair in pairs if _is_in_order(pair)]
        ordered = {id(pair) for pair in in_order}
        self.covers: dict[Key, Cover | Scattered] = {}
        self.numbers: dict[int, int] = {}  # by the identity of a pair
        for number, pair in enumerate(pairs):
            self.numbers[id(pair)] = number
            kind = Cover if id(pair) in ordered else Scattered
            self.covers[TENSOR, number, 0] = kind(pair.target.length)
            if pair.source.digest is not None and pair.source.dtype != pair.target.dtype:
                self.covers[SOURCE, number, 0] = kind(pair.source.length)
        self.pairs = pairs
        # one pair per source entry counts for its records; the records of tensors that all targets
        # cut along inner axes are read once more in the end
        first = {pair.source.name: id(pair) for pair in reversed(in_order)}
        self.checking = set(first.values())
        for pair in pairs:
            if pair.source.name not in first:
                for fragment in pair.source.fragments:
                    self.checker.require(fragment.extent)
        self.lock = threading.Lock()
        self.targets: list[TargetFile] = []
        self.tasks = self._tasks()

    def _tasks(self) -> Iterator[tuple[TargetFile, Chunk]]:
        files, pieces_of = plan.files(self.pairs)
        for number, file in enumerate(files):
            if not os.path.getsize(file):
                continue
            name = os.path.relpath(file, self.journal.root) if self.journal else file
            target = TargetFile(number, file, name, self.records.get(file, ()), self.chunk)
            self.covers.update(target.covers())
            complete = self._complete_regions(target)
            self.targets.append(target)
            if not target.left:
                continue
            target.open(self.io)
            what = f"writing {os.path.basename(file)}, {number + 1} of {len(files)} files"
            describe(self.progress, what)
            for chunk in plan.chunks(file, target.size, pieces_of(file), self.chunk):
                if target.region_at(chunk.offset).start not in complete:
                    yield target, chunk

    def _complete_regions(self, target: TargetFile) -> set[int]:
        """Where regions start that an earlier run has written; takes the CRC-32s that they gave."""
        complete: set[int] = set()
        for region in self.journal.regions.get(target.name, ()) if self.journal else ():
            if region.start in complete:
                continue
            complete.add(region.start)
            target.left -= 1
            self._count(region.passed)
            for key, start, stop, crc in region.passed:
                if key[0] == CHECKED:
                    self.checker.passed_before(self.source_records[key[1]], start, stop, crc)
            if self.progress:
                self.progress(region.stop - region.start)
        return complete

    def _count(self, passed: Iterable[Passed]) -> None:
        """Takes the CRC-32s of a region; the checker has those of source records already."""
        with self.lock:
            for key, start, stop, crc in passed:
                if key[0] != CHECKED:
                    self.covers[key].add(start, stop, crc)

    def start(
        self, element_readers: Sequence[ElementReader]
    ) -> Callable[[tuple[TargetFile, Chunk]], None]:
        """One thread's buffer, and the function that fills a chunk."""
        (element_reader,) = element_readers
        element_reader.passed = [] if self.journal else None
        buffer = Buffer(self.chunk)
        return lambda task: self._fill(*task, element_reader, buffer.view)

    def _fill(
        self, target: TargetFile, chunk: Chunk, element_reader: ElementReader, buffer: memoryview
    ) -> None:
        view = buffer[: chunk.length]
        passed: list[Passed] = []
        self._keep_shell(target, chunk, element_reader.reader, view)
        same: list[ReadRequest] = []
        for piece in chain.from_iterable(map(_parts, chunk.pieces)):
            source, at = piece.pair.source, piece.offset - chunk.offset
            if piece.count > 1:
                passed += self._fill_runs(piece, at, element_reader, view)
            elif source.dtype != piece.pair.target.dtype:
                passed += self._cast(piece, at, element_reader, view)
            else:
                check = id(piece.pair) in self.checking
                same.append(ReadRequest(source, piece.start, piece.stop, at, check))
        element_reader.read(same, view)
        passed += self._hash(target, chunk, view)
        target.writer.write(buffer, chunk.length, chunk.offset)
        region = target.region_at(chunk.offset)
        with self.lock:
            self.outcome.bytes += chunk.length
            region.add(passed, self.covers)
            if element_reader.passed is not None:
                region.add(self._checked(element_reader.passed), self.covers)
            region.left -= 1
            is_complete = not region.left
        if self.progress:
            self.progress(chunk.length)
        if is_complete:
            self._complete(target, region)

    def _complete(self, target: TargetFile, region: UnfinishedRegion) -> None:
        """Syncs a region and notes it; closes the file after its last one."""
        single = len(target.regions) == 1
        if self.journal and not single:
            target.writer.sync()
        passed = region.passed
        self._count(passed)
        with self.lock:
            target.left -= 1
            is_last = not target.left
        if is_last:
            target.stack.close()
        if self.journal:
            self.journal.add(Region(target.name, region.start, region.stop, passed))

    def _checked(self, log: list[tuple[Record, int, int, int]]) -> Iterator[Passed]:
        """The parts of source records that a thread has read since the last call."""
        for record, start, stop, crc in log:
            yield (CHECKED, self.record_numbers[id(record)], 0), start, stop, crc
        log.clear()

    def _keep_shell(
        self, target: TargetFile, chunk: Chunk, reader: Reader, view: memoryview
    ) -> None:
        """Reads what the file holds already between tensors (headers)."""
        offset = chunk.offset
        for start, stop in (
            *((piece.offset, piece.end) for piece in chunk.pieces),
            (chunk.offset + chunk.length, 0),
        ):
            if start > offset:
                part = view[offset - chunk.offset : start - chunk.offset]
                reader.read(Extent(target.path, offset, start - offset), part)
            offset = max(offset, stop)

    def _cast(
        self, piece: TargetPiece, at: int, element_reader: ElementReader, view: memoryview
    ) -> list[Passed]:
        source, key = piece.pair.source, (SOURCE, self.numbers[id(piece.pair)], 0)
        size, check = SIZES[source.dtype], id(piece.pair) in self.checking
        passed: list[Passed] = []

        def count(start: int, stop: int, elements: memoryview) -> None:
            passed.append((key, start * size, stop * size, crc32(elements)))

        request = ReadRequest(source, piece.start, piece.stop, at, check)
        dtype = piece.pair.target.dtype
        element_reader.read_as(dtype, request, view, count if key in self.covers else None)
        return passed

    def _fill_runs(
        self, piece: TargetPiece, at: int, element_reader: ElementReader, view: memoryview
    ) -> list[Passed]:
        """Fills runs at a stride: reads the rows that they are cut from, then copies the runs."""
        import numpy as np

        from .cast import cast

        source, target = piece.pair.source, piece.pair.target
        size, length, stride = SIZES[source.dtype], piece.stop - piece.start, piece.stride
        block = element_reader.block()
        most = max(1, min(CAST_BLOCK, len(block) // size) // stride)
        key, passed = (SOURCE, self.numbers[id(piece.pair)], 0), []
        for first in range(0, piece.count, most):
            count = min(most, piece.count - first)
            start = piece.start + first * stride
            stop = start + (count - 1) * stride + length
            element_reader.read(
                [ReadRequest(source, start, stop, 0, False)], block[: (stop - start) * size]
            )
            rows = np.frombuffer(block, f"u{size}", count * stride).reshape(count, stride)
            runs = np.ascontiguousarray(rows[:, :length]).data.cast("B")
            begin = at + first * length * SIZES[target.dtype]
            into = view[begin : begin + count * length * SIZES[target.dtype]]
            if source.dtype == target.dtype:
                into[:] = runs
                continue
            cast(runs, source.dtype, into, target.dtype)
            if key in self.covers:
                passed.append(_passed_runs(key, source, piece, runs, stop))
        return passed

    def _hash(self, target: TargetFile, chunk: Chunk, view: memoryview) -> list[Passed]:
        """The CRCs of the chunk's pieces and gaps: for tensors, records and the file."""
        offset = chunk.offset
        ranges: list[tuple[int, int, TargetPiece | None]] = []
        for piece in chunk.pieces:
            ranges += [(*gap, None) for gap in target.edges(offset, piece.offset)]
            ranges.append((piece.offset, piece.end, piece))
            offset = piece.end
        ranges += [(*gap, None) for gap in target.edges(offset, chunk.offset + chunk.length)]
        crcs = [crc32(view[a - chunk.offset : b - chunk.offset]) for a, b, _ in ranges]
        passed: list[Passed] = []
        for (start, stop, own), crc in zip(ranges, crcs, strict=True):
            passed += target.passed(start, stop, crc)
            if own is None:
                continue
            entry, key = own.pair.target, (TENSOR, self.numbers[id(own.pair)], 0)
            if own.count > 1:
                runs = view[start - chunk.offset : stop - chunk.offset]
                last = own.stop + (own.count - 1) * own.stride
                passed.append(_passed_runs(key, entry, own, runs, last))
            else:
                size = SIZES[entry.dtype]
                passed.append((key, own.start * size, own.stop * size, crc))
        return passed

    def close(self, error: BaseException) -> None:
        """Closes files after a failure, without a sync, whose own failure would hide the first."""
        for target in self.targets:
            target.stack.__exit__(type(error), error, error.__traceback__)

    def finish(self) -> CopyOutcome:
        """Checks the rest of the records and the source's digests; raises CorruptCheckpoint."""
        for target in self.targets:
            self.outcome.files[target.path] = target.size, self._crc((FILE, target.number, 0))
            for place, extent in enumerate(target.records):
                self.outcome.records[extent] = self._crc((RECORD, target.number, place))
        for number, pair in enumerate(self.pairs):
            crc = self._crc((TENSOR, number, 0))
            self.outcome.digests[pair.target.name] = crc
            is_cast = (SOURCE, number, 0) in self.covers
            source_crc = self._crc((SOURCE, number, 0)) if is_cast else crc
            if pair.source.digest not in (None, source_crc):
                raise CorruptCheckpoint(
                    f"{pair.source.name} is damaged: its CRC-32 is not the manifest's",
                    hint="take another copy of the source; nothing was written",
                )
        self.outcome.checked, self.outcome.unchecked = finish([self.checker])
        self.outcome.bare = self.checker.bare
        return self.outcome

    def _crc(self, key: Key) -> int:
        crc = self.covers[key].crc
        assert crc is not None, key
        return crc


def _passed_runs(key: Key, entry: Entry, piece: TargetPiece, runs: memoryview, stop: int) -> Passed:
    """What runs of a piece give to the CRC of `entry`; the last one ends at its element `stop`."""
    size = SIZES[entry.dtype]
    crc = crc_of_runs(runs, (piece.stop - piece.start) * size, piece.stride * size)
    return key, stop * size - len(runs), stop * size, crc


def _is_in_order(pair: Pair) -> bool:
    """Whether the target's fragments are single runs; False if a tensor is cut along inner axes."""
    return isinstance(pair.target.fragments, (Runs, Slices))


def _parts(piece: TargetPiece) -> Iterable[TargetPiece]:
    """The piece itself if its runs are near each other, else each of its runs as a piece."""
    near = piece.stride * SIZES[piece.pair.source.dtype] < SMALL
    return [piece] if near or piece.count == 1 else piece.runs()


def copy(
    pairs: Sequence[Pair],
    source: Manifest,
    target: Manifest,
    copying: Copying = DEFAULT_COPYING,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> CopyOutcome:
    """Fills the target's files from the source; they exist already, with their final sizes.

    Regions that `journal` lists are not written again. Raises CorruptCheckpoint if bytes of the
    source do not have the CRC-32 that its files state, or OSError (a full disk).
    """
    chunk = chunk_size(source.dp, copying.jobs, copying.memory)
    jobs = copying.jobs
    if journal and journal.chunk:  # an earlier run may have been given more memory
        chunk = journal.chunk
        jobs = max(1, min(jobs, copying.memory // (2 * chunk)))
    running = _Copy(pairs, source, target, chunk, copying.io, progress, journal)
    try:
        stream(running.tasks, jobs, [running.checker], chunk, running.start)
    except BaseException as error:
        running.close(error)
        raise
    return running.finish()
