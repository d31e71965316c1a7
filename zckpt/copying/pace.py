"""Through the page cache or past it: which way of writing is better here and now?

No constant says so. Buffered writes were up to twice as fast as direct ones on a virtual machine
whose free memory was hot, and took three times as long when the host first had to give the memory
back. Direct writes needed half of the CPU time in one minute, and twice as much in the next, while
processors of the host that share no cache with ours carried them out. So a copy begins with a trial
of each way, and the better one goes on. A trial that is already lost ends early. The other way gets
another trial when the rate falls to half, and after a GiB. If it loses again, the next trial comes
after twice as many bytes.

A buffered phase ends with a sync of what it wrote: the page cache takes bytes faster than the disk
does. The first phase counts for neither way, because threads begin with new memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from msgspec import Struct

from ..core.fileio import Writer

TRIAL = 32 << 20  # bytes
WINDOW = 1 << 30  # bytes before the first new trial, unless the rate falls
LONGEST = 16 << 30  # bytes; so long a window becomes
CHECK = 128 << 20  # bytes from one look at the rate to the next
FALLEN = 2  # times the wall time of the trial: then the rate has fallen
FASTER = 0.65  # of the wall time: what buffered writes must reach if they need more CPU time
OTHER = {"direct": "buffered", "buffered": "direct"}


class Cost(Struct, frozen=True):
    """Seconds of wall time and of the process's CPU time."""

    wall: float = 0.0
    cpu: float = 0.0


def now() -> Cost:
    """What has passed so far."""
    return Cost(time.monotonic(), time.process_time())


class Pace:
    """The mode of each write of a copy, shared by its threads.

    `io` is the user's choice: direct, buffered, or auto, which measures if the target has enough
    bytes (`size`) for it. `opening` is the mode of writers. `clock` says what has passed.
    """

    def __init__(self, io: str, size: int, clock: Callable[[], Cost] = now) -> None:
        self._measures = io == "auto" and size >= 4 * TRIAL
        self.mode = "direct" if self._measures else "buffered" if io == "auto" else io
        self.opening = io if self._measures else self.mode
        self._clock = clock
        self._costs: dict[str, Cost] = {}  # of the last phase in a mode, for each byte
        self._is_first = True
        self._is_trial = True
        self._size = TRIAL  # bytes of the phase
        self._window = WINDOW  # bytes of the next phase that is no trial
        self._changed = Condition()
        self._busy = 0  # threads that are writing
        self._ends = False  # the phase ends when the last of these threads is done
        self._begun = 0  # bytes of the phase so far
        self._since = Cost()  # what had passed when measuring began, after `_before` bytes
        self._before = 0
        self._writers: set[Writer] = set()

    @contextmanager
    def turn(self, writer: Writer, length: int) -> Iterator[str]:
        """The mode in which one thread reads and writes `length` bytes, within the block."""
        if not self._measures:
            yield self.mode
            return
        mode = self._begin(writer, length)
        try:
            yield mode
        finally:
            self._end()

    def _begin(self, writer: Writer, length: int) -> str:
        with self._changed:
            while self._ends:
                self._changed.wait()
            if not self._begun:
                self._since, self._before = self._clock(), 0
            self._busy += 1
            self._begun += length
            self._writers.add(writer)
            self._ends = self._begun >= self._size or self._is_lost() or self._is_falling()
            return self.mode

    def _is_lost(self) -> bool:
        """Whether a trial takes so long that the other way remains the better one."""
        if not self._is_trial or self._is_first or OTHER[self.mode] not in self._costs:
            return False
        wall = self._clock().wall - self._since.wall
        return wall * FASTER > self._costs[OTHER[self.mode]].wall * TRIAL

    def _is_falling(self) -> bool:
        """Whether writes have become much slower than they were in the trial of their mode."""
        count = self._begun - self._before
        if self._is_trial or count < CHECK:
            return False
        now = self._clock()
        if now.wall - self._since.wall > FALLEN * count * self._costs[self.mode].wall:
            return True
        self._since, self._before = now, self._begun
        return False

    def _end(self) -> None:
        with self._changed:
            self._busy -= 1
            if self._busy or not self._ends:
                return
        try:
            if self.mode == "buffered":
                for writer in self._writers:
                    writer.sync()
        finally:
            with self._changed:
                self._next_phase()
                self._changed.notify_all()

    def _next_phase(self) -> None:
        """Ends a phase, and chooses the mode of the next one."""
        end, since, count = self._clock(), self._since, self._begun - self._before
        cost = Cost((end.wall - since.wall) / count, (end.cpu - since.cpu) / count)
        self._ends, self._begun = False, 0
        self._writers.clear()
        if self._is_first:
            self._is_first = False
            return
        self._costs[self.mode] = cost
        if not self._is_trial or len(self._costs) < len(OTHER):
            self.mode, self._size, self._is_trial = OTHER[self.mode], TRIAL, True
            return
        tried, self.mode = self.mode, "buffered" if self._is_buffered_better() else "direct"
        if self.mode == tried:
            self._window = WINDOW
        self._size, self._is_trial = self._window, False
        self._window = min(2 * self._window, LONGEST)

    def _is_buffered_better(self) -> bool:
        direct, buffered = self._costs["direct"], self._costs["buffered"]
        needs_less = buffered.wall < direct.wall and buffered.cpu < direct.cpu
        return needs_less or buffered.wall < FASTER * direct.wall
