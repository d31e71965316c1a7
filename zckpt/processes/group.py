"""The messages that the processes of a launch exchange.

Rank 0 gives every group a new name. So no process finds values that an earlier command, or the
processes before a restart, have left in the store:

    arrived/RANK     a random word from the process that came last as this rank
    led/WORD         the name of the group that rank 0 has assigned to the process with this word
    NAME/here/RANK   how many processes have joined the group as this rank
    NAME/1, 2 ...    the values that they share, in the order in which all of them share
    NAME/failures    how many processes have failed; the first one leaves NAME/failure
    NAME/left        how many have ended

A value is a random word, a counter, or JSON. There is no time limit for a message. If a process is
killed, the launcher ends the others; if one fails with an error, the group ends them.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ..errors import (
    MALFORMED,
    ProcessFailed,
    ProcessLost,
    UnsupportedCheckpoint,
    WrongOption,
    brief,
    listed,
    sentence,
)
from .launcher import Launch, launched
from .store import VALUE, Patience, Store, unreadable

MOST = 128  # values of one message
PATIENCE = 5.0  # seconds after which a process reports for whom it waits
LEAVING = 10.0  # seconds that rank 0 keeps its store for processes that are still ending
POLL, MAX_POLL = 0.01, 0.5  # seconds between two reads of the store: there may be 1,000 processes
CHECK = 0.2  # seconds between two checks for a failure


class Group:
    """`with Group() as group:` joins all processes of a launch; without a launcher only this one.

    All processes must call `share`, `agree`, `gather` and `counter` in the same order. If an error
    ends the block in one process, the blocks of the others end with ProcessFailed, which has an
    `exit_code`.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        launch = launch or launched() or Launch(0, 1)
        self.rank, self.size = launch.rank, launch.size
        self._launch = launch
        self._name = ""
        self._asked = 0  # the number of values that all have shared so far
        self._checked = 0.0
        self._words: dict[int, str] = {}  # by rank, the words of the processes in the group

    def __enter__(self) -> Any:
        while True:
            self.store = Store(self._launch, self._patience)
            try:
                self._name = f"{self._led() if self.rank == 0 else self._followed()}/"
                return self
            except ProcessLost:
                if self.rank == 0 or not self.store.is_hosted:
                    raise
                self.store.close()  # it was the store of an earlier rank 0, which has ended
                time.sleep(POLL)

    # -- joining

    def _led(self) -> str:
        """In rank 0: creates a group, waits until all others have joined, returns its name."""
        name = secrets.token_hex(8)
        missing = set(range(1, self.size))

        def all_are_here() -> bool:
            for rank in range(1, self.size):
                word = self._arrived(rank)
                if word and self._words.get(rank) != word:
                    self._words[rank] = word
                    self.store.set(f"led/{word}", name)
                if self.store.has(f"{name}/here/{rank}"):
                    missing.discard(rank)
            return not missing

        self._wait(all_are_here, lambda: f"rank {listed(sorted(missing))} of {self.size}")
        return name

    def _followed(self) -> str:
        """In other ranks: waits until rank 0 has created a group, joins it, returns its name.

        Raises WrongOption if this rank was started twice.
        """
        token = secrets.token_hex(8)
        self.store.set(f"arrived/{self.rank}", token)
        self._wait(lambda: self.store.has(f"led/{token}"), lambda: "rank 0")
        name = _word(self.store.get(f"led/{token}"))
        if self.store.add(f"{name}/here/{self.rank}", 1) > 1:
            raise WrongOption(
                "processes-disagree",
                f"rank {self.rank} was started twice",
                hint="start each rank once",
            )
        return name

    def _arrived(self, rank: int) -> str:
        key = f"arrived/{rank}"
        return _word(self.store.get(key)) if self.store.has(key) else ""

    # calls that all processes make in the same order

    def share(self, value: Any = None) -> Any:
        """Sends rank 0's `value` to all processes; returns it in each of them."""
        key = self._next_key()
        if self.rank == 0:
            self._send(key, value)
            return value
        return self._received(key, 0)

    def agree(self, value: Any, reason: Callable[[Any], str]) -> None:
        """Raises WrongOption if this process has another `value` than rank 0.

        `reason` is called with rank 0's value, and returns words for the message.
        """
        if (first := self.share(value)) != value:
            raise WrongOption(
                "processes-disagree",
                f"rank 0 and rank {self.rank} were not started with the same command: rank 0 has "
                f"{reason(first)}",
                hint="start all processes in the same folder, with the same arguments and the same "
                "version of zckpt; all must see the same files",
            )

    def gather(self, value: Any) -> Iterator[tuple[int, Any]]:
        """Sends `value` to rank 0, which yields (rank, value) for each other rank.

        In other ranks nothing is yielded.
        """
        key = self._next_key()
        if self.rank:
            self._send(f"{key}/{self.rank}", value)
            return iter(())
        return ((rank, self._received(f"{key}/{rank}", rank)) for rank in range(1, self.size))

    def counter(self) -> Callable[[], int]:
        """Makes a counter that all processes share: calls return 0, 1, 2 and so on.

        A number is returned only once, in any of the processes.
        """
        key = self._next_key()

        def number() -> int:
            if (count := self.store.add(key, 1)) < 1:
                raise unreadable(f"a counter is {count}")
            return count - 1

        return number

    def _next_key(self) -> str:
        self._asked += 1
        return f"{self._name}{self._asked}"

    def _send(self, key: str, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        parts = [text[start : start + VALUE] for start in range(0, len(text), VALUE)]
        if len(parts) > MOST:
            raise UnsupportedCheckpoint(
                "process-failed",
                f"a message to the other processes would have {len(text)} bytes",
                hint="use --part K/N instead of a launcher, or one process with --single",
            )
        for number, part in enumerate(parts):
            self.store.set(f"{key}/part/{number}", part)
        self.store.set(f"{key}/parts", str(len(parts)))

    def _received(self, key: str, rank: int) -> Any:
        """Waits for the JSON value that process `rank` sends under a key.

        Raises ProcessFailed if another process of the group has failed.
        """

        def is_there() -> bool:
            if self._words.get(rank, "") != (self._arrived(rank) if rank else ""):
                raise ProcessLost("process-lost", f"rank {rank} was started again")
            return self.store.has(f"{key}/parts")

        says = rank != 0 or self.rank == 1  # only one process reports that all wait for rank 0
        self._wait(is_there, (lambda: f"rank {rank}") if says else None)
        count = self.store.get(f"{key}/parts")
        if not (count.isdigit() and 0 < int(count[:9]) <= MOST and len(count) < 9):
            raise unreadable(f"it has {brief(count)} parts")
        keys = [f"{key}/part/{number}" for number in range(int(count))]
        data = b"".join(self.store.get(part) for part in keys if self.store.has(part))
        try:
            return json.loads(data)
        except MALFORMED as error:
            raise unreadable("it is no JSON") from error

    # -- waiting

    def check(self) -> None:
        """Raises ProcessFailed if another process of the group has failed."""
        now = time.monotonic()
        if self._name and now > self._checked + CHECK:
            self._checked = now
            if self.store.has(f"{self._name}failure"):
                raise self._failure()

    def _wait(self, is_there: Callable[[], bool], whom: Callable[[], str] | None) -> None:
        patience, pause = self._patience(), POLL
        while not is_there():
            self.check()
            time.sleep(pause)
            pause = min(MAX_POLL, pause * 1.2)
            if whom:
                patience(f"rank {self.rank} waits for {whom()}")

    def _patience(self) -> Patience:
        """Returns a function to call again and again while this process waits.

        In the first call after PATIENCE seconds, it prints its argument.
        """
        end: float | None = time.monotonic() + PATIENCE

        def tell(text: str) -> None:
            nonlocal end
            if end is not None and time.monotonic() > end:
                end = None
                alone = "if this process should run alone, end it and add --single"
                print(f"{text}; {alone}", file=sys.stderr, flush=True)

        return tell

    # -- the end

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        other = None
        with suppress(ProcessLost, KeyboardInterrupt):
            if error is not None:
                other = self._fail(error)
            left = f"{self._name}left"
            goes_on = error is None or isinstance(error, Exception)
            if self.store.is_hosted and self.rank and goes_on:
                # a program may open its own store at this address
                self.store.outlived(lambda: self.store.add(left, 1), LEAVING)
            elif (
                self.store.add(left, 1) < self.size
                and self.rank == 0
                and not self.store.outlives  # it may end with this process
            ):
                self._wait_shortly(lambda: self.store.add(left, 0) >= self.size)
        self.store.close()
        if other is not None:
            raise other from error

    def _fail(self, error: BaseException) -> ProcessFailed | None:
        """Tells the other processes that this one has failed.

        If another process failed first, returns the error of that process instead.
        """
        if isinstance(error, ProcessFailed) and error.exit_code is not None:
            return None
        if self.store.add(f"{self._name}failures", 1) > 1:
            self._wait_shortly(lambda: self.store.has(f"{self._name}failure"))
            return self._failure()
        if isinstance(error, KeyboardInterrupt):
            code = 128 + (error.args[0] if error.args else signal.SIGINT)
        else:
            code = 2 if isinstance(error, WrongOption) else 1
        self.store.set(f"{self._name}failure", json.dumps([self.rank, sentence(error), code]))
        return None

    def _failure(self) -> ProcessFailed:
        try:
            rank, text, code = json.loads(self.store.get(f"{self._name}failure"))
            if (type(rank), type(text), type(code)) != (int, str, int) or not 0 < code < 256:
                raise ValueError
        except MALFORMED as error:
            raise unreadable("it does not describe a failure") from error
        failed = ProcessFailed("process-failed", f"rank {rank}: {text}")
        failed.exit_code = code
        return failed

    def _wait_shortly(self, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + LEAVING
        while not is_there() and time.monotonic() < end:
            time.sleep(POLL)


def _word(data: bytes) -> str:
    text = data.decode("ascii", "replace")
    if len(text) != 16 or not text.isalnum():
        raise unreadable(f"{brief(text)} is no name")
    return text
