"""How does a copy fill the files of a target from a source?

Chunk by chunk (4 MiB): elements are read into an aligned buffer, hashed while they are in the
processor's cache, and written.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

from ..errors import CorruptCheckpoint
from . import plan
from .checksum import Cover, Scattered, crc32, crc_of_runs
from .dtypes import SIZES
from .fileio import Buffer, Reader, Writer
from .fragments import Extent, Runs, Slices
from .manifest import Manifest
from .pieces import CAST_BLOCK, SMALL, ElementReader, ReadRequest, RecordChecker
from .plan import Chunk, Pair, TargetPiece
from .resources import DEFAULT_COPYING, Copying, Progress
from .streaming import chunk_size, finish, stream


@dataclass(slots=True)
class CopyOutcome:
    """What a copy knows in the end.

    `digests` are those of the target's entries, by name. `files` are sizes and CRC-32s, by path.
    `records` are the CRC-32s of the target's records in the files that were filled, by extent.
    `checked` and `unchecked` count source records. A record stays unchecked if it was saved without
    a CRC, or if only a small part of it was read.
    """

    digests: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    records: dict[Extent, int] = field(default_factory=dict)
    bytes: int = 0
    checked: int = 0
    unchecked: int = 0


class _TargetFile:
    """A target file while it is filled: its writer, its records, and how many chunks it lacks."""

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
        offset = start
        first = max(0, bisect_right(self._starts, start) - 1)
        for extent in self._listed[first:]:
            for edge in (extent.offset, extent.offset + extent.length):
                if offset < edge < stop:
                    yield offset, edge
                    offset = edge
            if extent.offset >= stop:
                break
        if offset < stop:
            yield offset, stop

    def passed(self, start: int, stop: int, crc: int) -> None:
        """Counts bytes [start, stop) with this CRC; they lie in one record, or between two."""
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
        self.checker = RecordChecker(source.records, fingerprints=source.fingerprints)
        self.records: dict[str, list[Extent]] = {}
        for record in target.records:
            self.records.setdefault(record.extent.file, []).append(record.extent)
        self.outcome = CopyOutcome()
        in_order = [pair for pair in pairs if _is_in_order(pair)]
        ordered = {id(pair) for pair in in_order}
        self.covers: dict[int, Cover | Scattered] = {
            id(pair): (Cover if id(pair) in ordered else Scattered)(pair.target.length)
            for pair in pairs
        }
        self.cast_covers: dict[int, Cover | Scattered] = {
            id(pair): (Cover if id(pair) in ordered else Scattered)(pair.source.length)
            for pair in pairs
            if pair.source.digest is not None and pair.source.dtype != pair.target.dtype
        }
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
        self.targets: list[_TargetFile] = []
        self.tasks = self._tasks()

    def _tasks(self) -> Iterator[tuple[_TargetFile, Chunk]]:
        for file, pieces in plan.files(self.pairs):
            if not os.path.getsize(file):
                continue
            records = self.records.get(file, ())
            target = _TargetFile(file, records, self.io, self.chunk)
            self.targets.append(target)
            for chunk in plan.chunks(file, target.size, pieces, self.chunk):
                yield target, chunk

    def start(
        self, element_readers: Sequence[ElementReader]
    ) -> Callable[[tuple[_TargetFile, Chunk]], None]:
        """One thread's buffer, and the function that fills a chunk."""
        (element_reader,) = element_readers
        buffer = Buffer(self.chunk)
        return lambda task: self._fill(*task, element_reader, buffer.view)

    def _fill(
        self, target: _TargetFile, chunk: Chunk, element_reader: ElementReader, buffer: memoryview
    ) -> None:
        view = buffer[: chunk.length]
        self._keep_shell(target, chunk, element_reader.reader, view)
        same: list[ReadRequest] = []
        for piece in chain.from_iterable(map(_parts, chunk.pieces)):
            source, at = piece.pair.source, piece.offset - chunk.offset
            if piece.count > 1:
                self._fill_runs(piece, at, element_reader, view)
            elif source.dtype != piece.pair.target.dtype:
                self._cast(piece, at, element_reader, view)
            else:
                check = id(piece.pair) in self.checking
                same.append(ReadRequest(source, piece.start, piece.stop, at, check))
        element_reader.read(same, view)
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

    def _keep_shell(
        self, target: _TargetFile, chunk: Chunk, reader: Reader, view: memoryview
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
    ) -> None:
        source, cover = piece.pair.source, self.cast_covers.get(id(piece.pair))
        size, check = SIZES[source.dtype], id(piece.pair) in self.checking

        def count(start: int, stop: int, elements: memoryview) -> None:
            assert cover is not None
            crc = crc32(elements)
            with self.lock:
                cover.add(start * size, stop * size, crc)

        request = ReadRequest(source, piece.start, piece.stop, at, check)
        dtype = piece.pair.target.dtype
        element_reader.read_as(dtype, request, view, count if cover is not None else None)

    def _fill_runs(
        self, piece: TargetPiece, at: int, element_reader: ElementReader, view: memoryview
    ) -> None:
        """Fills runs at a stride: reads the rows that they are cut from, then copies the runs."""
        import numpy as np

        from .cast import cast

        source, target = piece.pair.source, piece.pair.target
        size, length, stride = SIZES[source.dtype], piece.stop - piece.start, piece.stride
        block = element_reader.block()
        most = max(1, min(CAST_BLOCK, len(block) // size) // stride)
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
            if id(piece.pair) in self.cast_covers:
                self._add_runs(self.cast_covers[id(piece.pair)], piece, runs, stop)

    def _add_runs(
        self, cover: Cover | Scattered, piece: TargetPiece, runs: memoryview, stop: int
    ) -> None:
        """Counts the CRC of runs of a piece; the last one ends at element `stop` of the tensor."""
        assert isinstance(cover, Scattered)
        length = piece.stop - piece.start
        # bytes per element, before the cast or after it
        size = cover.length // piece.pair.target.numel
        crc = crc_of_runs(runs, length * size, piece.stride * size)
        with self.lock:
            cover.add_runs(len(runs), stop * size, crc)

    def _hash(self, target: _TargetFile, chunk: Chunk, view: memoryview) -> None:
        """Counts the CRCs of the chunk's pieces and gaps: for tensors, records and the file."""
        offset = chunk.offset
        ranges: list[tuple[int, int, TargetPiece | None]] = []
        for piece in chunk.pieces:
            ranges += [(*gap, None) for gap in target.edges(offset, piece.offset)]
            ranges.append((piece.offset, piece.end, piece))
            offset = piece.end
        ranges += [(*gap, None) for gap in target.edges(offset, chunk.offset + chunk.length)]
        crcs = [crc32(view[a - chunk.offset : b - chunk.offset]) for a, b, _ in ranges]
        with self.lock:
            for (start, stop, own), crc in zip(ranges, crcs, strict=True):
                target.passed(start, stop, crc)
                if own is not None and own.count == 1:
                    size = SIZES[own.pair.target.dtype]
                    self.covers[id(own.pair)].add(own.start * size, own.stop * size, crc)
        for piece in chunk.pieces:
            if piece.count > 1:
                runs = view[piece.offset - chunk.offset : piece.end - chunk.offset]
                stop = piece.stop + (piece.count - 1) * piece.stride
                self._add_runs(self.covers[id(piece.pair)], piece, runs, stop)

    def close(self, error: BaseException) -> None:
        """Closes files after a failure, without a sync, whose own failure would hide the first."""
        for target in self.targets:
            target.stack.__exit__(type(error), error, error.__traceback__)

    def finish(self) -> CopyOutcome:
        """Checks the rest of the records and the source's digests; raises CorruptCheckpoint."""
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
            cast_cover = self.cast_covers.get(id(pair))
            source_crc = crc if cast_cover is None else cast_cover.crc
            if pair.source.digest not in (None, source_crc):
                raise CorruptCheckpoint(
                    f"{pair.source.name} is damaged: its CRC-32 is not the manifest's",
                    hint="take another copy of the source; nothing was written",
                )
        self.outcome.checked, self.outcome.unchecked = finish([self.checker])
        return self.outcome


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
) -> CopyOutcome:
    """Fills the target's files from the source; they exist already, with their final sizes.

    Raises CorruptCheckpoint if bytes of the source do not have the CRC-32 that its files state, or
    OSError (a full disk).
    """
    chunk = chunk_size(source.dp, copying.jobs, copying.memory)
    running = _Copy(pairs, source, target, chunk, copying.io, progress)
    try:
        stream(running.tasks, copying.jobs, [running.checker], chunk, running.start)
    except BaseException as error:
        running.close(error)
        raise
    return running.finish()
