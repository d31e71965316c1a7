"""How the mode of writes is chosen: the time is the test's own, writers only note their syncs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying.pace import CHECK, OTHER, TRIAL, WINDOW, Cost, Pace
from zckpt.core.fileio import Writer

from .conftest import folder_at

CHUNK = 4 << 20
LARGE = 1 << 40


class Disk:
    """Takes `seconds` and `cpu` a chunk in each mode: wall and CPU time; a sync takes `sync`."""

    def __init__(self, buffered: float, direct: float, sync: float = 0.0) -> None:
        self.seconds = {"buffered": buffered, "direct": direct}
        self.cpu = {"buffered": 0.2, "direct": 0.1}
        self.sync_seconds = sync
        self.now = Cost()
        self.mode = ""
        self.syncs: list[str] = []

    def sync(self) -> None:
        self.syncs.append(self.mode)
        self._pass(self.sync_seconds if self.mode == "buffered" else 0.0)

    def _pass(self, wall: float, cpu: float = 0.0) -> None:
        self.now = Cost(self.now.wall + wall, self.now.cpu + cpu)

    def write(self, pace: Pace, size: int) -> list[str]:
        """Writes chunks one after another; gives their modes."""
        writer: Any = self
        modes = []
        for _ in range(0, size, CHUNK):
            with pace.turn(writer, CHUNK) as mode:
                self.mode = mode
                self._pass(self.seconds[mode], self.cpu[mode])
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
        (1.5, 1.0, 0.0, "direct"),
        (1.0, 2.0, 100.0, "direct"),  # the page cache was fast, the disk behind it was not
        (1.0, 1.0, 0.0, "direct"),  # as fast, and it needs less CPU
        (0.8, 1.0, 0.0, "direct"),  # not much slower, and it needs less CPU
    ],
)
def test_the_better_mode_goes_on_after_the_trials(
    buffered: float, direct: float, sync: float, expected: str
) -> None:
    disk = Disk(buffered, direct, sync)
    modes = disk.write(begun(disk), 3 * TRIAL + WINDOW)
    trials = ["direct", "direct", "buffered"]  # the first one counts for neither way
    assert disk.syncs == [mode for mode in (*trials, expected) if mode == "buffered"]
    assert modes[: 3 * TRIAL // CHUNK] == [mode for mode in trials for _ in range(TRIAL // CHUNK)]
    assert set(modes[3 * TRIAL // CHUNK :]) == {expected}


def test_the_first_writes_of_a_copy_count_for_neither_way() -> None:
    disk = Disk(buffered=1.0, direct=9.0)
    copying = begun(disk)
    disk.write(copying, TRIAL)
    disk.seconds["direct"] = 1.0  # threads have their memory now
    disk.write(copying, 3 * TRIAL)
    assert copying.mode == "direct"


def test_buffered_writes_go_on_if_they_need_less_of_both() -> None:
    disk = Disk(buffered=0.9, direct=1.0)
    disk.cpu = {"buffered": 0.2, "direct": 0.3}
    copying = begun(disk)
    disk.write(copying, 4 * TRIAL)
    assert copying.mode == "buffered"


@pytest.mark.parametrize("what", ["seconds", "cpu"])
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_the_mode_changes_when_it_gets_worse(mode: str, what: str) -> None:
    disk = Disk(buffered=1.0, direct=1.0)
    other = OTHER[mode]
    disk.seconds[other], disk.cpu[other] = 2.0, 0.4
    copying = begun(disk)
    disk.write(copying, 3 * TRIAL + WINDOW - CHECK)
    assert copying.mode == mode
    disk.seconds[other] = 0.9
    getattr(disk, what)[mode] *= 9
    disk.write(copying, CHECK + TRIAL)
    assert copying.mode == other


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_the_other_mode_is_tried_at_once_if_the_rate_falls(mode: str) -> None:
    disk = Disk(buffered=1.0, direct=1.0)
    disk.seconds[OTHER[mode]] = 2.0
    copying = begun(disk)
    disk.write(copying, 3 * TRIAL + CHECK)
    disk.seconds[mode] = 1.5
    disk.write(copying, CHECK)
    assert copying.mode == mode
    disk.seconds[mode] = 9.0
    disk.write(copying, CHECK + TRIAL)
    assert copying.mode == OTHER[mode]


def test_trials_are_rare() -> None:
    """The first one, and after 1, 2, 4 and 8 GiB more."""
    disk = Disk(buffered=1.5, direct=1.0)
    modes = disk.write(begun(disk), 16 << 30)
    assert modes.count("buffered") * CHUNK == 5 * TRIAL


@pytest.mark.parametrize(("mode", "trials"), [("buffered", 2), ("direct", 1)])
def test_a_trial_that_is_lost_ends(mode: str, trials: int) -> None:
    """One chunk takes too long; the next one has begun before that is seen."""
    disk = Disk(buffered=1.0, direct=1.0)
    disk.seconds[mode] = 20.0
    modes = disk.write(begun(disk), 2 << 30)[2 * TRIAL // CHUNK :]
    assert modes.count(mode) == 2 * trials


def test_trials_come_soon_again_after_a_change() -> None:
    disk = Disk(buffered=1.5, direct=1.0)
    copying = begun(disk)
    disk.write(copying, 8 << 30)
    disk.seconds["direct"] = 9.0
    disk.write(copying, CHECK + 2 * TRIAL)
    assert copying.mode == "buffered"
    disk.seconds["direct"] = 0.1
    disk.write(copying, WINDOW + TRIAL)
    assert copying.mode == "direct"


def test_threads_wait_for_the_end_of_a_trial() -> None:
    """A chunk of the next trial would be measured in both."""
    disk = Disk(1.0, 2.0)
    trials = begun(disk)
    disk.write(trials, TRIAL)
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
    assert began == ["buffered"]


def test_a_failed_write_ends_its_turn() -> None:
    disk = Disk(1.0, 2.0)
    trials = begun(disk)
    disk.write(trials, TRIAL)
    writer: Any = disk
    with pytest.raises(OSError, match="full"), trials.turn(writer, TRIAL):
        raise OSError("full")
    with trials.turn(writer, CHUNK) as mode:
        assert mode == "buffered"


def test_a_closed_file_is_not_synced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with Writer(folder_at(tmp_path), str(path), 8192, "auto") as writer:
        writer.sync()
    writer.sync()
