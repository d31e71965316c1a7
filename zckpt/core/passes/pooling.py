"""Divides the tasks of a comparison among several processes.

All processes list the same tasks in the same order. Each process asks for a block of tasks at a
time: a number of consecutive tasks, large enough that asking costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol, TypeVar

BLOCK = 64 << 20  # bytes
Task = TypeVar("Task")
Claim = Callable[[], int]
"""Returns the number of the next block of tasks for this process; numbers only increase."""


class Pass(Protocol):
    """One pass over tensors, and its results in this process.

    Several processes may share a pass. They exchange results as JSON.
    """

    def run(self, claim: Claim) -> None:
        """Runs this process's share of the tasks; `claim` assigns blocks of tasks to it."""

    def tasks_by_name(self) -> Any:
        """Describes all tasks of the pass as JSON, to compare them with those of other processes.

        All processes must have listed the same tasks.
        """
        ...

    def findings(self) -> Any:
        """The results of this process as JSON, to send to the other processes."""
        ...

    def take(self, found: Any) -> None:
        """Adds results that another process has sent (its `findings`)."""


Running = TypeVar("Running", bound=Pass)


class Pool:
    """Runs passes over tensors in one process, which does everything.

    The subclass in `processes/sharing.py` is for several processes, which share each pass. A pass
    reads tensors once, for example to compare two checkpoints.
    """

    rank = 0

    def carry_out(self, make: Callable[[int], Running], chunk: int) -> Running:
        """Creates and runs a pass; returns the pass, with the results of all processes in it.

        `make` creates the pass. Its argument `chunk` is the number of bytes that a task reads at a
        time.
        """
        running = make(chunk)
        running.run(count().__next__)
        return running

    def agree_on_problem(self, message: str) -> None:
        """Reports that a checkpoint cannot be read, so no pass is made; does nothing in this class.

        `message` is the error. The subclass for several processes raises WrongOption unless rank 0
        cannot read the checkpoint either.
        """


SINGLE = Pool()


def claimed(
    tasks: Iterable[Task],
    size_of: Callable[[Task], int],
    claim: Claim,
    progress: Callable[[int], None] | None,
) -> Iterator[Task]:
    """Yields the tasks that this process must run; other processes run the others.

    size_of     returns the number of bytes that a task reads
    claim       returns the number of the next block of tasks for this process
    progress    called with the bytes of each task that another process runs
    """
    claimed_block, number, filled = claim(), 0, 0
    for task in tasks:
        if filled >= BLOCK:
            number, filled = number + 1, 0
            if number > claimed_block:
                claimed_block = claim()
        filled += size_of(task)
        if number == claimed_block:
            yield task
        elif progress:
            progress(size_of(task))
