"""Plans copies and comparisons from two manifests, by pairing the tensors that they list.

The plan of a copy says which elements of the source's tensors go where in a target. The plan of a
comparison pairs the tensors of two checkpoints. No file is opened. The plan of a copy is made for
one target file at a time: at dp 1024 with 50,000 tensors there are millions of byte ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from ...errors import MissingData, UnsupportedCheckpoint
from ..checkpoint.cast import CASTABLE
from ..checkpoint.dtypes import NUMBERS, SIZES
from ..checkpoint.entries import Entry, Key
from ..checkpoint.manifest import Manifest, slot_key
from ..checkpoint.weights import WEIGHTS, WIDE, counterpart, weight_of
from ..storage.fragments import Fragment, Slices


class Pair(Struct, frozen=True):
    """A tensor of the target, and the tensor of the source that supplies its elements.

    `rank` is the position of the model rank if model ranks are not merged.
    """

    source: Entry
    target: Entry
    rank: int = 0


class TargetPiece(Struct, frozen=True):
    """Elements [start, stop) of a tensor, for the bytes of a target file from `offset` on.

    If `count` is above one, the bytes hold `count` runs of elements, one after the other. Run i has
    elements [start + i * stride, stop + i * stride). `is_cut` is True for a part of a larger piece
    that the edge of a `Chunk` cuts.
    """

    offset: int
    start: int
    stop: int
    pair: Pair
    count: int = 1
    stride: int = 0
    is_cut: bool = False

    @property
    def end(self) -> int:
        numel = (self.stop - self.start) * self.count
        return self.offset + numel * SIZES[self.pair.target.dtype]

    def runs(self) -> Iterator[TargetPiece]:
        """Yields each run of the piece (a range of consecutive elements) as a separate piece."""
        length = (self.stop - self.start) * SIZES[self.pair.target.dtype]
        for number in range(self.count):
            first = number * self.stride
            offset = self.offset + number * length
            yield TargetPiece(offset, self.start + first, self.stop + first, self.pair)


class Chunk(Struct, frozen=True):
    """Bytes [offset, offset + length) of a target file, and the tensors' `pieces` to write there.

    The pieces are in the order of their bytes.
    """

    file: str
    offset: int
    length: int
    pieces: Sequence[TargetPiece]

    @property
    def end(self) -> int:
        return self.offset + self.length


def join(source: Manifest, target: Manifest, from_masters: bool) -> list[Pair]:
    """Pairs every tensor and replica of the target with the tensor of the source that supplies it.

    With `from_masters`, weights are cast from their fp32 masters. Raises MissingData if the source
    has no such tensor of this shape, and UnsupportedCheckpoint for types that it cannot convert.
    """
    pairs = []
    for rank, (rank_manifest, target_manifest) in enumerate(
        zip(source.rank_manifests, target.rank_manifests, strict=True)
    ):
        owners = rank_manifest.owners
        for entry in (*target_manifest.entries.values(), *target_manifest.replicas):
            name = owners.get(entry.parameter, entry.parameter)
            pairs.append(Pair(_source_of(entry, name, rank_manifest, from_masters), entry, rank))
    return pairs


def _source_of(entry: Entry, name: str, source: Manifest, from_masters: bool) -> Entry:
    """Finds the source's tensor that supplies the target's `entry`.

    `name` is the name of the parameter in the source.
    """
    origin: Entry | None
    if entry.slot in WEIGHTS:
        weight = weight_of(source.entries, name)
        origin = weight.supply(entry.slot, entry.dtype, from_masters)
    else:
        origin = source.entries.get((name, entry.slot))
    if origin is None:
        lacking = source.titled(entry.parameter)
        raise MissingData("state-missing", f"the source has no {slot_key(entry.slot)} of {lacking}")
    if origin.shape != entry.shape:
        raise MissingData(
            "ranks-disagree",
            f"{source.titled(entry.name)} has shape {origin.shape} in the source and {entry.shape} "
            "in the target",
        )
    if origin.dtype != entry.dtype and not {origin.dtype, entry.dtype} <= {*CASTABLE}:
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"{origin.name} is of type {origin.dtype}, which zckpt does not convert to "
            f"{entry.dtype}",
            hint="leave out --dtype: then `--to dcp`, `--to gathered` and `--to universal` keep "
            "every type",
        )
    return origin


class Match(Struct, frozen=True):
    """Two tensors that should hold the same elements; if `b` is None, `a` is only read.

    `how` says how they are compared:

        bits       as bytes
        rounded    as bytes, after the wider tensor (a master) was rounded to the other type
        values     as numbers: the types differ
        types      not at all: the types differ, and one is not of numbers
        shapes     not at all: the shapes differ; for two replicas, the shapes or the types

    `copy` is True for a pair of replicas (`of_copies`), which reports do not count as a tensor.
    """

    a: Entry
    b: Entry | None = None
    how: str = "bits"
    copy: bool = False

    @property
    def is_read(self) -> bool:
        """Whether bytes must be read; False if the types or shapes cannot be compared."""
        return self.how in ("bits", "rounded", "values")

    @property
    def rounds_a(self) -> bool:
        """Whether `a` is rounded to the type of `b`, rather than `b` to the type of `a`."""
        if self.how != "rounded" or self.b is None:
            return False
        return SIZES[self.a.dtype] > SIZES[self.b.dtype]

    @property
    def compared(self) -> Entry:
        """The tensor whose type is used to compare `a` and `b`.

        If `how` is `rounded`, it is the tensor of the narrower type, else `a`.
        """
        return self.b if self.rounds_a and self.b is not None else self.a

    @property
    def name(self) -> str:
        """The name (`parameter/slot`) of the tensor whose type is used to compare."""
        return self.compared.name


def match(a: Manifest, b: Manifest) -> tuple[list[Match], list[Key], list[Key]]:
    """Pairs the tensors of two checkpoints; also returns the keys that only `a` or only `b` has.

    A weight may be paired with the master of the other checkpoint (see `weights.counterpart`). A
    tied weight has its name in `a`.
    """
    names = _names_in(a, b)
    ours, theirs = a.entries, _renamed(b, a, names)
    all_matches = (_counterpart(entry, theirs, ours) for entry in ours.values())
    matches = [item for item in all_matches if item is not None]
    taken = {id(entry) for item in matches for entry in (item.a, item.b)}
    owners = {alias: names.get(first, first) for alias, first in b.owners.items()} | names
    for entry in (*ours.values(), *theirs.values()):  # one side may store a tied weight twice
        is_ours = ours.get(entry.key) is entry
        owner = owners.get(entry.parameter, "")
        same = (theirs if is_ours else ours).get((owner, entry.slot))
        if id(entry) not in taken and same is not None:
            matches.append(of_copies(entry, same) if is_ours else of_copies(same, entry))
            taken.add(id(entry))
    for entry in theirs.values():
        if id(entry) in taken:
            continue
        counterpart = _counterpart(entry, ours, theirs)
        if counterpart is not None and counterpart.b is not None:
            matches.append(replace(counterpart, a=counterpart.b, b=counterpart.a))
            taken |= {id(counterpart.a), id(counterpart.b)}
    only_a, only_b = (
        [
            key
            for key, entry in side.items()
            # two 16-bit weights that were rounded from one master are not compared with each other
            if id(entry) not in taken and id(other.get(key)) not in taken
        ]
        for side, other in ((ours, theirs), (theirs, ours))
    )
    return matches, only_a, only_b


def of_copies(a: Entry, b: Entry) -> Match:
    """Pairs two replicas of a tensor; they are compared as bytes if types and shapes are equal."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return Match(a, b, "bits" if alike else "shapes", copy=True)


def _names_in(a: Manifest, b: Manifest) -> dict[str, str]:
    """Maps the names of tied weights in `a` and `b` to the names under which `a` stores them."""
    second = {
        first: alias
        for alias, first in reversed(b.owners.items())
        if alias in a.parameters and first not in a.parameters
    }
    return second | a.owners


def _renamed(b: Manifest, a: Manifest, names: Mapping[str, str]) -> dict[Key, Entry]:
    """The tensors of `b`, with tied weights under the names that they have in `a`.

    A weight keeps its name in `b` if `b` stores it under several names.
    """
    entries: dict[Key, Entry] = {}
    for key_of_b, entry in b.entries.items():
        key = names.get(entry.parameter, entry.parameter), entry.slot
        is_taken = entry.parameter in a.parameters or key in b.entries or key in entries
        entries[key_of_b if is_taken else key] = entry
    return entries


def _counterpart(
    entry: Entry, other_side: Mapping[Key, Entry], own_side: Mapping[Key, Entry]
) -> Match | None:
    """Pairs `entry` with the same tensor of the other checkpoint; None if there is none.

    If a weight is stored there only in another slot (`param`, `master`) or dtype, the tensor that
    must agree with `entry` after rounding is preferred.
    """
    same = other_side.get(entry.key)
    if same is not None and same.dtype == entry.dtype:
        return Match(entry, same, "bits" if same.shape == entry.shape else "shapes")
    weight = weight_of(own_side, entry.parameter)
    if entry.slot in WEIGHTS:
        other_weight = counterpart(entry, weight_of(other_side, entry.parameter), weight)
        if other_weight is not None:
            return Match(entry, *other_weight)
    has_master = weight.master is not None and weight.master.dtype in WIDE
    if same is None or (entry.slot == "param" and has_master):
        return None
    if same.shape != entry.shape:
        return Match(entry, same, "shapes")
    return Match(entry, same, "values" if {entry.dtype, same.dtype} <= NUMBERS else "types")


def files(pairs: Sequence[Pair]) -> tuple[list[str], Callable[[str], list[TargetPiece]]]:
    """Lists the target files, and returns a function that lists one file's pieces in byte order."""
    listed: dict[str, list[tuple[Pair, Fragment]]] = {}
    # by the identity of the flat buffers that many tensors share
    sliced: dict[int, list[tuple[Pair, Slices]]] = {}
    slices_in: dict[str, list[tuple[int, int]]] = {}
    for pair in pairs:
        fragments = pair.target.fragments
        if type(fragments) is Slices:  # isinstance takes long: a sequence has an abstract class
            flats = id(fragments.flats)
            if flats not in sliced:
                for rank, flat in enumerate(fragments.flats):
                    slices_in.setdefault(flat.file, []).append((flats, rank))
            sliced.setdefault(flats, []).append((pair, fragments))
        else:
            for fragment in fragments:
                listed.setdefault(fragment.extent.file, []).append((pair, fragment))

    def pieces_of(file: str) -> list[TargetPiece]:
        pieces = [
            TargetPiece(
                fragment.extent.offset,
                fragment.start,
                fragment.stop,
                pair,
                fragment.count,
                fragment.stride,
            )
            for pair, fragment in listed.get(file, ())
        ]
        for flats, rank in slices_in.get(file, ()):
            pieces += [
                TargetPiece(*slices.slice_of(rank), pair)
                for pair, slices in sliced[flats]
                if rank < slices.filled
            ]
        pieces.sort(key=_offset)
        return pieces

    return list(dict.fromkeys((*listed, *slices_in))), pieces_of


def chunks(
    file: str, within: tuple[int, int], pieces: Sequence[TargetPiece], chunk: int
) -> Iterator[Chunk]:
    """Cuts the bytes `within` (start, stop) of a target file into chunks of `chunk` bytes.

    Each chunk gets the `pieces`, or parts of them, that lie in it. An edge never splits an element,
    since every format aligns tensors to their elements.
    """
    begin, stop = within
    first = bisect_right(pieces, begin, key=_end)
    for offset in range(begin, stop, chunk):
        end = min(offset + chunk, stop)
        last = bisect_left(pieces, end, first, key=_offset)
        inside = list(pieces[first:last])
        # pieces do not overlap, so only the first and the last one can cross an edge
        if inside and inside[0].offset < offset:
            inside[:1] = _clipped(inside[0], offset, end)
        if inside and inside[-1].end > end:
            inside[-1:] = _clipped(inside[-1], offset, end)
        first = last - 1 if last > first and pieces[last - 1].end > end else last
        yield Chunk(file, offset, end - offset, inside)


_offset, _end = attrgetter("offset"), attrgetter("end")


def _clipped(piece: TargetPiece, offset: int, end: int) -> Iterator[TargetPiece]:
    """Yields the pieces that are the part of `piece` within bytes [offset, end) of its file.

    A piece may have several runs of elements (`count`). A run that the range cuts becomes a
    separate piece.
    """
    size, length = SIZES[piece.pair.target.dtype], piece.stop - piece.start
    assert (max(piece.offset, offset) - piece.offset) % size == 0, piece
    # elements of the piece, in the order of the file
    position = max(0, offset - piece.offset) // size
    last = length * piece.count - max(0, piece.end - end) // size
    while position < last:
        run, skipped = divmod(position, length)
        count = 1 if skipped else max(1, (last - position) // length)
        start = piece.start + run * piece.stride + skipped
        stop = start + min(length - skipped, last - position)
        at = piece.offset + position * size
        yield TargetPiece(at, start, stop, piece.pair, count, piece.stride, is_cut=True)
        position += count * (stop - start)
