"""How the mode of writes is chosen: the time is the test's own, writers only note their syncs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from zckpt.core import pace
from zckpt.core.fileio import Writer
from zckpt.core.pace import TRIAL, TRIALS, Pace

CHUNK = 4 << 20
LARGE = 1 << 40


class Disk:
    """Takes `seconds` a chunk in each mode; a sync takes `sync` seconds in each mode."""

    def __init__(self, buffered: float, direct: float, sync: float = 0.0) -> None:
        self.seconds = {"buffered": buffered, "direct": direct}
        self.sync_seconds = sync
        self.now = 0.0
        self.mode = ""
        self.syncs: list[str] = []

    def sync(self) -> None:
        self.syncs.append(self.mode)
        self.now += self.sync_seconds if self.mode == "buffered" else 0.0

    def write(self, pace: Pace, size: int) -> list[str]:
        """Writes chunks one after another; gives their modes."""
        writer: Any = self
        modes = []
        for _ in range(0, size, CHUNK):
            with pace.turn(writer, CHUNK) as mode:
                self.mode = mode
                self.now += self.seconds[mode]
            modes.append(mode)
        return modes


def begun(disk: Disk, asked: str = "auto", size: int = LARGE) -> Pace:
    return Pace(asked, size, lambda: disk.now)


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_the_users_choice_is_not_measured(mode: str) -> None:
    disk = Disk(1.0, 1.0)
    assert set(disk.write(begun(disk, mode), 4 * TRIAL)) == {mode}
    assert not disk.syncs


def test_a_small_target_is_not_worth_trials() -> None:
    disk = Disk(9.0, 1.0)
    small = begun(disk, size=TRIAL)
    assert set(disk.write(small, TRIAL)) == {"buffered"}
    assert small.opening == "buffered"  # files are opened once


@pytest.mark.parametrize(
    ("buffered", "direct", "sync", "expected"),
    [
        (1.0, 2.0, 0.0, "buffered"),
        (3.0, 1.0, 0.0, "direct"),
        (1.0, 2.0, 100.0, "direct"),  # the page cache was fast, the disk behind it was not
        (1.0, 1.0, 0.0, "direct"),  # as fast, and it needs less CPU
    ],
)
def test_the_faster_mode_goes_on_after_the_trials(
    buffered: float, direct: float, sync: float, expected: str
) -> None:
    disk = Disk(buffered, direct, sync)
    modes = disk.write(begun(disk), 3 * len(TRIALS) * TRIAL)
    trials = ("direct", *TRIALS)[: len(disk.syncs)]  # the first one counts for neither way
    assert disk.syncs == list(trials)
    expected_modes = [mode for mode in trials for _ in range(TRIAL // CHUNK)]
    assert modes[: len(expected_modes)] == expected_modes
    assert set(modes[len(expected_modes) :]) == {expected}
    assert len(trials) == (5 if 1 < direct / (buffered + sync) <= pace.CLEAR else 3)


def test_the_first_writes_of_a_copy_count_for_neither_way() -> None:
    disk = Disk(buffered=1.0, direct=9.0)
    copying = begun(disk)
    disk.write(copying, TRIAL)
    disk.seconds["direct"] = 0.5  # threads have their memory now
    assert "buffered" not in disk.write(copying, 8 * TRIAL)[2 * TRIAL // CHUNK :]
    assert copying.mode == "direct"


def test_buffered_writes_must_be_clearly_faster() -> None:
    """They need twice the CPU time."""
    disk = Disk(buffered=0.8, direct=1.0)
    copying = begun(disk)
    disk.write(copying, 8 * TRIAL)
    assert copying.mode == "direct"
    assert disk.syncs == ["direct", *TRIALS]  # not clear after the first two


def test_trials_are_repeated_when_the_rate_falls() -> None:
    disk = Disk(1.0, 2.0)
    pace = begun(disk)
    disk.write(pace, 4 * pace_bytes())
    assert pace.mode == "buffered"
    disk.seconds["buffered"] = 9.0  # the memory that was hot is used up
    modes = disk.write(pace, 4 * pace_bytes())
    assert pace.mode == "direct"
    assert modes.count("buffered") * CHUNK <= 2 * pace_bytes() + 2 * TRIAL


def test_a_slightly_slower_disk_repeats_nothing() -> None:
    disk = Disk(1.0, 2.0)
    pace = begun(disk)
    disk.write(pace, 2 * pace_bytes())
    disk.seconds["buffered"] = 1.5
    assert set(disk.write(pace, 4 * pace_bytes())) == {"buffered"}


def pace_bytes() -> int:
    return max(pace.WINDOW, len(TRIALS) * TRIAL)


def test_threads_wait_for_the_end_of_a_trial() -> None:
    """A chunk of the next trial would be measured in both."""
    disk = Disk(1.0, 2.0)
    trials = begun(disk)
    disk.write(trials, TRIAL)  # the one that counts for neither way
    writer: Any = disk
    inside, leave = threading.Event(), threading.Event()
    began: list[str] = []

    def slow() -> None:
        with trials.turn(writer, TRIAL):
            inside.set()
            leave.wait(10)

    def late() -> None:
        with trials.turn(writer, CHUNK) as mode:
            began.append(mode)

    threads = [threading.Thread(target=slow), threading.Thread(target=late)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert not began
    leave.set()
    for thread in threads:
        thread.join(10)
    assert began == [TRIALS[1]]


def test_a_failed_write_ends_its_turn() -> None:
    disk = Disk(1.0, 2.0)
    trials = begun(disk)
    disk.write(trials, TRIAL)  # the one that counts for neither way
    writer: Any = disk
    with pytest.raises(OSError, match="full"), trials.turn(writer, TRIAL):
        raise OSError("full")
    with trials.turn(writer, CHUNK) as mode:
        assert mode == TRIALS[1]


def test_a_closed_file_is_not_synced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with Writer(str(path), 8192, "auto") as writer:
        writer.sync()
    writer.sync()
