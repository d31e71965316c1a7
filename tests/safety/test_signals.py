"""A signal at any moment: the target is whole or absent, and what is said about it is true."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ..conftest import EXAMPLE, ROOT
from . import tiny
from .faults import Conversion, Good, clear, conversion, good, kill, run, tree
from .runner import Call, Runner

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAIRS = [(kind, to) for kind in tiny.SOURCES for to in tiny.WRITTEN]
FIRST = [("deepspeed-3", "universal"), ("universal", "deepspeed-2"), ("gathered", "onnxruntime")]
DENIALS = ("no target", "nothing was")


def untrue(conversion: Conversion, expected: Good, code: int, said: str, number: int) -> list[str]:
    """What is wrong after a signal."""
    is_there = os.path.lexists(conversion.target)
    wrong = []
    if "Traceback" in said or "a bug in zckpt" in said:
        wrong.append("an internal error")
    if code not in (0, 128 + number):
        wrong.append(f"exit code {code}")
    if code == 0 and not is_there:
        wrong.append("exit code 0 without a target")
    if is_there and tree(conversion.target) != expected.target:
        wrong.append("a wrong target")
    if is_there and any(denial in said for denial in DENIALS):
        wrong.append("a target that is denied")
    if conversion.partial.exists() and (is_there or str(conversion.partial) not in said):
        wrong.append("a .partial that is not mentioned")
    if tree(conversion.source) != expected.source:
        wrong.append("another source")
    return wrong


def all_interrupted(
    runner: Runner,
    conversion: Conversion,
    choose: Callable[[list[Call]], Iterable[tuple[Call, int]]],
) -> list[str]:
    expected = good(runner, conversion)
    wrong = []
    counts = {}
    for call, number in choose(list(expected.calls)):
        ended = run(runner, conversion, kill(call, number))
        counts[ended.code] = counts.get(ended.code, 0) + 1
        for defect in untrue(conversion, expected, ended.code, ended.err, number):
            said = " ".join(ended.err.split())[-200:]
            wrong.append(f"{defect}: signal {number} at {call.number} {call}: {said}")
        clear(conversion)
    print(f"exit codes: {counts}")
    return wrong


@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_some_signals(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    def choose(calls: list[Call]) -> list[tuple[Call, int]]:
        chosen = random.Random(kind).sample(calls[:-8], 6) + calls[-8:]  # around the rename
        return [(call, SIGNALS[call.number % 3]) for call in chosen]

    assert all_interrupted(runner, conversion(kind, to, smallest, tmp_path), choose) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), PAIRS)
def test_every_signal(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    def choose(calls: list[Call]) -> list[tuple[Call, int]]:
        return [(call, SIGNALS[call.number % 3]) for call in calls]

    assert all_interrupted(runner, conversion(kind, to, smallest, tmp_path), choose) == []


def interrupted_at(
    moment: float, number: int, target: Path, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """A whole process that gets a signal after `moment` seconds."""
    command = [sys.executable, "-m", "zckpt", "convert", str(EXAMPLE), str(target), *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    time.sleep(moment)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def random_moments(times: int, seed: int, tmp_path: Path) -> list[str]:
    expected_target = tmp_path / "good"
    started = time.monotonic()
    code, _ = interrupted_at(0, 0, expected_target)
    took = time.monotonic() - started
    assert code == 0
    whole, chance, wrong = tree(expected_target), random.Random(seed), []
    for trial in range(times):
        target, number = tmp_path / f"target-{trial}", chance.choice(SIGNALS)
        moment = chance.uniform(0, took * 1.2)
        code, said = interrupted_at(moment, number, target)
        if target.exists() and tree(target) != whole:
            wrong.append(f"a wrong target: signal {number} after {moment:.3f} s")
        if target.exists() and any(denial in said for denial in DENIALS):
            wrong.append(f"a target that is denied: signal {number} after {moment:.3f} s")
        if code == 0 and not target.exists():
            wrong.append(f"exit code 0 without a target: signal {number} after {moment:.3f} s")
    return wrong


def test_random_moments(tmp_path: Path) -> None:
    assert random_moments(4, 0, tmp_path) == []


@pytest.mark.exhaustive
def test_many_random_moments(tmp_path: Path) -> None:
    assert random_moments(300, 1, tmp_path) == []
