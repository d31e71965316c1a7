"""Divides the files of a target among processes that share one conversion.

A portion is a byte range of a file. A copy passes all portions to a `Sharing`, and writes those
that it gets back:

    Sharing      one process writes everything
    Part         process K of N writes a share that follows from the sizes; the last one completes
    Processes    processes that communicate (processes/sharing.py): each takes the next portion
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

# a network filesystem may show the journal late: a process waits until the values match, and finds
# the unfinished target's directory by the third one
Begun = tuple[int, int] | tuple[int, int, str]
"""What rank 0 tells the processes that join: the length and the CRC-32 of its journal.

On a filesystem without locks, the third value is the name of rank 0's process, such as
`node7-4711-9f2c8a1b`.
"""


class Portion(Struct, frozen=True):
    """A byte range [start, stop) of a target file that one process must write.

    Once it is written, the journal records it as a region.
    """

    file: str
    start: int
    stop: int
    is_complete: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


class Sharing:
    """Decides which portions (byte ranges) of a target this process writes; here it writes all.

    Processes that communicate call, in this order: `agree_on`; `begin` in rank 0, `begun` in all
    other ranks; `mine`; `regions_of_others`; `end`. Rank 0 creates and completes the target's
    files. A process that does not communicate has rank 0 too.
    """

    rank = 0
    is_alone = True

    @property
    def part(self) -> str:
        """How the name of this process's journal (list of written regions) ends, such as "2-of-8".

        Empty if the process writes alone, or leads the others.
        """
        return ""

    def agree_on(self, identity: Identity, target: str) -> None:
        """Raises WrongOption if another process runs another conversion, or has another target."""

    def begin(self, journal: Journal) -> None:
        """Tells the other processes that the target's files exist and may be filled."""

    def begun(self) -> Begun | None:
        """Waits until rank 0 has called `begin`; returns the length and CRC-32 of its journal.

        On a filesystem without locks, the result also has the name that identifies rank 0's
        process. The result is None if rank 0 writes nothing.
        """
        return None

    def mine(
        self, portions: Sequence[Portion], progress: Progress | None
    ) -> Iterator[Sequence[Portion]]:
        """Selects what this process must write: some of `portions`, which are those of the target.

        Yields groups of portions; the portions of a group are in one file, and not complete yet.
        `progress` is called with the number of bytes that other processes write.
        """
        return by_file(portions)

    def check(self) -> None:
        """Raises an error if another process has failed, since this one must then stop writing.

        The copy calls this method before every write.
        """

    def regions_of_others(self, journal: Journal) -> Iterable[Region] | None:
        """The regions that other processes have written, for the process that completes the target.

        None if another process will complete it. Each process calls this after it has written its
        portions.
        """
        return ()

    def end(self) -> None:
        """Waits until rank 0 has completed the target, or has found nothing to write."""


ALONE = Sharing()


@contextmanager
def ended(sharing: Sharing) -> Iterator[None]:
    """Runs a `with` block whose work several processes may share; at its end they wait for all.

    They do not wait if the block raises an error.
    """
    yield
    sharing.end()


class Part(Sharing, Struct, frozen=True):
    """Part `number` of `count` (from 1) of a conversion that several commands share: --part K/N.

    Parts share a filesystem, and do not communicate.
    """

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

    def regions_of_others(self, journal: Journal) -> Iterable[Region] | None:
        assert isinstance(journal, PartJournal)
        return journal.of_all_parts()


def by_file(portions: Iterable[Portion]) -> Iterator[Sequence[Portion]]:
    """Yields the portions that must still be written, as one list for each file."""
    left = (portion for portion in portions if not portion.is_complete)
    for _, same in groupby(left, key=lambda portion: portion.file):
        yield list(same)


def largest_first(portions: Iterable[Portion]) -> list[Portion]:
    """Sorts portions, the largest first: small ones at the end even out the load."""
    return sorted(portions, key=lambda portion: -portion.length)


def shares(portions: Iterable[Portion], count: int) -> list[list[Portion]]:
    """Divides all portions into `count` shares of similar size, identically in all processes.

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
