"""Runs that begin at the same time: each is paused between every two of its steps.

The runs are threads, whose system calls wait until the test lets them happen. `flock` and files do
not know that: they see one process after the other. A killed run makes no call any more.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying.journal import Identity, Region
from zckpt.copying.sharing import Part, Sharing
from zckpt.copying.staging import Staging
from zckpt.core.passes.layout import Shell
from zckpt.errors import TargetExists

CALLS = (
    *("open", "mkdir", "rmdir", "unlink", "rename", "stat", "lstat", "listdir", "scandir"),
    *("fsync", "fdatasync", "write", "pwrite", "ftruncate"),
)
SIZE = 8  # bytes of a target
Work = Callable[[], str]


class Killed(BaseException):
    """What ends a run at a system call."""


class Run(threading.Thread):
    """A run that does one step at a time."""

    current = threading.local()

    def __init__(self, work: Work) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.outcome: str | BaseException | None = None
        self.is_waiting = self.is_killed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
        self._stopped.acquire()

    def run(self) -> None:
        Run.current.run = self
        try:
            self.pause()
            self.outcome = self.work()
        except BaseException as error:
            self.outcome = error
        self._stopped.release()

    def pause(self, is_waiting: bool = False) -> None:
        if not self.is_killed:
            self.is_waiting = is_waiting
            self._stopped.release()
            self._go.acquire()
        if self.is_killed:
            raise Killed

    def step(self) -> bool:
        """Does one step; False if the run has ended, or waits for another one."""
        if self.outcome is None:
            self._go.release()
            self._stopped.acquire()
        return self.outcome is None and not self.is_waiting

    def kill(self) -> None:
        if self.outcome is None:
            self.is_killed = True
            self.step()
            self.outcome = Killed()

    @property
    def has_stopped(self) -> bool:
        """Whether it found another run; it must not fail in another way."""
        if isinstance(self.outcome, BaseException):
            assert isinstance(self.outcome, TargetExists | Killed), repr(self.outcome)
            assert not isinstance(self.outcome, TargetExists) or self.outcome.hint
        return isinstance(self.outcome, TargetExists)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every system call of a run is a step; a wait is one that takes no time."""
    waited = [0.0]

    def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **words: Any) -> Any:
            if run := getattr(Run.current, "run", None):
                run.pause()
            return call(*args, **words)

        return paused

    def sleep(seconds: float) -> None:
        waited[0] += seconds
        Run.current.run.pause(is_waiting=True)

    monotonic = time.monotonic
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, stepping(getattr(os, name)))
        patch.setattr(fcntl, "flock", stepping(fcntl.flock))
        patch.setattr(time, "sleep", sleep)
        patch.setattr(time, "monotonic", lambda: monotonic() + waited[0])
        yield


def finish(*runs: Run) -> None:
    """Lets the runs go on, one after the other, until all have ended."""
    for turn in count():
        assert turn < 2000, "they wait for each other"
        for run in runs:
            while run.step():
                pass
        if all(run.outcome is not None for run in runs):
            return


# -- what a run does


def write(staged: Staging, letter: str, start: int, stop: int) -> None:
    """Some of the target's bytes, as a copy writes them, and a note of it."""
    if any(region.start <= start < region.stop for region in staged.journal.regions.get("a", ())):
        return
    path = os.path.join(staged.path, "a")
    with staged.root.opened(path, os.O_RDWR) as file:
        os.pwrite(file, letter.encode() * (stop - start), start)
        os.fsync(file)
    staged.journal.add(Region("a", start, stop, []))


def identity(letter: str) -> Identity:
    return Identity("1", {}, {"--letter": letter}, {"a": SIZE})


def part(target: Path, letter: str, number: int) -> str:
    sharing = Part(number, 2)
    with Staging(str(target), identity(letter), 4, resume=True, sharing=sharing) as staged:
        staged.lay([Shell("a", SIZE, ())])
        half = SIZE // 2
        write(staged, letter, half * (number - 1), half * number)
        regions = sharing.regions_of_others(staged.journal)
        if regions is None or sum(region.stop - region.start for region in regions) < SIZE:
            staged.postpone()
            return "postponed"
    return "completed"


class Several(Sharing):
    """Rank 0 of several processes, of which the others have nothing to do."""

    is_alone = False


def whole(target: Path, letter: str, resume: bool, sharing: Sharing | None = None) -> str:
    sharing = sharing or Sharing()
    with Staging(str(target), identity(letter), 4, resume=resume, sharing=sharing) as staged:
        staged.lay([Shell("a", SIZE, ())])
        staged.share()
        write(staged, letter, 0, SIZE // 2)
        write(staged, letter, SIZE // 2, SIZE)
    return "completed"


DOORS: dict[str, Callable[[Path, str], str]] = {
    "part 1": lambda target, letter: part(target, letter, 1),
    "part 2": lambda target, letter: part(target, letter, 2),
    "new": lambda target, letter: whole(target, letter, False),
    "resume": lambda target, letter: whole(target, letter, True),
    "several": lambda target, letter: whole(target, letter, False, Several()),
}
PAIRS = [
    ("part 1", "part 2"),
    ("part 1", "resume"),
    ("new", "part 1"),
    ("resume", "resume"),
    ("part 1", "part 1"),
    ("resume", "part 1"),
    ("part 1", "new"),
    ("new", "new"),
    ("new", "resume"),
    ("several", "part 1"),
    ("several", "several"),
]
OFTEN = 4  # pairs that are tried in each run of the tests
BOTH = [
    pytest.param(pair, id=" and ".join(pair), marks=[pytest.mark.exhaustive] * (number >= OFTEN))
    for number, pair in enumerate(PAIRS)
]


def begun(target: Path, door: str, letter: str) -> Run:
    return Run(lambda: DOORS[door](target, letter))


def content(target: Path) -> str:
    return (target / "a").read_text()


def is_fixed(target: Path) -> bool:
    """Whether a run has begun that no other one can continue."""
    journal = target.with_name(f"{target.name}.partial") / "journal"
    return journal.exists() and journal.stat().st_size > 0


def number_of_steps(target: Path, door: str) -> int:
    run, steps = begun(target, door, "A"), 1
    while run.step():
        steps += 1
    return steps


def goes_on(target: Path, letter: str) -> bool:
    """Whether parts of a run, started now one after the other, complete the target."""
    for number in (1, 2):
        if target.exists():
            break
        run = Run(lambda number=number: part(target, letter, number))  # type: ignore[misc]
        finish(run)
        if run.has_stopped:
            return False
    return content(target) == letter * SIZE


def check(target: Path, runs: dict[str, Run]) -> None:
    """Of runs by their letters at least one stops, and what is left is that of the other one."""
    stopped = [letter for letter, run in runs.items() if run.has_stopped]
    outcomes = {letter: run.outcome for letter, run in runs.items()}
    assert stopped, outcomes
    if target.exists():
        assert content(target) in {letter * SIZE for letter in runs if letter not in stopped}
    going_on = [letter for letter in runs if letter not in stopped] or [*runs]
    assert any(goes_on(target, letter) for letter in going_on), outcomes
    assert content(target) in {letter * SIZE for letter in going_on}


@pytest.mark.parametrize("doors", BOTH)
def test_of_two_runs_one_stops(doors: tuple[str, str], tmp_path: Path) -> None:
    """One is paused after each of its steps, while the other one does all of its work."""
    for pause in range(number_of_steps(tmp_path / "alone", doors[0])):
        target = tmp_path / f"{pause}"
        first, second = (
            begun(target, door, letter) for door, letter in zip(doors, "AB", strict=True)
        )
        for _ in range(pause):
            first.step()
        finish(second, first)
        check(target, {"A": first, "B": second})


@pytest.mark.parametrize("doors", BOTH)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.exhaustive), 97])
def test_of_two_runs_that_are_paused_one_stops(
    every: int, doors: tuple[str, str], tmp_path: Path
) -> None:
    """Both are paused, each after each of its steps."""
    steps = [number_of_steps(tmp_path / door, door) for door in doors]
    for pauses in range(0, steps[0] * steps[1], every):
        target = tmp_path / f"{pauses}"
        first, second = (
            begun(target, door, letter) for door, letter in zip(doors, "AB", strict=True)
        )
        for _ in range(pauses % steps[0]):
            first.step()
        for _ in range(pauses // steps[0]):
            second.step()
        finish(first, second)
        check(target, {"A": first, "B": second})


def test_of_three_runs_two_stop(tmp_path: Path) -> None:
    steps = number_of_steps(tmp_path / "alone", "part 1")
    for pause in range(0, steps, 2):
        target = tmp_path / f"{pause}"
        runs = [begun(target, "part 1", "A"), begun(target, "part 2", "B")]
        runs += [begun(target, "part 1", "C"), begun(target, "part 2", "A")]
        for run, more in zip(runs, (0, 3, 5, 9), strict=True):
            for _ in range((pause + more * steps // 10) % steps):
                run.step()
        finish(*runs)
        letters = dict(zip(runs, "ABCA", strict=True))
        left = {letters[run] for run in runs if not run.has_stopped}
        assert len(left) == 1, [run.outcome for run in runs]
        assert goes_on(target, *left)


def test_parts_of_one_run_complete_it(tmp_path: Path) -> None:
    """However they meet, both end well, and one of them completes the target."""
    for pause in range(number_of_steps(tmp_path / "alone", "part 1")):
        target = tmp_path / f"{pause}"
        first, second = begun(target, "part 1", "A"), begun(target, "part 2", "A")
        for _ in range(pause):
            first.step()
        finish(second, first)
        assert not first.has_stopped
        assert not second.has_stopped
        assert content(target) == "A" * SIZE
        assert not target.with_name(f"{pause}.partial").exists()


@pytest.mark.parametrize("other", ["the same part", "another run"])
def test_a_part_that_stops_takes_no_completion_away(other: str, tmp_path: Path) -> None:
    """The last part completes the target, whoever has just looked at it, and stopped."""
    door, letter = ("part 1", "A") if other == "the same part" else ("part 1", "B")
    for pause in range(number_of_steps(tmp_path / "alone", "part 1")):
        target = tmp_path / f"{pause}"
        finish(begun(target, "part 2", "A"))
        first, second = begun(target, "part 1", "A"), begun(target, door, letter)
        while not (target.with_name(f"{pause}.partial") / "journal-1-of-2").exists():
            first.step()
        for _ in range(pause):
            second.step()
        finish(first)
        finish(second)
        assert content(target) == "A" * SIZE, (pause, first.outcome, second.outcome)


@pytest.mark.parametrize("letter", "AB")
@pytest.mark.parametrize("doors", BOTH)
def test_after_a_kill_the_next_start_goes_on(
    doors: tuple[str, str], letter: str, tmp_path: Path
) -> None:
    """What a dead run has begun is its own; it can be continued as that run, or begun anew."""
    for pause in range(number_of_steps(tmp_path / "alone", doors[0])):
        target = tmp_path / f"{pause}"
        first = begun(target, doors[0], "A")
        for _ in range(pause):
            first.step()
        first.kill()
        second = begun(target, doors[1], letter)
        finish(second)
        if not second.has_stopped and target.exists():
            assert content(target) in (letter * SIZE, "A" * SIZE)
            continue
        assert goes_on(target, letter) or goes_on(target, "A")


def test_a_kill_while_another_run_goes_on(tmp_path: Path) -> None:
    """A part of another run, which is killed anywhere, leaves nothing that would stop the rest."""
    for pause in range(number_of_steps(tmp_path / "alone", "part 2")):
        target = tmp_path / f"{pause}"
        first, second = begun(target, "part 1", "A"), begun(target, "part 2", "B")
        while not is_fixed(target):
            first.step()
        for _ in range(pause):
            second.step()
        second.kill()
        finish(first)
        assert not first.has_stopped, first.outcome
        assert goes_on(target, "A")
