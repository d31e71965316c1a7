"""Which bytes go where: the join of two manifests, one target file at a time.

Nothing here opens a file. A plan is lazy: at dp 1024 with 50,000 tensors the pieces are millions,
but only those of one target file exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .dtypes import SIZES
from .errors import MissingData
from .manifest import Entry, Fragment, Manifest, Slices


@dataclass(frozen=True, slots=True)
class Pair:
    """A target's entry and the source's entry that it gets its elements from."""

    source: Entry
    target: Entry


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a pair, which stand at byte `offset` of a target file."""

    offset: int
    start: int
    stop: int
    pair: Pair

    @property
    def end(self) -> int:
        return self.offset + (self.stop - self.start) * SIZES[self.pair.target.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + length) of a target file, and the pieces in them, in order."""

    file: str
    offset: int
    length: int
    pieces: Sequence[Piece]


def join(source: Manifest, target: Manifest, from_masters: bool = False) -> list[Pair]:
    """Every entry and replica of the target with its source.

    A module's weight (`param`) that the source lacks, or holds in another type, is made of its
    master; `from_masters` prefers masters always. A master that the source lacks is made of the
    weight. Raises MissingData.
    """
    wanted = (*target.entries.values(), *target.replicas)
    return [Pair(_source_of(entry, source, from_masters), entry) for entry in wanted]


def _source_of(entry: Entry, source: Manifest, from_masters: bool) -> Entry:
    here = source.entries.get(entry.name)
    if entry.slot == "param":
        master = source.entries.get(f"{entry.parameter}/master")
        if from_masters or here is None or here.dtype != entry.dtype:
            here = master or here
    elif entry.slot == "master" and here is None:
        here = source.entries.get(f"{entry.parameter}/param")
    if here is None:
        raise MissingData(f"the source holds no {entry.slot} of {entry.parameter}")
    if here.shape != entry.shape:
        raise MissingData(
            f"{entry.name} has shape {here.shape} in the source and {entry.shape} in the target"
        )
    return here


def files(pairs: Sequence[Pair]) -> Iterator[tuple[str, list[Piece]]]:
    """Every target file with its pieces in the order of their bytes, one file at a time."""
    listed: dict[str, list[tuple[Pair, Fragment]]] = {}
    sliced: dict[int, list[Pair]] = {}  # by the identity of the flats that many tensors share
    slices_in: dict[str, list[tuple[int, int]]] = {}
    for pair in pairs:
        fragments = pair.target.fragments
        if isinstance(fragments, Slices):
            flats = id(fragments.flats)
            if flats not in sliced:
                for rank, flat in enumerate(fragments.flats):
                    slices_in.setdefault(flat.file, []).append((flats, rank))
            sliced.setdefault(flats, []).append(pair)
        else:
            for fragment in fragments:
                listed.setdefault(fragment.extent.file, []).append((pair, fragment))
    for file in dict.fromkeys((*listed, *slices_in)):
        found = list(listed.get(file, ()))
        for flats, rank in slices_in.get(file, ()):
            found += [
                (pair, pair.target.fragments[rank])
                for pair in sliced[flats]
                if rank < len(pair.target.fragments)
            ]
        pieces = [
            Piece(fragment.extent.offset, fragment.start, fragment.stop, pair)
            for pair, fragment in found
        ]
        yield file, sorted(pieces, key=lambda piece: piece.offset)


def chunks(file: str, size: int, pieces: Sequence[Piece], chunk: int) -> Iterator[Chunk]:
    """A target file in chunks of `chunk` bytes, pieces cut at their edges.

    Edges never split an element: tensors are aligned to their elements in every format.
    """
    first = 0
    for offset in range(0, size, chunk):
        end = min(offset + chunk, size)
        inside = []
        place = first
        while place < len(pieces) and pieces[place].offset < end:
            piece = pieces[place]
            inside.append(_clip(piece, offset, end))
            if piece.end <= end:
                first = place + 1
            place += 1
        yield Chunk(file, offset, end - offset, inside)


def _clip(piece: Piece, offset: int, end: int) -> Piece:
    if piece.offset >= offset and piece.end <= end:
        return piece
    size = SIZES[piece.pair.target.dtype]
    start = piece.start + max(0, offset - piece.offset) // size
    stop = piece.stop - max(0, piece.end - end) // size
    assert (max(piece.offset, offset) - piece.offset) % size == 0, piece
    return Piece(max(piece.offset, offset), start, stop, piece.pair)
