"""Which regions of a target does this process write, if several processes share one conversion?

A copy shows all portions of its target to a `Sharing`, and writes those that it gets back. How the
processes agree is not known here, except for parts, which need no talk:

    Alone    one process writes everything
    Part     process K of N writes a share that follows from the sizes alone; the last one commits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Protocol

from msgspec import Struct

from ..core.manifest import Manifest
from ..errors import WrongOption
from .journals import PartJournal

if TYPE_CHECKING:
    from .journal import Identity, Journal, Region


class Portion(Struct, frozen=True):
    """Bytes [start, stop) of a target file, to be written by one process: a region to be."""

    file: str
    start: int
    stop: int
    is_complete: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


class Work(Struct, frozen=True):
    """What another process must know to write portions of a target.

    `shells` is the manifest of the target's files. `folder` is the path of the target's
    `.partial`. `chunk` are the bytes to copy at a time. `complete` are the portions that an earlier
    run has written: names of files, and where they start.
    """

    source: Manifest
    shells: Manifest
    from_masters: bool
    folder: str
    identity: Identity
    chunk: int
    complete: frozenset[tuple[str, int]]


class Sharing(Protocol):
    """This process's side of a conversion that several processes may share."""

    @property
    def part(self) -> str:
        """The name of this process's journal beside those of others; empty if it leads the run."""
        ...

    @property
    def is_alone(self) -> bool: ...

    def begin(self, work: Work) -> None:
        """The target's files are there, with holes: others may write into them from now on."""

    def mine(self, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
        """Of all portions of a target, those that this process shall write.

        They come in groups of neighbors in one file. Several groups are written at a time.
        """
        ...

    def check(self) -> None:
        """Raises if this process must not write any more. It is called before every write."""

    def others(self, journal: Journal) -> Iterable[Region] | None:
        """The regions that others have written; None if a process that goes on will complete all.

        It is called when this process has written its own portions.
        """
        ...

    def end(self, error: BaseException | None) -> None:
        """This process has ended its work, before anything is renamed or removed."""


class Alone(Struct, frozen=True):
    """One process writes everything, in the order of the files."""

    part: str = ""
    is_alone: bool = True

    def begin(self, work: Work) -> None:
        pass

    def mine(self, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
        return by_file(portions)

    def check(self) -> None:
        pass

    def others(self, journal: Journal) -> Iterable[Region]:
        return ()

    def end(self, error: BaseException | None) -> None:
        pass


ALONE = Alone()


class Part(Struct, frozen=True):
    """Part `number` of `count`, counted from 1: processes that share a filesystem and no more."""

    number: int
    count: int
    is_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise WrongOption(
                f"--part {self} does not exist",
                hint=f"parts are counted from 1: the last one is {self.count}/{self.count}",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def part(self) -> str:
        return f"{self.number}-of-{self.count}"

    def begin(self, work: Work) -> None:
        pass

    def mine(self, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
        return by_file(shares(portions, self.count)[self.number - 1])

    def check(self) -> None:
        pass

    def others(self, journal: Journal) -> Iterable[Region] | None:
        assert isinstance(journal, PartJournal)
        return journal.of_all_parts()

    def end(self, error: BaseException | None) -> None:
        pass


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
