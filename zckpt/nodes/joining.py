"""Which keys of the store are those of the command that this process was started for?

Rank 0 opens a command: it takes the next number, under which all keys of the command are. The other
processes join the command that was opened last. So a script may run several commands, one after the
other, and a launcher may start all processes again, at different times on different nodes.

A rank joins a command once: rank 0 waits for one result of each rank, and the work of a second
process would be lost. And it joins only if rank 0 lives: the last command may be one that was
killed, while the new rank 0 is still starting.

    commands        how many commands have been opened
    N/command       what rank 0 was started for
    N/joined/RANK   how many processes have joined command N as this rank
    N/alive/0       a counter that rank 0 raises, see group.py
    N/end           rank 0 has ended
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from msgspec import Struct

from ..errors import ProcessLost
from .calls import Calls, Keys
from .handover import parsed
from .launch import Launch
from .meeting import PAUSE, Meeting, meet

LOOK = 0.02  # seconds between two looks for a command
BEATS = 2.5  # seconds in which a rank 0 that lives raises its counter


class Met(Struct, frozen=True):
    """A store, and calls to it."""

    meeting: Meeting
    calls: Calls

    def close(self) -> None:
        self.calls.close()
        self.meeting.close()


class Joining(Struct, frozen=True):
    """This process, and what it was started for: the version of zckpt, a command, paths.

    `again` says in errors how the command is repeated. `lost` makes the error if the store is gone.
    """

    launch: Launch
    command: list[str]
    timeout: float
    again: str
    lost: Callable[[str], ProcessLost]

    def join(self, beside: str | None) -> tuple[Met, Keys]:
        """The store, and the keys of the command; `beside` is as for `meet`.

        Raises ProcessLost if rank 0 opens no command for this rank, and what `meet` raises.
        """
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            meeting = meet(self.launch, beside, self.timeout)
            met = Met(meeting, Calls(meeting.store, self.timeout, self.lost))
            try:
                keys = self._opened(met.calls) if self.launch.rank == 0 else self._found(met, end)
            except BaseException:
                met.close()
                raise
            if keys is not None:
                return met, keys
            met.close()  # an earlier rank 0 hosts this store, and will close it
            time.sleep(PAUSE)
        raise ProcessLost(
            f"rank 0 of {self.launch.size} has opened no command for rank {self.launch.rank} "
            f"within {self.timeout:.0f} s: it has not started, or this rank was started twice",
            hint="see the messages of rank 0; if this process should run alone, add --single",
        )

    def _opened(self, calls: Calls) -> Keys:
        """The keys of a new command; raises ProcessLost if another rank 0 leads one now."""
        if count := calls.add("commands", 0):
            last = _keys(calls, count - 1)
            if _lives(last, time.monotonic() + BEATS, lambda: last.check(["end"])):
                raise ProcessLost(
                    "rank 0 was started twice, or another command of this launch still runs",
                    hint="end all processes of this launch, and start each rank once; then "
                    f"{self.again}",
                )
        keys = _keys(calls, calls.add("commands", 1) - 1)
        keys.set("command", json.dumps(self.command))
        return keys

    def _found(self, met: Met, end: float) -> Keys | None:
        """The keys of a command that rank 0 has opened for this rank; None if there is none."""
        try:
            while time.monotonic() < end:
                if count := met.calls.add("commands", 0):
                    last = _keys(met.calls, count - 1)
                    if self._joins(last):
                        if self._is_led(met.calls, count, end):
                            return last
                    elif not met.meeting.outlives_rank_0:
                        break
                time.sleep(LOOK)
        except ProcessLost:
            if met.meeting.outlives_rank_0:
                raise
        return None

    def _joins(self, keys: Keys) -> bool:
        """Joins a command, unless this rank has joined it, or it has ended and is another one.

        Rank 0 can fail before this process joins: then it joins too, and learns of that.
        """
        joined = f"joined/{self.launch.rank}"
        if not keys.check(["command"]) or keys.check([joined]):
            return False
        if keys.check(["end"]) and parsed(keys.get("command")) != self.command:
            return False
        return keys.add(joined, 1) == 1

    def _is_led(self, calls: Calls, count: int, end: float) -> bool:
        """Whether the rank 0 of the last of `count` commands lives, or has ended it."""
        keys = _keys(calls, count - 1)

        def is_over() -> bool:
            return keys.check(["end"]) or calls.add("commands", 0) != count

        return _lives(keys, end, is_over) or keys.check(["end"])


def _keys(calls: Calls, number: int) -> Keys:
    return calls.within(f"{number}/")


def _lives(keys: Keys, end: float, is_over: Callable[[], bool]) -> bool:
    """Whether a rank 0 raises its counter, before its command is over."""
    beats = keys.add("alive/0", 0)
    while time.monotonic() < end and not is_over():
        if keys.add("alive/0", 0) != beats:
            return True
        time.sleep(LOOK)
    return False
