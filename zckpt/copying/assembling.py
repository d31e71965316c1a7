"""Assembles one chunk of a target file, and computes the CRC-32s of its bytes.

Elements are read into a buffer, cast where the types differ, and hashed while they are in the
processor's cache. Bytes between tensors (headers) are kept as they are in the file.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol

from msgspec import Struct

from ..core.checkpoint.cast import CAST_BLOCK, cast, put_mean, refuse_overflow
from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry
from ..core.passes.pieces import SHORT, SMALL, ElementReader, ReadRequest
from ..core.passes.plan import Chunk, TargetPiece
from ..core.storage.checksum import crc32, crc_of_runs
from ..core.storage.fragments import Extent, Slices
from .journal import Key, Passed

# the object of a CRC-32: a tensor of the target, or a tensor of the source before it is cast
TENSOR, SOURCE = "tensor", "source"


class Target(Protocol):
    """A target file that is being filled; `file` is its descriptor.

    It already has its final size, headers, and holes where tensors go.
    """

    @property
    def path(self) -> str: ...
    @property
    def file(self) -> int: ...

    def passed(self, data: memoryview, start: int) -> Iterator[Passed]:
        """Yields CRC-32s of `data`, the bytes of the file from `start` on.

        First come the CRC-32s of the parts of `data` in records (byte ranges with a checksum, such
        as zip members), then the CRC-32 of all of `data`. The CRC-32s of neighbors are combined
        later.
        """


class Assembler(Struct, frozen=True, eq=False):
    """Assembles chunks of target files, for one thread.

    A pair is a tensor of the target and the tensor of the source that fills it.

        numbers         maps the Python `id` of each pair whose target tensor gets a CRC-32 to the
                        pair's index
        checking        the `id`s of pairs whose bytes are compared with checksums of the source
        hashed_first    the indices of pairs whose elements are hashed before they are cast
    """

    reader: ElementReader
    numbers: Mapping[int, int]
    checking: Container[int]
    hashed_first: Container[int]

    def assemble(self, target: Target, chunk: Chunk, view: memoryview) -> list[Passed]:
        """Reads or computes the bytes of a chunk into `view`; returns the CRC-32s of its parts."""
        passed: list[Passed] = []
        self._keep_shell(target, chunk, view)
        same: list[ReadRequest] = []
        for piece in _parts(chunk.pieces):
            source, at = piece.pair.source, piece.offset - chunk.offset
            if source.mean:
                self._mean(piece, chunk.offset, view)
            elif piece.count > 1:
                passed += self._runs(piece, at, view)
            elif source.dtype != piece.pair.target.dtype:
                passed += self._cast(piece, at, view)
            else:
                check = id(piece.pair) in self.checking
                is_cut = piece.is_cut or type(piece.pair.target.fragments) is not Slices
                same.append(ReadRequest(source, piece.start, piece.stop, at, check, is_cut))
        crcs = self.reader.read(same, view)
        return passed + self._hash(target, chunk, view, crcs)

    def _keep_shell(self, target: Target, chunk: Chunk, view: memoryview) -> None:
        """Reads the headers between tensors, which the file already has, into `view`.

        Headers near each other are read together, with the short tensors between them.
        """
        offset, gaps = chunk.offset, list[tuple[int, int]]()
        ends = ((piece.offset, piece.end) for piece in chunk.pieces)
        for begin, end in chain(ends, ((chunk.end, chunk.end),)):
            if begin > offset:
                is_near = gaps and offset - gaps[-1][1] < SHORT
                gaps.append((gaps.pop()[0] if is_near else offset, begin))
            offset = end
        for start, stop in gaps:
            part = view[start - chunk.offset : stop - chunk.offset]
            extent = Extent(target.path, start, stop - start)
            self.reader.reader.read_from(target.file, extent, part)

    def _cast(self, piece: TargetPiece, at: int, view: memoryview) -> list[Passed]:
        source, number = piece.pair.source, self.numbers.get(id(piece.pair))
        size, check = SIZES[source.dtype], id(piece.pair) in self.checking
        passed: list[Passed] = []

        def count(start: int, stop: int, elements: memoryview) -> None:
            assert number is not None
            passed.append(((SOURCE, number, 0), start * size, stop * size, crc32(elements)))

        request = ReadRequest(source, piece.start, piece.stop, at, check)
        dtype = piece.pair.target.dtype
        counted = count if number in self.hashed_first else None
        self.reader.read_as(dtype, request, view, counted, bounded=True)
        return passed

    def _mean(self, piece: TargetPiece, offset: int, view: memoryview) -> None:
        """Fills elements with the mean of all replicas.

        `view` begins at byte `offset` of the file.
        """
        source, dtype = piece.pair.source, piece.pair.target.dtype
        size, most = SIZES[dtype], CAST_BLOCK // len(source.mean)
        for run in piece.runs():
            for start in range(run.start, run.stop, most):
                stop = min(start + most, run.stop)
                copies, block = [], self.reader.block
                for copy in source.mean:
                    # masters are read for the mean of a weight and for their own mean, and count
                    # only for the latter
                    check = id(piece.pair) in self.checking and copy.name == source.name
                    length = (stop - start) * SIZES[copy.dtype]
                    self.reader.read([ReadRequest(copy, start, stop, 0, check)], block[:length])
                    copies.append((block[:length], copy.dtype))
                    block = block[length:]
                at = run.offset - offset + (start - run.start) * size
                put_mean(copies, view[at : at + (stop - start) * size], dtype)

    def _runs(self, piece: TargetPiece, at: int, view: memoryview) -> list[Passed]:
        """Fills a piece that consists of runs of elements at a constant distance (`stride`).

        A run is a range of consecutive elements. The source's rows that contain the runs are read,
        and the runs are copied out of them. Returns the CRC-32s of the piece's bytes.
        """
        import numpy as np

        source, target = piece.pair.source, piece.pair.target
        size, length, stride = SIZES[source.dtype], piece.stop - piece.start, piece.stride
        block = self.reader.block
        # rows that fit into a block; `_parts` leaves only short strides
        most = CAST_BLOCK // stride
        number, passed = self.numbers.get(id(piece.pair)), list[Passed]()
        for first in range(0, piece.count, most):
            count = min(most, piece.count - first)
            start = piece.start + first * stride
            stop = start + (count - 1) * stride + length
            self.reader.read(
                [ReadRequest(source, start, stop, 0, check=False)], block[: (stop - start) * size]
            )
            rows = np.frombuffer(block, f"u{size}", count * stride).reshape(count, stride)
            runs = np.ascontiguousarray(rows[:, :length]).data.cast("B")
            begin = at + first * length * SIZES[target.dtype]
            into = view[begin : begin + count * length * SIZES[target.dtype]]
            if source.dtype == target.dtype:
                into[:] = runs
                continue
            cast(runs, source.dtype, into, target.dtype)
            refuse_overflow(source.name, runs, source.dtype, into, target.dtype)
            if number is not None and number in self.hashed_first:
                passed.append(_passed_runs((SOURCE, number, 0), source, piece, runs, stop))
        return passed

    def _hash(
        self,
        target: Target,
        chunk: Chunk,
        view: memoryview,
        crcs: Mapping[tuple[int, int], int],
    ) -> list[Passed]:
        """Computes the CRC-32s of a chunk's bytes `view`: of tensors, of records, and of all bytes.

        `crcs` maps byte ranges (begin, end) of `view` to CRC-32s that are known already.
        """
        passed: list[Passed] = []
        begin = chunk.offset
        for piece in chunk.pieces if self.numbers else ():
            number = self.numbers.get(id(piece.pair))
            if number is None:  # no CRC-32 of this tensor is wanted
                continue
            entry, key = piece.pair.target, (TENSOR, number, 0)
            at, end = piece.offset - begin, piece.end - begin
            data = view[at:end]
            if piece.count > 1:
                last = piece.stop + (piece.count - 1) * piece.stride
                passed.append(_passed_runs(key, entry, piece, data, last))
            else:
                size = SIZES[entry.dtype]
                crc = crcs[at, end] if (at, end) in crcs else crc32(data)
                passed.append((key, piece.start * size, piece.stop * size, crc))
        passed += target.passed(view[: chunk.length], begin)
        return passed


def _passed_runs(key: Key, entry: Entry, piece: TargetPiece, runs: memoryview, stop: int) -> Passed:
    """Computes the CRC-32 of a piece that is several runs of consecutive elements of a tensor.

    `runs` has the bytes of all runs, one after the other. The last run ends at element `stop`.
    """
    size = SIZES[entry.dtype]
    crc = crc_of_runs(runs, (piece.stop - piece.start) * size, piece.stride * size)
    # as if the runs had no gaps between them: `Scattered.add_runs` takes the bytes' number and end
    return key, stop * size - len(runs), stop * size, crc


def _parts(pieces: Iterable[TargetPiece]) -> Iterator[TargetPiece]:
    """Yields the pieces to read; a piece with runs of elements far apart is split into its runs."""
    for piece in pieces:
        far = piece.count > 1 and piece.stride * SIZES[piece.pair.source.dtype] >= SMALL
        if far:
            yield from piece.runs()
        else:
            yield piece
