"""Fills the files of a target from a source, chunk by chunk (2 MiB).

`assembling` puts the bytes into an aligned buffer, which is written. At most as many threads
assemble as there are processors, but at least two; other threads write meanwhile. A region is a
byte range of a file: several consecutive chunks. When all its chunks are written, the file is
synced, and the region is recorded in the journal with the CRC-32s of its parts. A later run reads
the journal and skips the region.

Files that are copied unchanged have regions too, and so have tensors that are compared meanwhile,
such as masters with their weights (`comparing`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec import Struct

from ..core.checkpoint.manifest import Manifest
from ..core.comparison.compare import Buffers
from ..core.grouping import by_key
from ..core.passes import plan
from ..core.passes.full_checks import Differing, FullCheck
from ..core.passes.layout import CopyOutcome
from ..core.passes.pieces import ElementReader
from ..core.passes.plan import Chunk, Pair
from ..core.passes.resources import Copying, Progress, describe, processors
from ..core.passes.streaming import carry_out_all, chunk_size, finish, in_turns, stream
from ..core.storage.checksum import Cover, Scattered
from ..core.storage.fileio import Buffer, is_small
from ..core.storage.folder import Folder
from ..core.storage.fragments import Extent, Fragments, Runs, Slices
from ..core.storage.records import PassedRecord, RecordChecker
from ..errors import RESTORABLE, CorruptCheckpoint
from .assembling import SOURCE, TENSOR, Assembler
from .comparing import DIFFERS, ComparedPart, buffers_for, differing, rows_of
from .filling import FILE, RECORD, Sums, TargetFile, UnfinishedRegion
from .journal import Journal, Key, Passed, Region
from .sharing import Portion, Sharing

# bytes; the least working memory for slices of small tensors that a thread reads together
SLICES = 512 << 10
UNSYNCED = 64  # small files that are kept open until they are synced together
CHECKED = "checked"
"""The kind of a CRC-32 of bytes of a source record (a byte range with a checksum in the file)."""

Task = tuple[TargetFile, Chunk] | ComparedPart


class _Copy(Struct, eq=False, dict=True):
    """A copy in progress, which the threads of this process share."""

    pairs: Sequence[Pair]
    source: Manifest
    target: Manifest
    root: Folder
    chunk: int
    jobs: int
    io: str
    progress: Progress | None
    journal: Journal | None
    sharing: Sharing
    tensors: int
    has_digests: bool
    checks: Sequence[FullCheck]
    room: int  # bytes of a thread's buffers for tensors that are compared

    def __post_init__(self) -> None:
        self.rows = rows_of(self.checks, self.room)
        self.differing = {name: dict[int, Differing]() for name in self.rows}
        pairs, self.source_records = self.pairs, self.source.files.records
        self.checker = RecordChecker(
            self.source_records, fingerprints=self.source.files.fingerprints
        )
        self.records = by_key(
            (record.extent.file, record.extent) for record in self.target.files.records
        )
        self.outcome = CopyOutcome()
        self.sums = Sums()
        self.lengths = [pair.target.length for pair in pairs]  # bytes
        # the pairs whose CRC-32 is needed
        self.numbers = {
            id(pair): number
            for number, pair in enumerate(pairs[: self.tensors])
            if self.has_digests or pair.source.digest is not None
        }
        self.scattered = scattered(pairs)
        # tensors of the source that are hashed before they are cast
        self.cast = {
            number
            for number, pair in enumerate(pairs)
            if pair.source.digest is not None and pair.source.dtype != pair.target.dtype
        }
        self.checking = counted(pairs, self.checker)
        self.lock = threading.Lock()
        # more threads would make handing over Python's lock slower: in a copy into files of 64
        # ranks, on two processors, four threads took a tenth longer
        self.assembling = threading.Semaphore(max(2, processors()))
        self.targets: dict[str, TargetFile] = {}
        self.in_order: list[TargetFile] = []  # by number
        self.complete: set[tuple[str, int]] = set()  # files, and where their regions start
        self.unsynced: list[tuple[TargetFile, Region]] = []  # small files
        paths, pieces_of = plan.files(pairs)
        self.pieces_of = lru_cache(self.jobs)(pieces_of)
        for path in paths:
            self._add_target(path)
        for name in self.rows:
            self._skip(name)
        portions = self.sharing.mine([*self.portions()], self.progress)
        self.tasks = in_turns(map(self._tasks, portions), self.jobs)

    def _add_target(self, path: str) -> None:
        name = self.root.name_of(path)
        if not (size := self.root.size(path)):
            return
        number, records = len(self.targets), self.records.get(path, ())
        target = TargetFile(number, self.root, name, size, records, self.chunk)
        self.targets[name] = target
        self.in_order.append(target)
        self._skip(name)

    def _skip(self, name: str) -> None:
        """Skips the regions of a file that the journal of an earlier run lists as complete."""
        for region in self.take(self.journal.regions.get(name, ()) if self.journal else ()):
            if self.progress:
                self.progress(region.stop - region.start)

    def _tasks(self, portions: Sequence[Portion]) -> Iterator[Task]:
        """Yields the tasks for portions of one file: chunks to copy, or tensors to compare."""
        if row := self.rows.get(portions[0].file):
            describe(self.progress, row.check.about)
            yield from row.parts(portions)
            return
        target = self.targets[portions[0].file]
        pieces = self.pieces_of(target.path)
        position = f"{target.number + 1} of {len(self.targets)} files"
        describe(self.progress, f"writing {os.path.basename(target.path)}, {position}")
        for portion in portions:
            target.open(self.io)
            within = portion.start, portion.stop
            for chunk in plan.chunks(target.path, within, pieces, self.chunk):
                yield target, chunk

    def portions(self) -> Iterator[Portion]:
        for row in self.rows.values():
            yield from row.portions(self.complete)
        for name, target in self.targets.items():
            for region in target.regions:
                is_complete = (name, region.start) in self.complete
                yield Portion(name, region.start, region.stop, is_complete)

    def take(self, regions: Iterable[Region]) -> list[Region]:
        """Counts regions as complete that an earlier run or another process has written.

        Adds the regions' CRC-32s to the target's CRC-32s. Returns the regions that were not counted
        before.
        """
        taken = []
        for region in regions:
            if (region.file, region.start) in self.complete:
                continue
            self.complete.add((region.file, region.start))
            self._count(region.passed)
            for key, start, stop, crc in region.passed:
                if key[0] == CHECKED:
                    self.checker.passed_before(key[1], start, stop, crc)
            self._take_differing(region)
            taken.append(region)
        return taken

    def _count(self, passed: Iterable[Passed]) -> None:
        """Adds the CRC-32s of written parts to those of the target's tensors, files and records.

        A record is a byte range with a checksum. CRC-32s of the source's records are left out,
        since the checker already has them.
        """
        with self.lock:
            crcs_of_targets = (part for part in passed if part[0][0] not in (CHECKED, DIFFERS))
            self.sums.add(crcs_of_targets, self._cover_of)

    def _length_of(self, key: Key) -> int:
        """The length in bytes of the tensor, file or record that `key` identifies."""
        kind, number, place = key
        if kind == TENSOR:
            return self.lengths[number]
        if kind == SOURCE:
            return self.pairs[number].source.length
        target = self.in_order[number]
        return target.size if kind == FILE else target.records[place].length

    def _cover_of(self, key: Key) -> Cover | Scattered:
        kind, number, _ = key
        if kind == CHECKED:
            return Cover(self.source_records[number].extent.length)
        is_scattered = kind in (TENSOR, SOURCE) and number in self.scattered
        return (Scattered if is_scattered else Cover)(self._length_of(key))

    def start(self, element_readers: Sequence[ElementReader]) -> Callable[[Task], None]:
        """Allocates one thread's buffers; returns the function that runs a task."""
        (element_reader,) = element_readers
        element_reader.passed = [] if self.journal else None
        assembler = Assembler(element_reader, self.numbers, self.checking, self.cast)
        buffer = Buffer(self.chunk)
        buffers = buffers_for(self.rows, self.room)

        def carry_out(task: Task) -> None:
            if isinstance(task, ComparedPart):
                assert buffers is not None
                self._compare(task, element_reader, buffers)
                return
            target, chunk = task
            with self.assembling:
                passed = assembler.assemble(target, chunk, buffer.view[: chunk.length])
            self.sharing.check()
            target.writer.write(buffer.view, chunk.length, chunk.offset)
            if complete := self._written(target, chunk, passed, element_reader.passed):
                self._complete(target, complete)

        return carry_out

    def _compare(self, part: ComparedPart, reader: ElementReader, buffers: Buffers) -> None:
        """Compares one part of two tensors.

        After the last part of a region, records in the journal that the region was compared.
        """
        with self.assembling:
            difference = part.row.compare(part, reader, buffers)
        self.sharing.check()
        with self.lock:
            region = part.row.compared(part, difference)
        if self.progress:
            self.progress(part.length)
        if region:
            if noted := differing(region.passed):
                part.row.check.refuse(noted)
            self._note(region)

    def _written(
        self,
        target: TargetFile,
        chunk: Chunk,
        passed: Sequence[Passed],
        log: list[PassedRecord] | None,
    ) -> UnfinishedRegion | None:
        """Counts a chunk as written; returns its region if all chunks of the region are written.

        `log` lists the parts of source records that were read for the chunk.
        """
        region = target.regions[chunk.offset // target.width]
        with self.lock:
            self.outcome.bytes += chunk.length
            region.sums.add(passed, self._cover_of)
            if log is not None:
                region.sums.add(self._checked(log), self._cover_of)
            region.left -= 1
            is_complete = not region.left
        if self.progress:
            self.progress(chunk.length)
        return region if is_complete else None

    def _complete(self, target: TargetFile, written: UnfinishedRegion) -> None:
        """Syncs a complete region and records it in the journal.

        Small files are collected and synced together later.
        """
        region = Region(target.name, written.start, written.stop, written.sums.take())
        self._count(region.passed)
        if not is_small(target.size):
            self._sync((target, region))
            return
        with self.lock:
            self.unsynced.append((target, region))
            is_enough = len(self.unsynced) >= UNSYNCED
        if is_enough:
            self.sync_small_files()

    def sync_small_files(self) -> None:
        with self.lock:
            complete, self.unsynced = self.unsynced, []
        carry_out_all(complete, self._sync)

    def _sync(self, complete: tuple[TargetFile, Region]) -> None:
        target, region = complete
        target.close()
        self._note(region)

    def _note(self, region: Region) -> None:
        with self.lock:
            self.complete.add((region.file, region.start))
            self._take_differing(region)
        if self.journal:
            self.journal.add(region)

    def _take_differing(self, region: Region) -> None:
        known = self.differing.get(region.file, {})
        for number, difference in differing(region.passed).items():
            known[number] = difference.with_more(known.get(number))

    def _checked(self, log: list[PassedRecord]) -> Iterator[Passed]:
        """Yields the CRC-32s in `log` in the form of the journal, and empties `log`.

        They belong to parts of the source's records: byte ranges with a checksum.
        """
        for number, start, stop, crc in log:
            yield (CHECKED, number, 0), start, stop, crc
        log.clear()

    def close(self, error: BaseException) -> None:
        """Closes files after a failure, without a sync: its error would hide the first one."""
        for target in self.targets.values():
            target.stack.__exit__(type(error), error, error.__traceback__)

    def finish(self) -> CopyOutcome:
        """Compares the source's remaining checksums; returns the results of the copy.

        Raises CorruptCheckpoint.
        """
        for target in self.targets.values():
            self.outcome.files[target.path] = target.size, self._crc((FILE, target.number, 0))
            for place, extent in enumerate(target.records):
                self.outcome.records[extent] = self._crc((RECORD, target.number, place))
        for number in self.numbers.values():
            pair, crc = self.pairs[number], self._crc((TENSOR, number, 0))
            self.outcome.digests.setdefault(pair.rank, {})[pair.target.key] = crc
            if (stated_crc := pair.source.digest) is None:
                continue
            if stated_crc != (self._crc((SOURCE, number, 0)) if number in self.cast else crc):
                raise CorruptCheckpoint(
                    "record-damaged",
                    f"{pair.source.name} is damaged: its bytes do not have the CRC-32 that the "
                    "manifest states",
                    hint=RESTORABLE,
                )
        self.outcome.tensors = len(
            {(pair.rank, pair.target.key) for pair in self.pairs[: self.tensors]}
        )
        by_check = {id(row.check): self.differing[name] for name, row in self.rows.items()}
        self.outcome.differing = [by_check.get(id(check), {}) for check in self.checks]
        self.outcome.counts = finish([self.checker])
        return self.outcome

    def _crc(self, key: Key) -> int:
        crc = self.sums.crc(key, self._length_of(key))
        assert crc is not None, key
        return crc


def scattered(pairs: Sequence[Pair]) -> set[int]:
    """The indices of pairs whose target tensor is cut along another axis than the first.

    A pair is a tensor of the target and the tensor of the source that fills it.
    """
    return {number for number, pair in enumerate(pairs) if not _is_in_order(pair.target.fragments)}


def counted(pairs: Sequence[Pair], checker: RecordChecker) -> set[int]:
    """Selects the pairs whose bytes are hashed to compare them with the source's checksums.

    A pair is a tensor of the target and the tensor of the source that fills it. Returns the pairs'
    Python `id`s. A source tensor without a selected pair is read and hashed by `checker` at the
    end.
    """
    # by the identity of a tensor's fragments, since model ranks may have tensors of equal names;
    # a source tensor is hashed only once, even if it fills several target tensors
    first: dict[int, int] = {}
    # fragments of these target tensors are not consecutive bytes of the tensor
    cut = scattered(pairs)
    for number, pair in enumerate(pairs):
        if number not in cut:
            first.setdefault(id(pair.source.fragments), id(pair))
    for pair in pairs:
        if id(pair.source.fragments) not in first:
            for fragment in pair.source.fragments:
                checker.require(fragment.extent)
    for flat in _flats_cut_otherwise(pairs):
        checker.require(flat)
    return set(first.values())


def _is_in_order(fragments: Fragments) -> bool:
    """Whether only the first axis is cut, so that each fragment has consecutive elements."""
    return isinstance(fragments, (Runs, Slices))


def _flats_cut_otherwise(pairs: Iterable[Pair]) -> Iterator[Extent]:
    """Finds flat buffers of the source whose tensors are in flat buffers of the target too.

    The target's ranks cut these tensors at other elements. So some bytes of a source buffer may be
    read for two ranks, and its padding for none.
    """
    # by the identity of the flat buffers: the slices that extend into most of them
    longest: dict[int, Slices] = {}
    for pair in pairs:
        source, target = pair.source.fragments, pair.target.fragments
        if type(source) is Slices and type(target) is Slices:
            longest_so_far = longest.setdefault(id(source.flats), source)
            if len(source) > len(longest_so_far):
                longest[id(source.flats)] = source
    for slices in longest.values():
        yield from slices.flats[: len(slices)]


def copy(
    pairs: Sequence[Pair],
    source: Manifest,
    target: Manifest,
    root: Folder,
    copying: Copying,
    progress: Progress | None,
    journal: Journal | None,
    sharing: Sharing,
    beside: Sequence[Pair] = (),
    checks: Sequence[FullCheck] = (),
    has_digests: bool = True,
) -> CopyOutcome | None:
    """Fills the target's files in `root`, which have their final sizes, from the source.

        journal        regions that it lists are skipped: an earlier run has written them
        sharing        may assign some regions to other processes
        beside         files that are copied unchanged
        checks         tensors to compare meanwhile
        has_digests    whether to compute a CRC-32 of each tensor, even if the source states none

    Returns None if this process is not the one that completes the target. Raises CorruptCheckpoint
    if a checksum of the source is wrong, OSError, and the errors of `checks`.
    """
    chunk = chunk_size(source.dp, copying.jobs, copying.memory)
    jobs = copying.jobs
    if journal and journal.chunk:  # an earlier run may have been given more memory
        chunk = journal.chunk
        jobs = max(1, min(jobs, copying.memory // (2 * chunk)))
    about = root, chunk, jobs, copying.io, progress, journal, sharing
    compared = checks, chunk // 4 * 3
    running = _Copy([*pairs, *beside], source, target, *about, len(pairs), has_digests, *compared)
    try:
        slices = min(chunk, max(SLICES, chunk // 4))
        stream(running.tasks, jobs, [running.checker], slices, running.start)
        running.sync_small_files()
    except BaseException as error:
        running.close(error)
        raise
    regions = sharing.regions_of_others(journal) if journal else ()
    if regions is None:
        return None
    running.take(regions)
    if not all(portion.is_complete for portion in running.portions()):
        return None
    return running.finish()
