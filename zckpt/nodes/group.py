"""What do the processes of a launch tell each other? joining.py has the keys by which they join.

    alive/RANK      a counter that every process raises once a second
    who/RANK        its host and process number
    failures        how many processes have failed; the first one leaves `failure`, and prints it
    bytes           what all but rank 0 have written, for the progress bar
    stopped, left   how many processes write nothing any more, and have left

Keys of the whole launch, and not of one command:

    begun/TARGET    rank 0 began this target in this launch, and nothing was there before
    done/TARGET     rank 0 has completed it

Every process watches rank 0, and rank 0 watches all. A process whose counter stands still for
`timeout` seconds is lost. A process that could not raise its counter for half of that time, because
it or its node was stopped, must not write any more: others may have given it up.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import asdict

from ..core.resources import Begin, Progress
from ..errors import ProcessFailed, ProcessLost, WrongOption, brief, counted, listed
from ..version import __version__
from .failures import Failure, error_of, failure_in, failure_of
from .handover import MAX_SIZE, parsed, unreadable
from .joining import Joining
from .launch import Launch, restarts

TIMEOUT = 120.0  # seconds
LEAVING = 10.0  # seconds that rank 0 waits for others to stop, or to read how it ended
POLL = 0.01  # seconds between the first two looks at the store
MAX_POLL = 0.5  # seconds between two looks after a while: there may be 1,000 processes
FIRST = 20  # beats of rank 0 in the first second
TIMEOUTS = 1.0, 1e6  # seconds: the least and the largest that a user may ask for
VALUE = 4 << 20  # bytes of one value in a store, which allows 8 MiB


class Group:
    """`with Group(launch, command, beside) as group:` all processes of a launch are in it.

    `command` is what this process was started for: a name and paths. `beside` is a path on a
    filesystem that all nodes share; None if there is none. With `resumes`, errors say that the
    command goes on with --resume. The end of the block tells the others how this process has ended.
    Raises ProcessLost if a process does not start, or does not answer for `timeout` seconds;
    ProcessFailed if another one has failed.
    """

    def __init__(
        self,
        launch: Launch,
        command: Sequence[str],
        beside: str | None,
        timeout: float | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.timeout = timeout or _timeout()
        self._command = [__version__, str(self.size), *command]
        self._beside = beside
        self._again = f"repeat the command{' with --resume' if resumes else ''}"
        self._progress: Progress | None = None
        self._written = 0
        self._total = 0
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._lost: set[int] = set()
        self._places: dict[int, str] = {}
        self._error: Exception | None = None
        self._is_failing = False
        self._has_stopped = False
        self._is_leaving = threading.Event()

    def __enter__(self) -> Group:
        joining = Joining(
            self.launch, self._command, self.timeout, self._again, self._without_store
        )
        self._met, self.store = joining.join(self._beside)
        try:
            self.store.set(f"who/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
            self.store.add(f"alive/{self.rank}", 1)
        except BaseException:
            self._met.close()
            raise
        now = time.monotonic()
        watched = range(1, self.size) if self.rank == 0 else (0,)
        self._heartbeats = dict.fromkeys(watched, (0, now))
        self._last_beat = now
        self._thread = threading.Thread(target=self._beat_on, name="zckpt-heartbeat", daemon=True)
        self._thread.start()
        return self

    # -- the heartbeat

    def _beat_on(self) -> None:
        pause = min(1.0, self.timeout / 20)
        for _ in range(FIRST if self.rank == 0 else 0):  # others wait for it, to join
            if self._is_leaving.wait(pause / FIRST):
                return
            with suppress(Exception):  # the next beat says it
                self.store.add("alive/0", 1)
        while not self._is_leaving.wait(pause):
            try:
                self._beat()
            except Exception as error:
                self._error = error
                return

    def _beat(self) -> None:
        self.store.add(f"alive/{self.rank}", 1)
        self._last_beat = time.monotonic()
        with self._lock:
            written, self._written = self._written, 0
        total = self.store.add("bytes", written)
        if self.rank == 0 and self._progress:
            self._progress(total - self._total)
            self._total = total
        if self._failure is None and self.store.check(["failure"]):
            self._failure = failure_in(self.store.get("failure"))
        for rank, (beats, since) in self._heartbeats.items():
            now = self.store.add(f"alive/{rank}", 0)
            if now != beats:
                if not beats:
                    self._places[rank] = self.store.get(f"who/{rank}").decode()
                self._heartbeats[rank] = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                self._lost.add(rank)

    def check(self) -> None:
        """Raises if this process must stop: another one has failed, or does not answer."""
        if self._failure is not None:
            raise error_of(self._failure)
        if self._lost:
            raise self._lost_error()
        if self._error is not None:
            raise self._error
        stopped = time.monotonic() - self._last_beat
        if stopped > self.timeout / 2:
            raise ProcessLost(f"rank {self.rank} was stopped for {stopped:.0f} s")

    def _without_store(self, reason: str) -> ProcessLost:
        return ProcessLost(
            f"rank {self.rank} has lost the connection to rank 0{self._where(0)}: {reason}",
            hint=f"end that process if it is still there; then {self._again}",
        )

    def _lost_error(self) -> ProcessLost:
        lost = sorted(self._lost)
        missing = [rank for rank in lost if not self._heartbeats[rank][0]]
        if missing:
            return ProcessLost(
                f"{counted(len(missing), 'process', 'processes')} of {self.size} did not start "
                f"within {self.timeout:.0f} s: rank {listed(missing)}",
                hint="start all of them; if this process should run alone, add --single",
            )
        where = [f"{rank}{self._where(rank)}" for rank in lost]
        return ProcessLost(
            f"rank {listed(where)} has not answered for {self.timeout:.0f} s",
            hint=f"end that process; then {self._again}",
        )

    def _where(self, rank: int) -> str:
        return f" ({self._places[rank]})" if rank in self._places else ""

    # -- waiting, and what all can read

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Returns soon after `is_there()`; raises as `check`."""
        pause = POLL
        while not is_there():
            self.check()
            time.sleep(pause)
            pause = min(MAX_POLL, pause * 1.1)

    def has(self, *keys: str) -> bool:
        return bool(self.store.check(list(keys)))

    def publish(self, key: str, value: Any) -> None:
        """Leaves a JSON value for others."""
        self.store.set(key, json.dumps(value))

    def published(self, key: str) -> Any:
        """The JSON value that another process has left, or will leave; raises as `check`."""
        self.wait(lambda: self.has(key))
        return parsed(self.store.get(key))

    def send(self, key: str, data: bytes) -> None:
        """Leaves bytes for others."""
        parts = [data[start : start + VALUE] for start in range(0, len(data), VALUE)]
        for number, part in enumerate(parts):
            self.store.set(f"{key}/{number}", part)
        self.publish(key, len(parts))

    def received(self, key: str) -> bytes:
        """The bytes that another process has sent; raises as `check`."""
        count = self.published(key)
        if type(count) is not int or not 0 <= count <= MAX_SIZE // VALUE:
            raise unreadable(f"it has {brief(count)} parts")
        return b"".join(self.store.get(f"{key}/{number}") for number in range(count))

    def next(self, key: str) -> int:
        """0 for the process that asks first, then 1 and so on; raises as `check`."""
        self.check()
        if (number := self.store.add(key, 1) - 1) < 0:
            raise ProcessLost(
                f"the store has counted to {number} for rank {self.rank}",
                hint="another program may use this store: choose another MASTER_PORT; then "
                f"{self._again}",
            )
        return number

    def how_many(self, key: str) -> int:
        """How many numbers `next` has given to all processes."""
        return self.store.add(key, 0)

    def agree(self) -> None:
        """Raises WrongOption unless rank 0 was started for the same command; raises as `check`."""
        if (first := self.published("command")) != self._command:
            texts = [
                f"zckpt {version}, {' '.join(words)}, in {size} processes"
                for version, size, *words in (first, self._command)
            ]
            raise WrongOption(
                f"rank 0 was started for {texts[0]}; rank {self.rank} for {texts[1]}",
                hint="start all processes with the same arguments, and the same version of zckpt",
            )

    # -- what outlives the processes, if the launcher starts them again

    def note_begun(self, target: str) -> None:
        """Notes that this launch begins a target, if nothing is there yet."""
        path = os.path.abspath(target)
        if not os.path.lexists(path) and not os.path.lexists(f"{path}.partial"):
            self._note("begun", target)

    def note_done(self, target: str) -> None:
        """Notes that this launch has completed a target."""
        self._note("done", target)

    def has_begun(self, target: str) -> bool:
        """Whether this launch began a target before its processes were started again.

        Then they continue it. What another run has left is not touched without --resume, however
        often the launcher tries. The agents of torchrun count restarts apart, so what was begun and
        not completed proves one. A script that writes a target twice proves none.
        """
        if not self._noted("begun", target):
            return False
        return restarts() > 0 or not self._noted("done", target)

    def _note(self, what: str, target: str) -> None:
        self._met.calls.set(_note_of(what, target), b"1")

    def _noted(self, what: str, target: str) -> bool:
        return self._met.calls.check([_note_of(what, target)])

    # -- progress

    def watched(self, begin: Begin | None) -> Begin | None:
        """`begin` for rank 0, whose progress then shows what all processes have written."""
        if begin is None:
            return None

        def begin_all(total: int) -> Progress:
            self._total = self.store.add("bytes", 0)
            progress = begin(total)
            self._progress = progress
            return progress

        return begin_all

    def written(self, count: int) -> None:
        """Notes bytes that this process has written, if it is not rank 0."""
        with self._lock:
            self._written += count

    # -- the end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        other: ProcessFailed | None = None
        try:
            if error is not None and not self.fail(error):
                other = self._failed_elsewhere()
            self.stop()
            self._leave(has_failed=error is not None)
        except Exception as lost:  # the store may be gone
            self._error = lost
        finally:
            self._is_leaving.set()
            self._met.close()
        if other is not None and other is not error:
            raise other from error

    def _leave(self, has_failed: bool) -> None:
        """Rank 0 says that all has ended, then the others leave, then rank 0 if it hosts the store.

        After a failure nobody leaves before rank 0 has ended: a launcher would kill it meanwhile.
        """
        if self.rank == 0:
            self.publish("end", has_failed)
        elif has_failed and 0 not in self._lost:
            self._wait_until(lambda: self.has("end"))
        self._is_leaving.set()
        self._thread.join(LEAVING)
        self.store.add("left", 1)
        if self._met.meeting.is_host:
            self._wait_for_count("left", self.size)

    def fail(self, error: BaseException) -> bool:
        """Tells the others of a failure; False if another process did that first, and prints it."""
        if isinstance(error, ProcessFailed) and error.code is not None:
            return False
        try:
            if self._is_failing or self.store.add("failures", 1) > 1:
                return self._is_failing
            self._is_failing = True
            self.publish("failure", asdict(failure_of(self.rank, error, self._again)))
        except Exception as lost:
            self._error = lost
        return True

    def comes(self, key: str) -> bool:
        """Whether a value comes; False if rank 0 ends without it. Raises as `wait_for_end`."""
        self.wait(lambda: self.has(key) or self.has("end"))
        if self.has(key):
            return True
        self.wait_for_end()
        return False

    def wait_for_end(self) -> None:
        """Returns when rank 0 has ended; raises ProcessFailed if it has failed."""
        if self.published("end") and (failed := self._failed_elsewhere()):
            raise failed

    def _failed_elsewhere(self) -> ProcessFailed | None:
        """The error of the process that failed first; None if it does not say it."""
        self._wait_until(lambda: self.has("failure"))
        if not self.has("failure"):
            return None
        return error_of(failure_in(self.store.get("failure")))

    def stop(self) -> None:
        """Says that this process writes nothing any more."""
        if not self._has_stopped:
            self._has_stopped = True
            self.store.add("stopped", 1)

    def wait_for_stops(self) -> None:
        """Waits until the others write nothing any more, but not for ever."""
        self._wait_for_count("stopped", self.size - 1)

    def _wait_for_count(self, key: str, count: int) -> None:
        self._wait_until(lambda: self.store.add(key, 0) + len(self._lost) >= count)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Waits, but not for ever, and not if the store is gone or a launcher ends the process."""
        end = time.monotonic() + LEAVING
        with suppress(Exception, KeyboardInterrupt):
            while not is_there() and time.monotonic() < end:
                time.sleep(POLL)


def _note_of(what: str, target: str) -> str:
    return f"{what}/{os.path.abspath(target)!a}"


def _timeout() -> float:
    text = os.environ.get("ZCKPT_TIMEOUT", "")
    if not text:
        return TIMEOUT
    with suppress(ValueError):
        least, most = TIMEOUTS
        if least <= (seconds := float(text)) <= most:  # not if it is nan
            return seconds
    raise WrongOption(
        f"ZCKPT_TIMEOUT is {text}, which is not a number of seconds from 1 to 1,000,000"
    )
