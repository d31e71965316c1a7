"""Which tasks of a pass over tensors does this process carry out, if several processes share it?

All processes list the same tasks in the same order. A block is so many tasks that follow each other
that nobody asks for a number too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol, TypeVar

BLOCK = 64 << 20  # bytes
Task = TypeVar("Task")
Claim = Callable[[], int]
"""Gives the number of the next block of tasks for this process; numbers only grow."""


class Pool(Protocol):
    """The processes that share a pass, as the one sees them that leads it."""

    def begin(self, work: Any) -> Claim:
        """Lets the others take part in a pass, of which `work` is all that they must know."""
        ...

    def others(self) -> Iterable[Any]:
        """What each of the others has found, once all blocks are done."""
        ...


class Single:
    """One process carries out everything."""

    def begin(self, work: Any) -> Claim:
        return count().__next__

    def others(self) -> Iterable[Any]:
        return ()


SINGLE = Single()


def claimed(tasks: Iterable[Task], size_of: Callable[[Task], int], claim: Claim) -> Iterator[Task]:
    """The tasks of the blocks that this process gets; `size_of` gives the bytes of a task."""
    mine, number, filled = claim(), 0, 0
    for task in tasks:
        if filled >= BLOCK:
            number, filled = number + 1, 0
            if number > mine:
                mine = claim()
        filled += size_of(task)
        if number == mine:
            yield task
