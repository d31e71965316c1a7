"""Reports the progress of a pass over bytes, one line a minute, for a log that nobody watches.

A thread writes the lines. So a pass that hangs is reported too, which a callback per chunk could
not do. A command that ends within FIRST seconds writes nothing, unless `telling` was called with
`at_once`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from msgspec import Struct

from ...errors import counted, sized

FIRST, EVERY = 10.0, 60.0  # seconds


class Line(Struct, frozen=True):
    """One line of progress; the `event` of the first line is `begin`.

    Times are in seconds, sizes in bytes. `total` is the number of bytes to process; None until this
    number is known. `seconds_left` is None as long as no bytes were processed.
    """

    event: str
    about: str
    host: str
    process: int
    seconds: float
    done: int
    total: int | None
    bytes_per_second: float
    seconds_left: float | None
    doing: str

    def __str__(self) -> str:
        if self.event == "begin":
            return f"{self.about}, on {self.host}, process {self.process}"
        if self.total is None:
            return f"{lasting(self.seconds)} so far; no tensor was read yet"
        done, total = sized(self.done), sized(self.total)
        if done.split()[1:] == total.split()[1:]:
            done = done.split()[0]
        left = "" if self.seconds_left is None else f", {lasting(self.seconds_left)} left"
        doing = f"; {self.doing}" if self.doing else ""
        return f"{done} of {total}, {sized(round(self.bytes_per_second))}/s{left}{doing}"


def lasting(seconds: float) -> str:
    """Formats a duration: 40 s, 7 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{counted(minutes // 60, 'h', 'h')} {minutes % 60} min"


class Pace:
    """Measures the progress of one command, which may make several passes over its files."""

    def __init__(self, about: str) -> None:
        self._about = about
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._total: int | None = None
        self._done, self._before, self._doing = 0, 0, ""
        self._begun = self._last = self._started

    def begin(self, total: int) -> Pace:
        """Begins a pass over `total` bytes; returns the object to call with each number of bytes.

        The caller calls it whenever some bytes were processed.
        """
        with self._lock:
            self._done, self._total, self._doing, self._before = 0, total, "", 0
            self._begun = self._last = time.monotonic()
        return self

    def __call__(self, count: int) -> None:
        with self._lock:  # several threads may count
            self._done += count

    def describe(self, text: str) -> None:
        self._doing = text

    def line(self, event: str = "progress") -> Line:
        """Makes the progress line for this moment; its rate covers the time since the last line."""
        with self._lock:
            now = time.monotonic()
            rate = (self._done - self._before) / max(now - self._last, 1e-9)
            mean = self._done / max(now - self._begun, 1e-9)
            left = None if self._total is None or not self._done else self._total - self._done
            self._last, self._before = now, self._done
            return Line(
                event=event,
                about=self._about,
                host=socket.gethostname(),
                process=os.getpid(),
                seconds=round(now - self._started, 1),
                done=self._done,
                total=self._total,
                bytes_per_second=round(rate, 1),
                seconds_left=None if left is None else round(max(left, 0) / mean, 1),
                doing=self._doing,
            )


@contextmanager
def telling(about: str, say: Callable[[Line], None], at_once: bool = False) -> Iterator[Pace]:
    """Inside the block, prints one line of progress a minute by calling `say`.

    `about` is the text of what the command does. The first line comes after FIRST seconds, or
    immediately with `at_once`.
    """
    pace = Pace(about)
    ended = threading.Event()

    def watch() -> None:
        if not at_once:
            if ended.wait(FIRST):
                return
            say(pace.line("begin"))
        while not ended.wait(EVERY):
            say(pace.line())

    if at_once:
        say(pace.line("begin"))
    thread = threading.Thread(target=watch, name="zckpt-pace", daemon=True)
    with suppress(RuntimeError):  # no thread can be started: the command continues without reports
        thread.start()
    try:
        yield pace
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
