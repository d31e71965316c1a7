"""Which keys of the store are those of the command that this process was started for?

They begin with two numbers: how often the launcher has started its processes, and how many commands
have ended since then. So a script that a launcher starts may run several commands, one after the
other. A rank joins a command once: rank 0 waits for one result of each rank, and the work of a
second process would be lost.

    joined/RANK     how many processes have joined as this rank
    command         what rank 0 was started for
    end             rank 0 has ended
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ..errors import ProcessLost
from .calls import Calls, Keys
from .launch import Launch, restarts
from .meeting import PAUSE, Meeting, meet


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

        Raises ProcessLost if this rank has joined already, and what `meet` raises.
        """
        end = time.monotonic() + self.timeout
        met = self._met(beside)
        while not met.meeting.outlives_rank_0 and self._is_of_earlier_command(met):
            met.close()
            if time.monotonic() > end:
                raise ProcessLost(
                    f"rank 0 of {self.launch.size} has not started within {self.timeout:.0f} s",
                    hint="see its messages; if this process should run alone, add --single",
                )
            time.sleep(PAUSE)
            met = self._met(beside)
        try:
            return met, self._joined(met.calls)
        except BaseException:
            met.close()
            raise

    def _met(self, beside: str | None) -> Met:
        meeting = meet(self.launch, beside, self.timeout)
        return Met(meeting, Calls(meeting.store, self.timeout, self.lost))

    def _is_of_earlier_command(self, met: Met) -> bool:
        """Whether the store that rank 0 hosts is one that an earlier rank 0 will close soon."""
        try:
            return self._is_over(_keys(met.calls, 0))
        except ProcessLost:  # it has closed it
            return True

    def _joined(self, calls: Calls) -> Keys:
        keys = next(
            keys for keys in (_keys(calls, number) for number in count()) if not self._is_over(keys)
        )
        if keys.add(f"joined/{self.launch.rank}", 1) > 1:
            raise ProcessLost(
                f"rank {self.launch.rank} was started twice, or another command of this launch "
                "still runs",
                hint="end all processes of this launch, and start each rank once; then "
                f"{self.again}",
            )
        if self.launch.rank == 0:
            keys.set("command", json.dumps(self.command))
        return keys

    def _is_over(self, keys: Keys) -> bool:
        """Whether a command has ended, and this process was not started for it.

        Rank 0 can fail before this process joins. Then this process joins, and learns of that.
        """
        if not keys.check(["end"]):
            return False
        if keys.check([f"joined/{self.launch.rank}"]):
            return True
        return bool(json.loads(keys.get("command")) != self.command)


def _keys(calls: Calls, number: int) -> Keys:
    return calls.within(f"{restarts()}/{number}/")
