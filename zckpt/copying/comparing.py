"""Compares masters with weights during a copy; the processes that share the copy share this too.

All masters with their weights are treated as one file, the row. Its regions are assigned and noted
as those of files are, under a name that no file can have. So a target is complete only when all of
them have been compared, whichever processes, parts and later runs did it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct, field

from ..core.checkpoint.dtypes import SIZES
from ..core.comparison.compare import FEW, Buffers
from ..core.comparison.difference import measure_difference, same
from ..core.comparison.masters import Rounding
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.passes.plan import Match
from . import filling
from .journal import Passed, Region
from .sharing import Portion

MASTERS = "masters/"
"""The name of the row in the journal, where regions of files have the file's name."""
DIFFERS = "differs"
"""The kind of a key in a region that notes the first differing element of a match."""


class MasterPart(Struct, frozen=True):
    """Elements [start, stop) of a match, in the region that begins at `region`."""

    region: int
    number: int
    match: Match
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The bytes of masters and weights together."""
        return (self.stop - self.start) * _width(self.match)


class _Region(Struct, eq=False):
    stop: int
    left: int = 0
    differing: dict[int, int] = field(default_factory=dict)


class MasterRow:
    """The masters and weights of `rounding` as one sequence of bytes, divided into regions.

    The parts of a region need `memory` bytes in three buffers.
    """

    def __init__(self, rounding: Rounding, memory: int) -> None:
        self._rounding, self._memory = rounding, memory
        self._matches = rounding.matches
        lengths = (match.a.numel * _width(match) for match in self._matches)
        self._begins = [0, *accumulate(lengths)]
        self.length = self._begins[-1]
        edges = range(0, self.length, filling.REGION)
        self._regions = {
            start: _Region(min(start + filling.REGION, self.length)) for start in edges
        }

    def portions(self, complete: set[tuple[str, int]]) -> Iterator[Portion]:
        for start, region in self._regions.items():
            yield Portion(MASTERS, start, region.stop, (MASTERS, start) in complete)

    def parts(self, portions: Sequence[Portion]) -> Iterator[MasterPart]:
        for portion in portions:
            parts = [*self._parts(portion.start, portion.stop)]
            self._regions[portion.start].left = len(parts)
            yield from parts

    def _parts(self, begin: int, end: int) -> Iterator[MasterPart]:
        """Cuts bytes [begin, end) of the row into parts.

        An element belongs to the region that contains its first byte.
        """
        for number, match in enumerate(self._matches):
            first, width = self._begins[number], _width(match)
            start, stop = (
                min(match.a.numel, max(0, -((first - edge) // width))) for edge in (begin, end)
            )
            most = self._memory // 3 // max(SIZES[match.a.dtype], width - SIZES[match.a.dtype])
            for at in range(start, stop, most):
                yield MasterPart(begin, number, match, at, min(at + most, stop))

    def buffers(self) -> Buffers:
        """The buffers of one thread."""
        elements = sum(match.a.numel for match in self._matches)
        return Buffers(self._memory // 3, elements <= FEW)

    def first(self, part: MasterPart, reader: ElementReader, buffers: Buffers) -> int | None:
        """Compares a part; returns its first element at which the master does not round.

        None if there is none, or if an earlier element of this master in the same region is known
        to differ. The bytes that are read here are not hashed for any checksum.
        """
        views = []
        assert part.match.b is not None
        for entry, buffer in ((part.match.a, buffers.a), (part.match.b, buffers.b)):
            request = ReadRequest(entry, part.start, part.stop, 0, check=False)
            views.append(buffer[: request.end])
            reader.read([request], views[-1])
        a, a_dtype, b, b_dtype = buffers.alike(part.match, *views)
        first_known = self._regions[part.region].differing.get(part.number, part.start)
        if first_known < part.start or same(a, b):
            return None
        is_rounded = part.match.how == "rounded"
        return measure_difference(a, a_dtype, b, b_dtype, part.start, is_rounded).first

    def compared(self, part: MasterPart, first: int | None) -> Region | None:
        """Counts a part as compared; `first` is its first element that differs, or None.

        Returns the part's region, with the first difference of every match in it, if this was the
        region's last part; otherwise None.
        """
        region = self._regions[part.region]
        if first is not None:
            region.differing[part.number] = min(first, region.differing.get(part.number, first))
        region.left -= 1
        if region.left:
            return None
        passed = [((DIFFERS, *place), 0, 0, 0) for place in sorted(region.differing.items())]
        return Region(MASTERS, part.region, region.stop, passed)

    def refuse(self, region: Region) -> None:
        """Raises an error if the region notes differing masters, unless they are accepted."""
        self._rounding.refuse(differing(region.passed))


def differing(passed: Sequence[Passed]) -> Mapping[int, int]:
    """Maps the index of each match that differs in a region to its first element that differs."""
    return {number: first for (kind, number, first), *_ in passed if kind == DIFFERS}


def _width(match: Match) -> int:
    """The bytes of an element of the master and of the weight together."""
    return sum(SIZES[entry.dtype] for entry in (match.a, match.b) if entry)
