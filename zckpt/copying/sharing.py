"""Which regions of a target does this process write, if several processes share one conversion?

A copy shows all portions of its target to a `Sharing`, and writes those that it gets back:

    Sharing      one process writes everything
    Part         process K of N writes a share that follows from the sizes; the last one completes
    Processes    processes that can talk (processes/sharing.py): each takes what is next
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import groupby

from msgspec import Struct

from ..core.passes.resources import Progress
from ..errors import WrongOption
from .journal import Identity, Journal, Region
from .journals import PartJournal

Begun = tuple[int, int] | tuple[int, int, str]
"""Length and CRC-32 of a journal; without locks also the writer in the name of its directory."""


class Portion(Struct, frozen=True):
    """Bytes [start, stop) of a target file, to be written by one process: a region to be."""

    file: str
    start: int
    stop: int
    is_complete: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


class Sharing:
    """This process's side of a conversion: here it writes everything, in the order of the files.

    Processes that can talk call `agree_on`, then rank 0 `begin` where the others call `begun`, then
    all `mine`, `others` and `end`. `rank` is 0 unless another process lays the target's files, and
    completes it.
    """

    rank = 0
    is_alone = True

    @property
    def part(self) -> str:
        """The name of this process's journal beside those of others; empty if it leads the run."""
        return ""

    def agree_on(self, identity: Identity, target: str) -> None:
        """Raises WrongOption if another process was started for another conversion."""

    def begin(self, journal: Journal) -> None:
        """The target's files are there, with holes: others may write into them from now on."""

    def begun(self) -> Begun | None:
        """Rank 0's journal at `begin`; None if it writes nothing."""
        return None

    def mine(
        self, portions: Sequence[Portion], progress: Progress | None
    ) -> Iterator[Sequence[Portion]]:
        """Of all portions of a target, those that this process shall write.

        They come in groups of neighbors in one file. Several groups are written at a time.
        `progress` gets the bytes that others write.
        """
        return by_file(portions)

    def check(self) -> None:
        """Raises if this process must not write any more. It is called before every write."""

    def others(self, journal: Journal) -> Iterable[Region] | None:
        """The regions that others have written; None if a process that goes on will complete all.

        It is called when this process has written its own portions.
        """
        return ()

    def end(self) -> None:
        """Returns when rank 0 has completed the target, or has found that nothing is to be done."""


ALONE = Sharing()


@contextmanager
def ended(sharing: Sharing) -> Iterator[None]:
    """All processes leave the block together, unless one fails."""
    yield
    sharing.end()


class Part(Sharing, Struct, frozen=True):
    """Part `number` of `count`, counted from 1: processes that share a filesystem and no more."""

    number: int
    count: int

    is_alone = False

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise WrongOption(
                "option-invalid",
                f"--part {self} does not exist",
                hint=f"parts are counted from 1: the last one is {self.count}/{self.count}",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def part(self) -> str:
        return f"{self.number}-of-{self.count}"

    def mine(
        self, portions: Sequence[Portion], progress: Progress | None
    ) -> Iterator[Sequence[Portion]]:
        return by_file(shares(portions, self.count)[self.number - 1])

    def others(self, journal: Journal) -> Iterable[Region] | None:
        assert isinstance(journal, PartJournal)
        return journal.of_all_parts()


def by_file(portions: Iterable[Portion]) -> Iterator[Sequence[Portion]]:
    """The portions that nobody has written, file by file."""
    left = (portion for portion in portions if not portion.is_complete)
    for _, same in groupby(left, key=lambda portion: portion.file):
        yield list(same)


def largest_first(portions: Iterable[Portion]) -> list[Portion]:
    """The order in which portions are handed out: small ones in the end even out the load."""
    return sorted(portions, key=lambda portion: -portion.length)


def shares(portions: Iterable[Portion], count: int) -> list[list[Portion]]:
    """All portions as `count` shares of about the same number of bytes, the same in all processes.

    The largest portion goes to the smallest share so far. Shares keep the order of the files.
    """
    order = list(portions)
    place = {portion: number for number, portion in enumerate(order)}
    result: list[list[Portion]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for portion in largest_first(order):
        load, number = heappop(loads)
        result[number].append(portion)
        heappush(loads, (load + portion.length, number))
    return [sorted(share, key=place.__getitem__) for share in result]
