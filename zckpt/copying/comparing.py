"""Compares complete tensors during a copy; processes that share the copy share the comparison.

Masters are compared with their weights, and replicas of ranks with each other. All tensors that one
check compares form a sequence of bytes, called a row. A row is treated like a file: its regions are
assigned to processes and recorded in the journal, under a name that no file can have. So a target
is complete only when all tensors have been compared, whichever processes, parts and later runs did
it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct, field

from ..core.checkpoint.dtypes import SIZES
from ..core.comparison.compare import FEW, Buffers
from ..core.comparison.difference import measure_difference, same
from ..core.passes.full_checks import Differing, FullCheck
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.passes.plan import Match
from . import filling
from .journal import Passed, Region
from .sharing import Portion

DIFFERS = "differs"
"""The kind of a journal item that says by how much two tensors differ.

The item is ((DIFFERS, number of the pair of tensors, first element that differs), number of
differing elements, bits of the largest distance as an integer, number of NaNs).
"""
NO_NUMBERS = -1  # in place of a distance; as bits it is a NaN, which no distance is


class ComparedPart(Struct, frozen=True):
    """Elements [start, stop) of a pair of tensors, which are compared in one step.

    row       all pairs of tensors that the same check compares
    region    where the region with these elements begins in the row, in bytes
    number    the index of the pair in the row
    match     the pair of tensors
    """

    row: Row
    region: int
    number: int
    match: Match
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of bytes to read from both tensors."""
        return (self.stop - self.start) * _bytes_per_element(self.match)


class _Region(Struct, eq=False):
    stop: int
    left: int = 0
    differing: dict[int, Differing] = field(default_factory=dict)


class Row:
    """All tensors that `check` compares, as one sequence of bytes.

    A row is treated like a file: it has regions (byte ranges) of up to about 256 MiB, and the
    journal lists the finished ones. `name` is the row's name in the journal; a slash at its end
    tells it from file names. `memory` is the size in bytes of a thread's three buffers together.
    """

    def __init__(self, name: str, check: FullCheck, memory: int) -> None:
        self.name, self.check, self._memory = name, check, memory
        self._matches = check.matches
        lengths = (match.a.numel * _bytes_per_element(match) for match in self._matches)
        self._begins = [0, *accumulate(lengths)]
        self.length = self._begins[-1]
        widths = [_bytes_per_element(match) for match in self._matches if match.a.numel]
        # an element begins in every region: the last one may have some bytes more
        starts = range(0, self.length - widths[-1] + 1 if widths else 0, filling.REGION)
        self._regions = {start: _Region(start + filling.REGION) for start in starts}
        if starts:
            self._regions[starts[-1]].stop = self.length

    def portions(self, complete: set[tuple[str, int]]) -> Iterator[Portion]:
        for start, region in self._regions.items():
            yield Portion(self.name, start, region.stop, (self.name, start) in complete)

    def parts(self, portions: Sequence[Portion]) -> Iterator[ComparedPart]:
        for portion in portions:
            parts = [*self._parts(portion.start, portion.stop)]
            self._regions[portion.start].left = len(parts)
            yield from parts

    def _parts(self, begin: int, end: int) -> Iterator[ComparedPart]:
        """Divides the region [begin, end) of the row, in bytes, into parts to compare.

        An element that crosses a region's end belongs to the region with its first byte.
        """
        for number, match in enumerate(self._matches):
            first, width = self._begins[number], _bytes_per_element(match)
            start, stop = (
                min(match.a.numel, max(0, -((first - edge) // width))) for edge in (begin, end)
            )
            most = self._memory // 3 // max(SIZES[match.a.dtype], width - SIZES[match.a.dtype])
            for at in range(start, stop, most):
                yield ComparedPart(self, begin, number, match, at, min(at + most, stop))

    def compare(
        self, part: ComparedPart, reader: ElementReader, buffers: Buffers
    ) -> Differing | None:
        """Compares the elements of a part; returns their difference, or None if they are equal.

        For a check without `measures`, the result is also None after an earlier element of the same
        tensors, in the same region, was found to differ. No checksums are computed.
        """
        views = []
        assert part.match.b is not None
        for entry, buffer in ((part.match.a, buffers.a), (part.match.b, buffers.b)):
            request = ReadRequest(entry, part.start, part.stop, 0, check=False)
            views.append(buffer[: request.end])
            reader.read([request], views[-1])
        a, a_dtype, b, b_dtype = buffers.alike(part.match, *views)
        known = self._regions[part.region].differing.get(part.number)
        is_known = known is not None and known.first < part.start and not self.check.measures
        if is_known or same(a, b):
            return None
        is_rounded = part.match.how == "rounded"
        difference = measure_difference(a, a_dtype, b, b_dtype, part.start, is_rounded)
        if difference.first is None:
            return None
        if not self.check.measures:
            return Differing(difference.first)
        distance, nans = difference.max_abs, sum(difference.nans)
        return Differing(difference.first, difference.count, distance, nans)

    def compared(self, part: ComparedPart, difference: Differing | None) -> Region | None:
        """Counts a part as compared, and keeps its difference until its region is finished.

        After the last part of a region (byte range of the row), returns the region with all its
        differences, to record it in the journal. After all other parts, returns None.
        """
        region = self._regions[part.region]
        if difference is not None:
            known = region.differing.get(part.number)
            region.differing[part.number] = difference.with_more(known)
        region.left -= 1
        if region.left:
            return None
        passed = [_noted(number, each) for number, each in sorted(region.differing.items())]
        return Region(self.name, part.region, region.stop, passed)


def rows_of(checks: Sequence[FullCheck], memory: int) -> dict[str, Row]:
    """Makes a `Row` for each check: the sequence of all tensors that the check compares.

    Returns the rows by name. Checks without tensors get no row. `memory` is the size in bytes of a
    thread's three buffers together.
    """
    rows: dict[str, Row] = {}
    for check in checks:
        if check.matches:
            same_name = sum(row.check.name == check.name for row in rows.values())
            name = f"{check.name}/{same_name}/" if same_name else f"{check.name}/"
            rows[name] = Row(name, check, memory)
    return rows


def is_row(name: str) -> bool:
    """Whether the journal uses `name` for tensors that are compared (a `Row`), not for a file."""
    return name.endswith("/")


def buffers_for(rows: Mapping[str, Row], memory: int) -> Buffers | None:
    """The buffers in which one thread compares tensors; None if there are no tensors to compare.

    Together the buffers have `memory` bytes.
    """
    if not rows:
        return None
    matches = (match for row in rows.values() for match in row.check.matches)
    elements = sum(match.a.numel for match in matches if match.how == "rounded")
    return Buffers(memory // 3, elements <= FEW)


def _noted(number: int, difference: Differing) -> Passed:
    distance = difference.max_abs
    bits = NO_NUMBERS if distance is None else struct.unpack("<q", struct.pack("<d", distance))[0]
    return (DIFFERS, number, difference.first), difference.count, bits, difference.nans


def differing(passed: Sequence[Passed]) -> dict[int, Differing]:
    """Selects the differences of tensors from the journal's items about one region (byte range).

    Maps the index of a match (two compared tensors) to the difference. Only regions of a `Row` have
    differences; the result is empty for a region of a target file.
    """
    return {
        number: Differing(first, count, _distance(bits), nans)
        for (kind, number, first), count, bits, nans in passed
        if kind == DIFFERS
    }


def _distance(bits: int) -> float | None:
    if bits == NO_NUMBERS:
        return None
    (distance,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(distance)


def _bytes_per_element(match: Match) -> int:
    return sum(SIZES[entry.dtype] for entry in (match.a, match.b) if entry)
