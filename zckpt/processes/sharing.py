"""How the processes of a group share a conversion, or the comparison of `verify`.

A conversion: every process reads the source and computes the target's files by itself. Rank 0
writes these files without tensor data and begins the journal; the others read both. Then every
process claims regions (byte ranges of the files), the largest first, until a shared counter has
passed the last region: a slow node claims fewer. Rank 0 reads the journals of the others, and
completes the target like a run that is continued.

A comparison: every process claims blocks of tensors in the same way, and sends its results. Rank 0
sends the combined results to all processes, so all give the same report.

The bytes of a region do not depend on the process that writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..copying.journal import Identity, Journal, Region, difference
from ..copying.journals import ProcessJournal, regions_of
from ..copying.sharing import Begun, Portion, Sharing, largest_first
from ..copying.without_locks import WRITER, LonelyJournal, writer_of
from ..core.passes.pooling import Pool, Running
from ..core.passes.resources import Progress
from ..core.storage.checksum import crc32
from ..core.version import __version__
from ..errors import MALFORMED, ProcessLost, WrongOption, brief, cause
from .group import Group
from .store import unreadable

MAX_CHUNK = 4 << 30  # bytes that a thread copies at a time, for 16,384 ranks


class Processes(Group, Sharing, Pool):
    """A group of processes that share conversions and comparisons.

    It implements the interfaces `Sharing` (conversions) and `Pool` (comparisons).
    """

    is_alone = False
    _has_begun = False

    @property
    def part(self) -> str:
        """The end of this process's journal's name ("0003"); "" in rank 0, which leads the others.

        A journal is the file that lists what a process has written.
        """
        return f"{self.rank:04}" if self.rank else ""

    # -- a conversion

    def agree_on(self, identity: Identity, target: str) -> None:
        mark = {**identity.mark(), "target": crc32(os.fsencode(os.path.abspath(target)))}

        def reason(first: Any) -> str:
            if not isinstance(first, dict):
                return "another command"
            return difference(first, mark) or "another target"

        self._has_begun = False
        self.agree(mark, reason)

    def begin(self, journal: Journal) -> None:
        self._has_begun = True
        writer = [writer_of(journal.folder.path)] if isinstance(journal, LonelyJournal) else []
        self.share([*journal.synced(), *writer])

    def begun(self) -> Begun | None:
        match self.share():
            case None:
                return None
            case [length, crc, str(writer)] if WRITER.fullmatch(writer):
                return *_length_and_crc([length, crc]), writer
            case begun:
                return _length_and_crc(begun)

    def mine(
        self, portions: Sequence[Portion], progress: Progress | None
    ) -> Iterator[Sequence[Portion]]:
        order = largest_first(portion for portion in portions if not portion.is_complete)
        claim, reached = self.counter(), 0
        while reached <= len(order):
            self.check()
            number = claim()
            if progress:  # other processes have claimed the portions between
                progress(sum(portion.length for portion in order[reached:number]))
            if number < len(order):
                yield [order[number]]
            reached = number + 1

    def regions_of_others(self, journal: Journal) -> Iterator[Region] | None:
        if isinstance(journal, ProcessJournal):
            self.gather(journal.synced())
            return None
        noted = self.gather(None)
        return (
            region
            for rank, value in noted
            for region in regions_of(journal.folder, f"{rank:04}", *_length_and_crc(value))
        )

    def end(self) -> None:
        if self.rank == 0 and not self._has_begun:
            self.share(None)
        self.share(True)

    # -- a pass

    def agree_on_problem(self, message: str) -> None:
        self.agree("a problem", lambda _: f"not this problem: {message}")

    def carry_out(self, make: Callable[[int], Running], chunk: int) -> Running:
        match self.share(["pass", chunk]):
            case ["pass", int(chunk)] if 0 < chunk <= MAX_CHUNK:
                running = make(chunk)
            case other:
                raise WrongOption(
                    "processes-disagree", f"rank 0 carries out another command: {brief(other)}"
                )
        tasks = json.dumps([__version__, running.tasks_by_name()], separators=(",", ":"))
        self.agree(crc32(tasks.encode()), lambda _: "other files, options, or another version")
        counter, taken = self.counter(), 0

        def claim() -> int:
            nonlocal taken
            self.check()
            taken += 1
            return counter()

        running.run(claim)
        for _, findings in self.gather([taken, running.findings()] if self.rank else None):
            with _readable():
                number, findings = findings
                taken += number
                running.take(findings)
        if self.rank == 0 and (given := counter()) != taken:  # some tensors were read by no process
            raise ProcessLost(
                "process-lost",
                f"{given} blocks of tasks were assigned to processes, but {taken} came back",
            )
        findings = self.share(running.findings() if self.rank == 0 else None)
        if self.rank:
            running = make(chunk)
            with _readable():
                running.take(findings)
        return running

    # values that survive if the launcher restarts the processes

    def continues(self, target: str) -> bool:
        """In rank 0: whether this launch had begun the target before its processes were restarted.

        If so, all processes continue the target, without --resume. In other ranks it is always
        False. If no target exists, this call notes that the launch begins it now.
        """
        path = os.path.abspath(target)
        key, is_unfinished = f"begun/{path!a}", os.path.lexists(f"{path}.partial")
        if self.rank or not self.store.outlives:
            return False
        # torchrun's agents count restarts separately: an unfinished target proves a restart too
        if self.store.has(key):
            return is_unfinished or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        # an unfinished target of another run is continued only with --resume
        if not os.path.lexists(path) and not is_unfinished:
            self.store.set(key, "1")
        return False


def group() -> Processes:
    """Joins all processes of a launch: call `with zckpt.group() as processes:` in each of them.

    Give `processes` to functions of zckpt as `sharing`. Without a launcher, the group has only this
    process. Do not catch errors inside the block: an error that leaves it also ends the blocks of
    the other processes.
    """
    return Processes()


def _length_and_crc(value: Any) -> tuple[int, int]:
    match value:
        case [int(length), int(crc)]:
            return length, crc
    raise unreadable(f"{brief(value)} is not a length and a CRC-32")


@contextmanager
def _readable() -> Iterator[None]:
    """Raises ProcessFailed if another process has sent a malformed result."""
    try:
        yield
    except MALFORMED as error:
        raise unreadable(f"it does not contain a result: {cause(error)}") from error
