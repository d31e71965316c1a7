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
from dataclasses import dataclass

from ..errors import ProcessLost
from .calls import Calls, Keys
from .launch import Launch
from .meeting import PAUSE, Meeting, meet

LOOK = 0.02  # seconds between two looks for a command
BEATS = 2.5  # seconds in which a rank 0 that lives raises its counter


@dataclass(frozen=True, slots=True)
class Met:
    """A store, and calls to it."""

    meeting: Meeting
    calls: Calls

    def close(self) -> None:
        self.calls.close()
        self.meeting.close()


@dataclass(frozen=True, slots=True)
class Joining:
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
        last = _last(calls)
        if last is not None and not last.check(["end"]) and _lives(last):
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
        while time.monotonic() < end:
            try:
                last = _last(met.calls)
                if last is not None and self._may_join(last):
                    if last.add(f"joined/{self.launch.rank}", 1) == 1 and self._leads(
                        met, last, end
                    ):
                        return last
                elif last is not None and not met.meeting.outlives_rank_0:
                    return None
            except ProcessLost:
                if met.meeting.outlives_rank_0:
                    raise
                return None
            time.sleep(LOOK)
        return None

    def _may_join(self, keys: Keys) -> bool:
        """Rank 0 can fail before this process joins: then it joins too, and learns of that."""
        if not keys.check(["command"]) or keys.check([f"joined/{self.launch.rank}"]):
            return False
        return not keys.check(["end"]) or json.loads(keys.get("command")) == self.command

    def _leads(self, met: Met, keys: Keys, end: float) -> bool:
        """Whether the rank 0 of this command lives or has ended it, and opens no other one."""
        number, beats = met.calls.add("commands", 0), keys.add("alive/0", 0)
        while time.monotonic() < end:
            if keys.check(["end"]) or keys.add("alive/0", 0) != beats:
                return True
            if met.calls.add("commands", 0) != number:
                return False
            time.sleep(LOOK)
        return False


def _keys(calls: Calls, number: int) -> Keys:
    return calls.within(f"{number}/")


def _last(calls: Calls) -> Keys | None:
    """The keys of the command that was opened last."""
    count = calls.add("commands", 0)
    return _keys(calls, count - 1) if count else None


def _lives(keys: Keys) -> bool:
    """Whether a rank 0 raises its counter."""
    beats, end = keys.add("alive/0", 0), time.monotonic() + BEATS
    while time.monotonic() < end:
        if keys.add("alive/0", 0) != beats:
            return True
        time.sleep(LOOK)
    return False
