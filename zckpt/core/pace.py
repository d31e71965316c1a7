"""Through the page cache or past it: which way of writing is faster here and now?

No constant says so. Buffered writes were up to twice as fast as direct ones on a virtual machine
whose free memory was hot, and took three times as long when the host first had to give the memory
back. So the first 96 to 160 MiB of a copy are trials of both ways, one after the other, and the
faster one goes on. If its rate falls, the trials are repeated. Buffered writes need twice the CPU
time, so they must be clearly faster.

A trial ends with a sync of what it wrote: the page cache takes bytes faster than the disk does. The
first one counts for neither way, because threads begin with new memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from .fileio import Writer

TRIAL = 32 << 20  # bytes
TRIALS = ("direct", "buffered", "buffered", "direct")
CLEAR = 2.0  # times the seconds of buffered writes, after which no more trials are needed
WINDOW = 256 << 20  # bytes between two looks at the rate
FALLEN = 0.5  # of the best rate so far: the trials are repeated
CHEAPER = 0.65  # of the wall time: what buffered writes must reach, since direct ones need less CPU


class Pace:
    """The mode of each write of a copy, shared by its threads.

    `asked` is the user's choice: direct, buffered, or auto, which measures if the target has enough
    bytes (`size`) for it. `opening` is the mode of writers. `clock` gives seconds.
    """

    def __init__(self, asked: str, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.mode = "buffered" if asked == "auto" else asked
        self._measures = asked == "auto" and size >= 4 * TRIAL
        self.opening = asked if self._measures else self.mode
        self._clock = clock
        self._trials = deque[str]()
        self._is_first = True
        self._seconds: dict[str, float] = {}  # of the trials, by mode
        self._best = 0.0  # bytes a second since the last trials
        self._changed = Condition()
        self._busy = 0  # threads that are writing
        self._ends = False  # the trial ends when the last of these threads is done
        self._begun = 0  # bytes of the phase
        self._since = 0.0
        self._writers: set[Writer] = set()
        if self._measures:
            self._try_again()

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

    def _try_again(self) -> None:
        self._trials = deque(TRIALS)
        self._seconds = dict.fromkeys(("direct", "buffered"), 0.0)
        self.mode = self._trials[0]

    def _begin(self, writer: Writer, length: int) -> str:
        with self._changed:
            while self._ends:
                self._changed.wait()
            if not self._begun:
                self._since = self._clock()
            self._busy += 1
            self._begun += length
            self._writers.add(writer)
            self._ends = bool(self._trials) and self._begun >= TRIAL
            return self.mode

    def _end(self) -> None:
        with self._changed:
            self._busy -= 1
            if not self._trials and self._begun >= WINDOW:
                self._look()
            if self._busy or not self._ends:
                return
        try:
            for writer in self._writers:
                writer.sync()
        finally:
            with self._changed:
                self._next_trial()
                self._changed.notify_all()

    def _next_trial(self) -> None:
        """Ends a trial; after the last one, the faster mode goes on."""
        seconds = self._phase()
        if self._is_first:
            self._is_first = False
            return
        self._seconds[self._trials.popleft()] += seconds
        direct, buffered = self._seconds["direct"], self._seconds["buffered"]
        is_clear = direct <= buffered or direct > CLEAR * buffered
        if len(self._trials) == len(TRIALS) // 2 and is_clear:
            self._trials.clear()
        if self._trials:
            self.mode = self._trials[0]
            return
        self.mode, self._best = "buffered" if buffered < CHEAPER * direct else "direct", 0.0

    def _look(self) -> None:
        """Compares the rate of the last bytes with the best one."""
        size = self._begun
        rate = size / max(self._phase(), 1e-9)
        if rate < FALLEN * self._best:
            self._try_again()
        self._best = max(self._best, rate)

    def _phase(self) -> float:
        """Ends a phase; gives its seconds."""
        self._ends, self._begun = False, 0
        self._writers.clear()
        return self._clock() - self._since
