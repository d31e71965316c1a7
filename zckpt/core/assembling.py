"""How does one chunk of a target file come about, and what are the CRC-32s of its bytes?

Elements are read into a buffer, cast where the types differ, and hashed while they are in the
processor's cache. Bytes between tensors (headers) are those that the file has already.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain

from .checksum import crc32, crc_of_runs
from .dtypes import SIZES
from .filling import Neighbors, TargetFile
from .fragments import Extent, Slices
from .hashing import PieceHasher, is_hashed_apart
from .journal import Key, Passed
from .manifest import Entry
from .pieces import CAST_BLOCK, SMALL, ElementReader, ReadRequest
from .plan import Chunk, TargetPiece

# of what a CRC-32 is: a tensor of the target, a tensor of the source before it is cast
TENSOR, SOURCE = "tensor", "source"


class Assembler:
    """Assembles chunks, for one thread.

    `numbers` are those of the pairs, by identity. The bytes of the pairs in `checking` count for
    the source's records. `cast` has the keys of the source's tensors that are hashed before they
    are cast.
    """

    def __init__(
        self,
        element_reader: ElementReader,
        numbers: Mapping[int, int],
        checking: Container[int],
        cast: Container[Key],
    ) -> None:
        self.reader = element_reader
        self._numbers = numbers
        self._checking = checking
        self._cast_keys = cast

    def assemble(self, target: TargetFile, chunk: Chunk, view: memoryview) -> list[Passed]:
        """Puts a chunk's bytes into `view`; gives their CRC-32s."""
        passed: list[Passed] = []
        self._keep_shell(target, chunk, view)
        same: list[ReadRequest] = []
        apart: dict[int, ReadRequest] = {}  # by the byte in the file
        for piece in chain.from_iterable(map(_parts, chunk.pieces)):
            source, at = piece.pair.source, piece.offset - chunk.offset
            if source.mean:
                self._mean(piece, chunk.offset, view)
            elif piece.count > 1:
                passed += self._runs(piece, at, view)
            elif source.dtype != piece.pair.target.dtype:
                passed += self._cast(piece, at, view)
            else:
                check = id(piece.pair) in self._checking
                is_apart = check and is_hashed_apart(source)
                is_cut = piece.is_cut or not isinstance(piece.pair.target.fragments, Slices)
                same.append(
                    ReadRequest(source, piece.start, piece.stop, at, check and not is_apart, is_cut)
                )
                if is_apart:
                    apart[piece.offset] = same[-1]
        self.reader.read(same, view)
        hasher = PieceHasher(self.reader.checker, self.reader.passed)
        return passed + self._hash(target, chunk, view, apart, hasher)

    def _keep_shell(self, target: TargetFile, chunk: Chunk, view: memoryview) -> None:
        """Reads what the file holds already between tensors (headers)."""
        offset, end = chunk.offset, chunk.offset + chunk.length
        for start, stop in (*[(piece.offset, piece.end) for piece in chunk.pieces], (end, end)):
            if start > offset:
                part = view[offset - chunk.offset : start - chunk.offset]
                self.reader.reader.read(Extent(target.path, offset, start - offset), part)
            offset = max(offset, stop)

    def _cast(self, piece: TargetPiece, at: int, view: memoryview) -> list[Passed]:
        source, key = piece.pair.source, (SOURCE, self._numbers[id(piece.pair)], 0)
        size, check = SIZES[source.dtype], id(piece.pair) in self._checking
        passed: list[Passed] = []

        def count(start: int, stop: int, elements: memoryview) -> None:
            passed.append((key, start * size, stop * size, crc32(elements)))

        request = ReadRequest(source, piece.start, piece.stop, at, check)
        dtype = piece.pair.target.dtype
        self.reader.read_as(dtype, request, view, count if key in self._cast_keys else None)
        return passed

    def _mean(self, piece: TargetPiece, offset: int, view: memoryview) -> None:
        """Computes elements from all copies; `view` begins at byte `offset` of the file."""
        from .cast import put_mean

        source, dtype = piece.pair.source, piece.pair.target.dtype
        size, most = SIZES[dtype], CAST_BLOCK // len(source.mean)
        for run in piece.runs():
            for start in range(run.start, run.stop, most):
                stop = min(start + most, run.stop)
                copies, block = [], self.reader.block()
                for copy in source.mean:
                    # a weight's masters are read for the masters too, and count there
                    check = id(piece.pair) in self._checking and copy.name == source.name
                    length = (stop - start) * SIZES[copy.dtype]
                    self.reader.read([ReadRequest(copy, start, stop, 0, check)], block[:length])
                    copies.append((block[:length], copy.dtype))
                    block = block[length:]
                at = run.offset - offset + (start - run.start) * size
                put_mean(copies, view[at : at + (stop - start) * size], dtype)

    def _runs(self, piece: TargetPiece, at: int, view: memoryview) -> list[Passed]:
        """Fills runs at a stride: reads the rows that they are cut from, then copies the runs."""
        import numpy as np

        from .cast import cast

        source, target = piece.pair.source, piece.pair.target
        size, length, stride = SIZES[source.dtype], piece.stop - piece.start, piece.stride
        block = self.reader.block()
        most = max(1, min(CAST_BLOCK, len(block) // size) // stride)
        key, passed = (SOURCE, self._numbers[id(piece.pair)], 0), []
        for first in range(0, piece.count, most):
            count = min(most, piece.count - first)
            start = piece.start + first * stride
            stop = start + (count - 1) * stride + length
            self.reader.read(
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
            if key in self._cast_keys:
                passed.append(_passed_runs(key, source, piece, runs, stop))
        return passed

    def _hash(
        self,
        target: TargetFile,
        chunk: Chunk,
        view: memoryview,
        apart: Mapping[int, ReadRequest],
        hasher: PieceHasher,
    ) -> list[Passed]:
        """The CRCs of the chunk's pieces and gaps: for tensors, records and the file.

        `hasher` hashes the pieces `apart`, by their byte in the file, for the source's records too.
        """
        passed: list[Passed] = []
        of_file = Neighbors()
        for start, stop, own in _ranges(target, chunk):
            if start in apart:
                crc = hasher.crc(apart[start], view)
            else:
                crc = crc32(view[start - chunk.offset : stop - chunk.offset])
            of_file.add(target.passed(start, stop, crc))
            if own is None:
                continue
            entry, key = own.pair.target, (TENSOR, self._numbers[id(own.pair)], 0)
            if own.count > 1:
                runs = view[start - chunk.offset : stop - chunk.offset]
                last = own.stop + (own.count - 1) * own.stride
                passed.append(_passed_runs(key, entry, own, runs, last))
            else:
                size = SIZES[entry.dtype]
                passed.append((key, own.start * size, own.stop * size, crc))
        hasher.flush()
        return passed + of_file.parts


def _ranges(target: TargetFile, chunk: Chunk) -> Iterator[tuple[int, int, TargetPiece | None]]:
    """The pieces of a chunk, and the gaps between them, in the order of the file."""
    offset = chunk.offset
    for piece in chunk.pieces:
        if offset < piece.offset:
            yield from ((*gap, None) for gap in target.edges(offset, piece.offset))
        offset = piece.end
        yield piece.offset, offset, piece
    yield from ((*gap, None) for gap in target.edges(offset, chunk.offset + chunk.length))


def _passed_runs(key: Key, entry: Entry, piece: TargetPiece, runs: memoryview, stop: int) -> Passed:
    """What runs of a piece give to the CRC of `entry`; the last one ends at its element `stop`."""
    size = SIZES[entry.dtype]
    crc = crc_of_runs(runs, (piece.stop - piece.start) * size, piece.stride * size)
    return key, stop * size - len(runs), stop * size, crc


def _parts(piece: TargetPiece) -> Iterable[TargetPiece]:
    """The piece itself if its runs are near each other, else each of its runs as a piece."""
    near = piece.stride * SIZES[piece.pair.source.dtype] < SMALL
    return [piece] if near or piece.count == 1 else piece.runs()
