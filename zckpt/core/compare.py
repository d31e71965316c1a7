"""Carry out a comparison: read what two checkpoints share, side by side, and say what differs.

Both sides are read in the order of the first, as many elements at a time as fit into a buffer, and
compared by memcmp(3). Only where bytes differ are they looked at as numbers, which takes numpy. The
CRC-32 of every tensor, and of every record that passes by, is found on the way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from .checksum import Cover, combine, crc32
from .copy import chunk_size
from .dtypes import FLOATS, SIZES
from .fileio import Buffer, Reader, files_per_thread
from .fragments import Extent, Record, Runs, Slices
from .manifest import Entry, Manifest
from .pieces import CAST_BLOCK, SMALL, Damage, Gatherer, Ledger, Wanted
from .plan import Match
from .threads import share

Progress = Callable[[int], None]
FEW = 1 << 17  # elements that are rounded here in less time than numpy takes to be imported
PADDING = 64 << 10  # bytes; more than these beside tensors are something else


@dataclass(slots=True)
class Difference:
    """Of two tensors: how many elements differ, the first of them, and by how much at most.

    `first` counts row-major elements, `a` and `b` are their values. `max_abs` and `max_ulp` (units
    in the last place, of equal types) are None where elements are no numbers. `dot`, `aa` and `bb`
    are sums over all elements that were looked at.
    """

    count: int = 0
    first: int | None = None
    a: float | int | None = None
    b: float | int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    dot: float = 0.0
    aa: float = 0.0
    bb: float = 0.0

    def add(self, other: Difference) -> None:
        """What was found in other elements of the same tensors."""
        self.count += other.count
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.a, self.b = other.first, other.a, other.b
        for key in ("max_abs", "max_ulp"):
            here, there = getattr(self, key), getattr(other, key)
            if there is not None:
                setattr(self, key, there if here is None else max(here, there))
        self.dot += other.dot
        self.aa += other.aa
        self.bb += other.bb

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two as vectors; None where one is zero or not finite."""
        length = math.sqrt(self.aa) * math.sqrt(self.bb)
        if not (0 < length < math.inf and math.isfinite(self.dot)):
            return None
        return max(-1.0, min(1.0, self.dot / length))


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a match; digests are CRC-32 of the row-major bytes, None where not read."""

    match: Match
    digests: tuple[int | None, int | None]
    difference: Difference | None


@dataclass(slots=True)
class Outcome:
    """Results in the order of the matches; damaged records; `beside`: extents of padding that is
    not zero; counts of records and bytes that were read."""

    results: list[Result] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    beside: list[tuple[Record, Extent]] = field(default_factory=list)
    checked: int = 0
    unchecked: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [start, stop) of match number `place`, from element `first` of the buffers on."""

    place: int
    match: Match
    start: int
    stop: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Side:
    """What was read of one side, and whether it is the first time that it was."""

    view: memoryview
    wanted: Sequence[tuple[Wanted, bool]]


def _is_hashed_apart(entry: Entry) -> bool:
    """Whether each of its fragments is worth a CRC of its own, which tensor and record share."""
    fragments = entry.fragments
    if isinstance(fragments, Slices):
        return fragments.width * fragments.size >= SMALL
    return isinstance(fragments, Runs)


def _pieces(item: Wanted) -> list[tuple[int, int, Extent | None]]:
    """Ranges of elements to be hashed, in order, with the bytes of the file that they are."""
    if not _is_hashed_apart(item.entry):  # their records were hashed as they were read
        return [(item.start, item.stop, None)]
    size, found = SIZES[item.entry.dtype], list[tuple[int, int, Extent | None]]()
    for fragment in item.entry.fragments.overlapping(item.start, item.stop):
        start, stop = max(item.start, fragment.start), min(item.stop, fragment.stop)
        first = (start - fragment.start) * size
        extent = fragment.extent.part(first, first + (stop - start) * size)
        found.append((start, stop, extent))
    return found


class _Comparison:
    """One comparison in progress, shared by its threads."""

    def __init__(
        self,
        matches: Sequence[Match],
        a: Manifest,
        b: Manifest,
        chunk: int,
        measure: str,
        progress: Progress | None,
    ) -> None:
        self.matches = matches
        self.chunk = chunk
        self.measure = measure
        self.progress = progress
        self.ledgers = [Ledger(a.records, collect=True)]
        if b is not a:
            self.ledgers.append(Ledger(b.records, collect=True))
        self.covers: dict[int, Cover] = {}
        self.first: dict[int, int] = {}  # the match that counts an entry's bytes, by identity
        for place, item in enumerate(matches):
            for entry in (item.a, item.b):
                if entry is not None and item.is_read:
                    self.covers.setdefault(id(entry), Cover(entry.length))
                    self.first.setdefault(id(entry), place)
        rounded = sum(item.a.numel for item in matches if item.how == "rounded")
        self.rounds_here = rounded <= FEW and measure != "all"
        self.found: dict[int, Difference] = {}
        self.bytes = 0
        self.lock = Lock()

    def tasks(self) -> Iterator[list[_Part]]:
        """Parts whose elements follow each other in the buffers, of one pair of types each."""
        parts: list[_Part] = []
        here, kind = 0, None
        for place in _by_slot(self.matches):
            item = self.matches[place]
            types = item.a.dtype, item.b.dtype if item.b else None, item.how
            room = self.chunk // max(SIZES[dtype] for dtype in types[:2] if dtype)
            if types != kind:
                if parts:
                    yield parts
                parts, here, kind = [], 0, types
            if not item.is_read:
                continue
            start = 0
            while start < item.a.numel:
                stop = min(item.a.numel, start + room - here)
                parts.append(_Part(place, item, start, stop, here))
                here += stop - start
                start = stop
                if here == room:
                    yield parts
                    parts, here = [], 0
        if parts:
            yield parts

    @contextmanager
    def worker(self, keep_open: int) -> Iterator[Callable[[list[_Part]], None]]:
        """One thread's buffers; compares the parts of a task."""
        reader = Reader(keep_open)
        try:
            sides = [Gatherer(reader, ledger, self.chunk) for ledger in self.ledgers]
            buffers = _Buffers(self.chunk)
            yield lambda parts: self._carry_out(parts, sides, buffers)
        finally:
            reader.close()

    def _carry_out(self, parts: list[_Part], sides: Sequence[Gatherer], buffers: _Buffers) -> None:
        match = parts[0].match
        a = self._read(parts, "a", sides[0], buffers.a)
        b = None if match.b is None else self._read(parts, "b", sides[-1], buffers.b)
        equal = b is not None and self._compare(parts, a.view, b.view, buffers)
        crcs = self._hash(a, sides[0].ledger, {})
        if b is not None:  # what is equal has the same CRCs
            self._hash(b, sides[-1].ledger, crcs if equal and match.how == "bits" else {})
        passed = len(a.view) + (len(b.view) if b else 0)
        with self.lock:
            self.bytes += passed
        if self.progress:
            self.progress(passed)

    def _read(self, parts: Sequence[_Part], side: str, gatherer: Gatherer, buffer: Buffer) -> _Side:
        """One side's elements of all parts, row-major."""
        wanted = []
        for part in parts:
            entry: Entry = getattr(part.match, side)
            at = part.first * SIZES[entry.dtype]
            counts = self.first[id(entry)] == part.place
            check = counts and not _is_hashed_apart(entry)
            wanted.append((Wanted(entry, part.start, part.stop, at, check), counts))
        read = [item for item, _ in wanted]
        view = buffer.view[: read[-1].end]
        gatherer.gather(read, view)
        return _Side(view, wanted)

    def _hash(self, side: _Side, ledger: Ledger, known: Mapping[int, int]) -> dict[int, int]:
        """Counts the CRCs of what was read, once for tensors and records; gives them by place."""
        found: dict[int, int] = {}
        for item, counts in side.wanted:
            if not counts:
                continue
            entry, size, whole = item.entry, SIZES[item.entry.dtype], 0
            pieces = _pieces(item)
            for start, stop, extent in pieces:
                crc = known.get(item.at // size) if len(pieces) == 1 else None
                if crc is None:
                    first = item.at + (start - item.start) * size
                    crc = crc32(side.view[first : first + (stop - start) * size])
                if extent is not None:
                    ledger.told(extent, crc)
                with self.lock:
                    self.covers[id(entry)].add(start * size, stop * size, crc)
                whole = combine(whole, crc, (stop - start) * size)
            found[item.at // size] = whole
        return found

    def _compare(
        self, parts: Sequence[_Part], a: memoryview, b: memoryview, buffers: _Buffers
    ) -> bool:
        """Whether all parts are equal; looks at those that are not."""
        match = parts[0].match
        assert match.b is not None
        a_dtype, b_dtype = match.a.dtype, match.b.dtype
        if match.how == "rounded" and self.rounds_here:
            if (a_dtype, b_dtype) == ("F32", "BF16") and rounds_to(a, b):
                return True
            if (b_dtype, a_dtype) == ("F32", "BF16") and rounds_to(b, a):
                return True
        if match.how == "rounded" and SIZES[a_dtype] > SIZES[b_dtype]:
            a, a_dtype = buffers.rounded(a, a_dtype, b_dtype), b_dtype
        elif match.how == "rounded":
            b, b_dtype = buffers.rounded(b, b_dtype, a_dtype), a_dtype
        if not self._looks_at_all(match) and same(a, b):
            return True
        for part in parts:
            ours = a[part.first * SIZES[a_dtype] : part.end * SIZES[a_dtype]]
            theirs = b[part.first * SIZES[b_dtype] : part.end * SIZES[b_dtype]]
            if not self._looks_at_all(match) and same(ours, theirs):
                continue
            if self.measure == "first" and part.place in self.found:
                continue
            found = measure(ours, a_dtype, theirs, b_dtype, part.start, match.how == "rounded")
            with self.lock:
                self.found.setdefault(part.place, Difference()).add(found)
        return False

    def _looks_at_all(self, match: Match) -> bool:
        return match.how == "values" or self.measure == "all"

    def finish(self, everything: bool) -> Outcome:
        """Completes the records, and puts together what was found."""
        outcome = Outcome(bytes=self.bytes)
        reader = Reader()

        def beside(record: Record, extent: Extent, data: memoryview) -> None:
            if extent.length <= PADDING and any(data):
                outcome.beside.append((record, extent))

        try:
            for ledger in self.ledgers:
                checked, unchecked = ledger.finish(reader, everything, beside)
                outcome.checked += checked
                outcome.unchecked += unchecked
                outcome.damage += ledger.damage.values()
        finally:
            reader.close()
        for place, item in enumerate(self.matches):
            ours, theirs = (
                None if entry is None or not item.is_read else self.covers[id(entry)].crc
                for entry in (item.a, item.b)
            )
            outcome.results.append(Result(item, (ours, theirs), self.found.get(place)))
        return outcome


class _Buffers:
    """One thread's memory: both sides, and what is rounded to be compared."""

    def __init__(self, size: int) -> None:
        self.a = Buffer(size)
        self.b = Buffer(size)
        self._size = size
        self._rounded: Buffer | None = None

    def rounded(self, view: memoryview, dtype: str, narrow: str) -> memoryview:
        """All elements of `view` in the type `narrow`."""
        from .cast import cast

        self._rounded = self._rounded or Buffer(self._size)
        size, into = SIZES[dtype], SIZES[narrow]
        count = len(view) // size
        result = self._rounded.view[: count * into]
        for start in range(0, count, CAST_BLOCK):
            stop = min(start + CAST_BLOCK, count)
            held = view[start * size : stop * size]
            cast(held, dtype, result[start * into : stop * into], narrow)
        return result


def compare(
    matches: Sequence[Match],
    a: Manifest,
    b: Manifest,
    *,
    jobs: int = 4,
    memory: int = 256 << 20,
    everything: bool = False,
    measure: str = "differing",
    begin: Callable[[int], Progress] | None = None,
) -> Outcome:
    """Reads all matches and compares them; `b` may be `a`.

    `everything` reads the records too that no tensor needs. `measure` says which elements are
    looked at as numbers: those of the first part of each tensor that differs ("first"), of all
    parts that do ("differing"), or all, so that cosines are right ("all"). `begin` is told the
    bytes to come and gives what is told of their progress. Damage is told, not raised.
    """
    chunk = chunk_size(max(a.dp, b.dp), jobs, memory * 2 // 5)  # up to five buffers a thread
    if a is not b:  # both sides are to stay in the processor's cache
        chunk = max(1 << 20, chunk // 2)
    read = [entry for item in matches if item.is_read for entry in (item.a, item.b) if entry]
    progress = begin(sum(entry.length for entry in read)) if begin else None
    running = _Comparison(matches, a, b, chunk, measure, progress)
    keep_open = files_per_thread(jobs)
    share(running.tasks(), jobs, lambda: running.worker(keep_open))
    return running.finish(everything)


def _by_slot(matches: Sequence[Match]) -> list[int]:
    """Places in an order in which neighbours are neighbours in their files."""
    slots: dict[str, int] = {}
    for item in matches:
        slots.setdefault(item.a.slot, len(slots))
    return sorted(range(len(matches)), key=lambda place: slots[matches[place].a.slot])


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same(a: memoryview, b: memoryview) -> bool:
    """Whether all bytes are equal; a comparison of memoryviews is twelve times slower."""
    if len(a) != len(b) or not len(a):
        return len(a) == len(b)
    places = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (a, b)]
    return not _libc.memcmp(*places, len(a))


def rounds_to(wide: memoryview, narrow: memoryview) -> bool:
    """Whether float32 numbers round to these bfloat16 ones, to nearest, ties to even.

    Without numpy, for few of them. False too where a NaN is, which `cast` knows how to round.
    """
    pairs = zip(wide.cast("I"), narrow.cast("H"), strict=True)
    return all(
        (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 == half and bits & 0x7FFFFFFF <= 0x7F800000
        for bits, half in pairs
    )


def measure(
    a: memoryview, a_dtype: str, b: memoryview, b_dtype: str, start: int, rounded: bool = False
) -> Difference:
    """The difference of elements that begin at number `start` of their tensors.

    Of equal types it is told by the bits: 0.0 and -0.0 differ, a NaN equals itself; but rounding
    may make any NaN of a NaN. Of different types it is told by value.
    """
    found = Difference()
    sizes, block = (SIZES[a_dtype], SIZES[b_dtype]), CAST_BLOCK
    for first in range(0, len(a) // sizes[0], block):
        views = [
            view[first * size : (first + block) * size]
            for view, size in zip((a, b), sizes, strict=True)
        ]
        found.add(_measure(views, (a_dtype, b_dtype), start + first, rounded))
    return found


def _measure(
    views: Sequence[memoryview], dtypes: tuple[str, str], start: int, rounded: bool
) -> Difference:
    import numpy as np

    from .cast import numbers, ordered

    found = Difference()
    values = [numbers(view, dtype) for view, dtype in zip(views, dtypes, strict=True)]
    known = all(held is not None for held in values)
    if dtypes[0] == dtypes[1]:
        bits: list[Any] = [np.frombuffer(view, f"u{SIZES[dtypes[0]]}") for view in views]
        unequal = bits[0] != bits[1]
        if rounded and known:
            unequal &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    elif known:
        unequal = (values[0] != values[1]) & ~(np.isnan(values[0]) & np.isnan(values[1]))
    else:
        return found
    places = np.flatnonzero(unequal)
    with np.errstate(invalid="ignore", over="ignore"):
        if known:
            found.dot = float(np.dot(values[0], values[1]))
            found.aa, found.bb = (float(np.dot(held, held)) for held in values)
        if not len(places):
            return found
        found.count, found.first = len(places), start + int(places[0])
        if known:
            ours, theirs = (held[places] for held in values)
            found.a, found.b = float(ours[0]), float(theirs[0])
            if dtypes[0] == dtypes[1] and dtypes[0] not in FLOATS:  # past 2**53 too
                raw = [np.frombuffer(view, _integer(dtypes[0])) for view in views]
                found.a, found.b = (int(held[places[0]]) for held in raw)
            distance = np.abs(ours - theirs)
            # between equal infinities, or of a NaN to anything
            distance[np.isnan(distance)] = np.inf
            found.max_abs = float(distance.max())
        if dtypes[0] == dtypes[1] and dtypes[0] in FLOATS:
            ranks = [ordered(held[places], dtypes[0]) for held in bits]
            found.max_ulp = max(abs(one - other) for one, other in _extremes(*ranks))
    return found


def _integer(dtype: str) -> str:
    """numpy's name of an integer type, or of BOOL's bytes."""
    return "u1" if dtype == "BOOL" else f"{dtype[0].lower()}{SIZES[dtype]}"


def _extremes(a: Any, b: Any) -> Iterator[tuple[int, int]]:
    """The pairs whose difference, which may not fit 64 bits, can be the largest."""
    distance = a.astype("f8") - b.astype("f8")
    for place in {int(distance.argmin()), int(distance.argmax())}:
        yield int(a[place]), int(b[place])
