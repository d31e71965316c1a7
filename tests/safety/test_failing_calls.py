"""Every call of a conversion fails, in every way that it can."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from . import tiny
from .faults import (
    Conversion,
    Good,
    clear,
    conversion,
    defects,
    faults,
    from_here_on,
    good,
    one_fault,
    run,
    short_writes,
)
from .runner import Call, Fault, Runner

PAIRS = [(kind, to) for kind in tiny.SOURCES for to in tiny.WRITTEN]
# every kind of source and of target once
FIRST = list(zip(tiny.SOURCES, (*tiny.WRITTEN[1:-1], "deepspeed-2"), strict=True))
FIRST += [("universal", "hf")]
# whose errors os.walk and os.path hide
LISTING = {"opendir", "fdopendir", "readdir64", "stat64", "lstat64", "fstatat64"}

Wanted = Iterable[tuple[Call, str, Fault]]


class Tally:
    """What became of a conversion's faults."""

    def __init__(self, runner: Runner, conversion: Conversion, may_leave: bool = False) -> None:
        self.runner = runner
        self.conversion = conversion
        self.may_leave = may_leave
        self.good: Good = good(runner, conversion)
        self.ends: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []

    def run(self, wanted: Wanted) -> None:
        for call, name, fault in wanted:
            ended = run(self.runner, self.conversion, fault)
            self.ends[name, ended.code] += 1
            for defect in defects(self.conversion, self.good, ended, self.may_leave):
                said = " ".join(ended.err.split())[-300:]
                self.wrong.append(f"{defect}: {name} at {call.number} {call}: {said}")
            clear(self.conversion)

    def every(self, kinds: Callable[[Call], Iterable[tuple[str, Fault]]] = faults) -> Wanted:
        return [(call, *each) for call in self.good.calls for each in kinds(call)]


@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_some_calls_fail(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path))
    tally.run(random.Random(f"{kind} {to}").sample(list(tally.every()), 8))
    print(dict(tally.ends))
    assert tally.wrong == []


@pytest.mark.parametrize(("kind", "to"), FIRST[:1])
def test_calls_around_the_rename_fail(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path))
    rename = next(call.number for call in tally.good.calls if call.function.startswith("rename"))
    tally.run([each for each in tally.every() if each[0].number >= rename - 2])
    print(dict(tally.ends))
    assert tally.wrong == []


@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_folders_are_not_listed(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path))
    listing = [each for each in tally.every(one_fault) if each[0].function in LISTING]
    tally.run(random.Random(kind).sample(listing, 4))
    print(dict(tally.ends))
    assert tally.wrong == []


def test_writes_are_short(runner: Runner, smallest: Callable[[str], Path], tmp_path: Path) -> None:
    tally = Tally(runner, conversion("gathered", "deepspeed-2", smallest, tmp_path))
    tally.run(tally.every(short_writes)[::5])
    print(dict(tally.ends))
    assert tally.wrong == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), PAIRS)
def test_every_call_fails(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path))
    tally.run(tally.every(faults if (kind, to) in FIRST else one_fault))
    tally.run(tally.every(short_writes))
    print(dict(tally.ends))
    assert tally.wrong == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_threads_meet_failing_calls(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path, jobs=4))
    tally.run(random.Random(f"{kind} {to}").sample(list(tally.every()), 300))
    print(dict(tally.ends))
    assert tally.wrong == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_a_disk_stays_away(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    tally = Tally(runner, conversion(kind, to, smallest, tmp_path), may_leave=True)
    tally.run(tally.every(from_here_on))
    print(dict(tally.ends))
    assert tally.wrong == []
