"""Compares the tensors that two checkpoints share: which elements differ, and by how much.

Both checkpoints are read in the order of the first one, one buffer at a time, and compared as
bytes. Only elements that differ are compared as numbers (`difference`). While reading, the CRC-32
of every tensor is computed, and of every record (byte range with a stated CRC-32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

from msgspec import Struct, field
from msgspec.structs import astuple

from ..checkpoint.cast import cast, rounded
from ..checkpoint.dtypes import SIZES
from ..checkpoint.entries import Entry
from ..checkpoint.manifest import Manifest
from ..passes.pieces import ElementReader, ReadRequest
from ..passes.plan import Match
from ..passes.pooling import Claim, claimed
from ..passes.resources import DEFAULT_COPYING, Begin, Copying, Progress, describe
from ..passes.streaming import chunk_size, finish, stream
from ..storage.checksum import Cover, crc32
from ..storage.fileio import Buffer
from ..storage.fragments import Extent, Record
from ..storage.records import Damage, RecordChecker, RecordCounts
from ..storage.sources import files_seen
from .difference import Difference, measure_difference, same

PADDING = 64 << 10  # bytes; a larger gap between tensors is no padding
FEW = 1 << 17  # elements; up to this number, masters are rounded without numpy


class Result(Struct, frozen=True):
    """The result of comparing one pair of tensors.

    The digests are the CRC-32s of both tensors' row-major bytes; None for a tensor that was not
    read.
    """

    match: Match
    digests: tuple[int | None, int | None]
    difference: Difference | None

    @property
    def differs(self) -> bool:
        """Whether any compared element differs."""
        return self.difference is not None and self.difference.count > 0


class ComparisonOutcome(Struct, eq=False):
    """The results of comparing two checkpoints.

    results    one for each pair of tensors, in order
    damage     byte ranges with a wrong CRC-32
    beside     padding that is not zero
    records    how many byte ranges (zip members etc.) were checked
    bytes      how many bytes were read
    """

    results: list[Result] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    beside: list[tuple[Record, Extent]] = field(default_factory=list)
    records: RecordCounts = field(default_factory=RecordCounts)
    bytes: int = 0


class _MatchPart(Struct, frozen=True):
    """Elements [start, stop) of the pair of tensors `number`, which are compared in one step.

    They begin at element `first` of the buffers, one for each checkpoint.
    """

    number: int
    match: Match
    start: int
    stop: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.stop - self.start


class _Side(Struct, frozen=True):
    """The elements that were read from one of the two checkpoints: the requests and the buffer."""

    view: memoryview
    requests: Sequence[ReadRequest]


class _Comparison(Struct, eq=False, dict=True):
    """A comparison of two checkpoints in progress, which the threads of this process share."""

    matches: Sequence[Match]
    manifests: tuple[Manifest, Manifest]
    chunk: int
    jobs: int
    measure: str
    progress: Progress | None

    def __post_init__(self) -> None:
        a, b = self.manifests
        sides = [a] if b is a else [a, b]
        self.checkers = [
            RecordChecker(side.files.records, collect=True, fingerprints=side.files.fingerprints)
            for side in sides
        ]
        self.covers: dict[int, Cover] = {}
        # by the entry's identity: the first match that reads it, which counts its bytes
        self.first: dict[int, int] = {}
        for number, item in enumerate(self.matches):
            for entry in (item.a, item.b):
                if entry is not None and item.is_read:
                    self.covers.setdefault(id(entry), Cover(entry.length))
                    self.first.setdefault(id(entry), number)
        self.differences: dict[int, Difference] = {}  # by the number of the match
        self.are_few = sum(item.a.numel for item in self.matches if item.how == "rounded") <= FEW
        self.bytes = 0
        self.lock = Lock()

    def run(self, claim: Claim) -> None:
        tasks = claimed(self.tasks(), _bytes_of, claim, self.progress)
        stream(tasks, self.jobs, self.checkers, self.chunk, self.start)

    def tasks_by_name(self) -> Any:
        names = [(item.a.name, item.b and item.b.name, item.how) for item in self.matches]
        return [
            self.measure,
            names,
            *(files_seen(item.root, item.files.fingerprints) for item in self.manifests),
        ]

    def findings(self) -> Any:
        """The results of this process as JSON, to send to the other processes.

        They list the CRC-32s of tensors and of records (zip members etc.) in the same order
        everywhere.
        """
        return {
            "tensors": [cover.parts() for cover in self.covers.values()],
            "records": [[*checker.parts()] for checker in self.checkers],
            "differences": [(n, astuple(item)) for n, item in self.differences.items()],
            "bytes": self.bytes,
        }

    def take(self, report: Any) -> None:
        for cover, parts in zip(self.covers.values(), report["tensors"], strict=True):
            for part in parts:
                cover.add(*part)
        for checker, passed in zip(self.checkers, report["records"], strict=True):
            for part in passed:
                checker.passed_before(*part)
        for number, values in report["differences"]:
            self.differences.setdefault(number, Difference()).add(Difference(*values))
        self.bytes += report["bytes"]

    def tasks(self) -> Iterator[list[_MatchPart]]:
        """Divides the comparison into tasks: lists of parts of tensor pairs that fit into buffers.

        All parts of a task have the same dtypes. They are adjacent in the buffers.
        """
        parts: list[_MatchPart] = []
        end, kind = 0, None
        for number in _by_slot(self.matches):
            item = self.matches[number]
            if item.is_read:
                describe(self.progress, f"{'comparing' if item.b else 'checking'} {item.a.name}")
            types = item.a.dtype, item.b.dtype if item.b else None, item.how
            room = self.chunk // max(SIZES[dtype] for dtype in types[:2] if dtype)
            if types != kind:
                if parts:
                    yield parts
                parts, end, kind = [], 0, types
            if not item.is_read:
                continue
            start = 0
            while start < item.a.numel:
                stop = min(item.a.numel, start + room - end)
                parts.append(_MatchPart(number, item, start, stop, end))
                end += stop - start
                start = stop
                if end == room:
                    yield parts
                    parts, end = [], 0
        if parts:
            yield parts

    def start(self, sides: Sequence[ElementReader]) -> Callable[[list[_MatchPart]], None]:
        """Allocates one thread's buffers; returns a function that compares the parts of a task."""
        buffers = Buffers(self.chunk, self.are_few)
        return lambda parts: self._carry_out(parts, sides, buffers)

    def _carry_out(
        self, parts: list[_MatchPart], sides: Sequence[ElementReader], buffers: Buffers
    ) -> None:
        match = parts[0].match
        a = self._read(parts, "a", sides[0], buffers.a)
        b = None if match.b is None else self._read(parts, "b", sides[-1], buffers.b)
        equal = b is not None and self._compare(parts, a.view, b.view, buffers)
        crcs = self._hash(a, {})
        if b is not None:  # equal bytes have equal CRCs
            self._hash(b, crcs if equal and match.how == "bits" else {})
        count = len(a.view) + (len(b.view) if b else 0)
        with self.lock:
            self.bytes += count
        if self.progress:
            self.progress(count)

    def _read(
        self, parts: Sequence[_MatchPart], side: str, reader: ElementReader, buffer: memoryview
    ) -> _Side:
        """Reads the elements of all parts from checkpoint `a` or `b` (`side`) into `buffer`."""
        requests = []
        for part in parts:
            entry: Entry = getattr(part.match, side)
            at = part.first * SIZES[entry.dtype]
            counts = self.first[id(entry)] == part.number
            requests.append(ReadRequest(entry, part.start, part.stop, at, counts))
        view = buffer[: requests[-1].end]
        reader.read(requests, view)
        return _Side(view, requests)

    def _hash(self, side: _Side, crcs_of_equal: Mapping[int, int]) -> dict[int, int]:
        """Computes the CRC-32s of the parts, and adds them to the CRC-32s of their tensors.

        Returns them by the part's first element in the buffer. If both checkpoints have the same
        bytes, `crcs_of_equal` is the result for the other one, and nothing is computed again.
        """
        crcs: dict[int, int] = {}
        for item in side.requests:
            if not item.check:
                continue
            size = SIZES[item.entry.dtype]
            crc = crcs_of_equal.get(item.at // size)
            if crc is None:
                crc = crc32(side.view[item.at : item.end])
            with self.lock:
                self.covers[id(item.entry)].add(item.start * size, item.stop * size, crc)
            crcs[item.at // size] = crc
        return crcs

    def _compare(
        self, parts: Sequence[_MatchPart], a: memoryview, b: memoryview, buffers: Buffers
    ) -> bool:
        """Compares the elements in both buffers, and measures the differences.

        Returns True if all bytes are equal, so that nothing had to be measured.
        """
        match = parts[0].match
        a, a_dtype, b, b_dtype = buffers.alike(match, a, b)
        if not self._looks_at_all(match) and same(a, b):
            return True
        for part in parts:
            ours = a[part.first * SIZES[a_dtype] : part.end * SIZES[a_dtype]]
            theirs = b[part.first * SIZES[b_dtype] : part.end * SIZES[b_dtype]]
            if not self._looks_at_all(match) and same(ours, theirs):
                continue
            if self.measure == "first" and part.number in self.differences:
                continue
            difference = measure_difference(
                ours, a_dtype, theirs, b_dtype, part.start, match.how == "rounded"
            )
            with self.lock:
                self.differences.setdefault(part.number, Difference()).add(difference)
        return False

    def _looks_at_all(self, match: Match) -> bool:
        return match.how == "values" or self.measure == "all"

    def finish(self, everything: bool) -> ComparisonOutcome:
        """Checks records (zip members etc.) of which only a part was read; returns the outcome."""
        outcome = ComparisonOutcome(bytes=self.bytes)

        def beside(record: Record, extent: Extent, data: memoryview) -> None:
            if extent.length <= PADDING and any(data):
                outcome.beside.append((record, extent))

        outcome.records = finish(self.checkers, everything, beside)
        for checker in self.checkers:
            outcome.damage += checker.damage.values()
        for number, item in enumerate(self.matches):
            ours, theirs = (
                None if entry is None or not item.is_read else self.covers[id(entry)].crc
                for entry in (item.a, item.b)
            )
            outcome.results.append(Result(item, (ours, theirs), self.differences.get(number)))
        return outcome


class Buffers:
    """The buffers of one thread: one for each checkpoint, and one for rounded elements.

    If `are_few` is true, elements are rounded without numpy, whose import costs time and 14 MiB.
    """

    def __init__(self, size: int, are_few: bool) -> None:
        self.a, self.b, self._rounded = (Buffer(size).view for _ in range(3))
        self.are_few = are_few

    def alike(
        self, match: Match, a: memoryview, b: memoryview
    ) -> tuple[memoryview, str, memoryview, str]:
        """Returns the elements of both checkpoints with their dtypes, ready to be compared.

        If the pair is compared as `rounded`, the elements of the wider dtype are rounded first. The
        result is (elements of a, dtype, elements of b, dtype).
        """
        assert match.b is not None
        a_dtype, b_dtype = match.a.dtype, match.b.dtype
        if match.how == "rounded" and match.rounds_a:
            return self.rounded(a, a_dtype, b_dtype), b_dtype, b, b_dtype
        if match.how == "rounded":
            return a, a_dtype, self.rounded(b, b_dtype, a_dtype), a_dtype
        return a, a_dtype, b, b_dtype

    def rounded(self, wide: memoryview, wide_dtype: str, narrow_dtype: str) -> memoryview:
        """Rounds all numbers to `narrow_dtype`; the next call overwrites the result."""
        result = self._rounded[: len(wide) // SIZES[wide_dtype] * SIZES[narrow_dtype]]
        few = rounded(bytes(wide), narrow_dtype) if self.are_few and wide_dtype == "F32" else None
        if few is None:
            cast(wide, wide_dtype, result, narrow_dtype)
        else:
            result[:] = few
        return result


def compare(
    matches: Sequence[Match],
    a: Manifest,
    b: Manifest,
    copying: Copying = DEFAULT_COPYING,
    *,
    everything: bool = False,
    measure: str = "differing",
    begin: Begin | None = None,
) -> ComparisonOutcome:
    """Reads and compares all pairs of tensors; `b` may be the same manifest as `a`.

        everything    whether to read records (zip members etc.) that hold no tensor, too
        measure       what is compared as numbers: "differing" parts of a tensor, the "first" of
                      them only, or "all" parts (for exact cosines). A part fits into a buffer
        begin         called with the number of bytes to read; returns a function, which is called
                      with the number of bytes whenever some were read

    Damage is listed in the outcome, not raised. The processes of `copying.pool` share the reading.
    """
    # up to five buffers a thread
    chunk = chunk_size(max(a.dp, b.dp), copying.jobs, copying.memory * 2 // 5)
    if a is not b:  # the elements of both sides should fit into the processor's cache
        chunk = max(1 << 20, chunk // 2)
    entries_read = [
        entry for item in matches if item.is_read for entry in (item.a, item.b) if entry
    ]
    progress = begin(sum(entry.length for entry in entries_read)) if begin else None

    def begun(chunk_of_all: int) -> _Comparison:
        jobs = max(1, copying.jobs * chunk // chunk_of_all)
        return _Comparison(matches, (a, b), chunk_of_all, jobs, measure, progress)

    return copying.pool.carry_out(begun, chunk).finish(everything)


def _bytes_of(parts: Sequence[_MatchPart]) -> int:
    match = parts[0].match
    sides = [SIZES[entry.dtype] for entry in (match.a, match.b) if entry]
    return sum(part.stop - part.start for part in parts) * sum(sides)


def _by_slot(matches: Sequence[Match]) -> list[int]:
    """Orders the indices of the pairs: pairs of one slot, such as `exp_avg`, come together."""
    slots: dict[str, int] = {}  # tensors of one slot are neighbors in files
    for item in matches:
        slots.setdefault(item.a.slot, len(slots))
    return sorted(range(len(matches)), key=lambda number: slots[matches[number].a.slot])
