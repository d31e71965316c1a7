"""Which tasks of a comparison does this process carry out, if several processes share it?

All processes list the same tasks in the same order. A block is a run of consecutive tasks, long
enough that asking for the next number costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol, TypeVar

BLOCK = 64 << 20  # bytes
Task = TypeVar("Task")
Claim = Callable[[], int]
"""Gives the number of the next block of tasks for this process; numbers only grow."""


class Pass(Protocol):
    """A pass over tensors, and what this process has found. What processes exchange is JSON."""

    def run(self, claim: Claim) -> None:
        """Carries out the blocks that this process gets."""

    def tasks_by_name(self) -> Any:
        """What must be the same in all processes, so that they have the same tasks."""
        ...

    def found(self) -> Any:
        """What this process has found."""
        ...

    def take(self, found: Any) -> None:
        """Adds what another process has found."""


Running = TypeVar("Running", bound=Pass)


class Pool:
    """The processes that share passes; all get what all have found. Here it is this one alone."""

    rank = 0

    def carry_out(self, make: Callable[[int], Running], chunk: int) -> Running:
        """A pass that is done; `make` begins one that reads so many bytes at a time."""
        running = make(chunk)
        running.run(count().__next__)
        return running

    def agree_on_problem(self, message: str) -> None:
        """Instead of passes: this process cannot read a checkpoint, and reports why."""


SINGLE = Pool()


def claimed(
    tasks: Iterable[Task],
    size_of: Callable[[Task], int],
    claim: Claim,
    progress: Callable[[int], None] | None,
) -> Iterator[Task]:
    """The tasks of the blocks that this process gets; `size_of` gives the bytes of a task.

    `progress` gets the bytes of the other tasks.
    """
    mine, number, filled = claim(), 0, 0
    for task in tasks:
        if filled >= BLOCK:
            number, filled = number + 1, 0
            if number > mine:
                mine = claim()
        filled += size_of(task)
        if number == mine:
            yield task
        elif progress:
            progress(size_of(task))
