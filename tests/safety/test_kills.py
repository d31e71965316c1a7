"""A conversion is killed before every call that it makes, and goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from zckpt.cli import cli

from . import tiny
from .faults import (
    CODE,
    LEFT,
    SILENT,
    SOURCE,
    Conversion,
    Good,
    clear,
    conversion,
    good,
    kill,
    run,
    tree,
)
from .runner import Call, Runner

PAIRS = [(kind, to) for kind in tiny.SOURCES for to in tiny.WRITTEN]
# functions that change nothing on a disk; open does if it creates or empties a file
LOOKING = {
    *("read", "pread", "preadv", "lseek64", "stat64", "lstat64", "fstat64", "fstatat64", "access"),
    *("__xstat64", "__fxstat64", "__lxstat64", "opendir", "fdopendir", "readdir64", "close"),
    *("posix_fadvise64", "fsync", "getxattr", "fgetxattr", "readlink"),
}
FIRST = [("deepspeed-3", "universal"), ("universal", "deepspeed-2"), ("gathered", "onnxruntime")]


@cache
def resumes(command: str) -> bool:
    """Whether the command has --resume."""
    return any("--resume" in option.opts for option in cli.commands[command].params)


def second(runner: Runner, conversion: Conversion) -> tuple[int, str]:
    """The run after a killed one; without --resume, `.partial` is removed first."""
    options = conversion.options
    if resumes(conversion.command):
        options = (*options, "--resume")
    elif conversion.partial.exists():
        shutil.rmtree(conversion.partial)
    again = Conversion(conversion.command, conversion.source, conversion.target, options)
    ended = run(runner, again)
    return ended.code, ended.err


def killed(runner: Runner, conversion: Conversion, expected: Good, call: Call) -> list[str]:
    """What is wrong after a kill before a call, and after the run that follows."""
    wrong = []
    ended = run(runner, conversion, kill(call))
    assert ended.code == (-9 if ended.fired else 0), ended.err  # threads may make fewer calls
    is_there = os.path.lexists(conversion.target)
    if is_there and tree(conversion.target) != expected.target:
        wrong.append(f"{SILENT}: killed at {call.number} {call}")
    if not is_there or resumes(conversion.command):
        code, said = second(runner, conversion)
        if code:
            wrong.append(f"{CODE}: {code} after a kill at {call.number} {call}: {said[-300:]}")
        elif tree(conversion.target) != expected.target:
            wrong.append(f"{SILENT}: continued after a kill at {call.number} {call}")
        elif conversion.partial.exists():
            wrong.append(f"{LEFT}: continued after a kill at {call.number} {call}")
    if tree(conversion.source) != expected.source:
        wrong.append(f"{SOURCE}: killed at {call.number} {call}")
    clear(conversion)
    return wrong


def first_of_each_state(calls: Sequence[Call]) -> list[Call]:
    """The calls before which a kill leaves something else on the disk than before the last one.

    What the process knew is gone, so kills that leave the same are the same. A kill loses nothing
    that was written; power losses, after which syncs matter, are in test_power_loss.py.
    """
    first, changed = [], True
    for call in calls:
        if changed:
            first.append(call)
        creates = call.function.startswith("open") and call.flags & (os.O_CREAT | os.O_TRUNC)
        changed = creates or call.function not in {*LOOKING, "open", "openat"}
    return first


def all_killed(
    runner: Runner, conversion: Conversion, choose: Callable[[list[Call]], Iterable[Call]]
) -> list[str]:
    expected = good(runner, conversion)
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for call in choose(list(expected.calls)):
        counts[call.function] += 1
        wrong += killed(runner, conversion, expected, call)
    print(f"{counts.total()} kills: {dict(counts)}")
    return wrong


@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_some_kills(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    def choose(calls: list[Call]) -> list[Call]:
        last = calls[-6:]  # around the rename
        return random.Random(kind).sample(calls[:-6], 8) + last

    assert all_killed(runner, conversion(kind, to, smallest, tmp_path), choose) == []


@pytest.mark.parametrize("to", [to for to in tiny.WRITTEN if to != "hf"])
def test_partial_is_no_checkpoint(
    to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    """What a killed run leaves is refused, however it is addressed."""
    command = conversion("gathered", to, smallest, tmp_path)
    expected = good(runner, command)
    rename = next(call for call in expected.calls if call.function.startswith("rename"))
    mkdir = (call for call in expected.calls if call.function.startswith("mkdir"))
    made = next(call for call in mkdir if command.partial.name in str(call))
    during = [call for call in expected.calls if made.number < call.number < rename.number]
    for call in random.Random(to).sample(during, 5):
        run(runner, command, kill(call))
        assert command.partial.exists()
        for path in (command.partial, *command.partial.rglob("*/")):
            ended = runner.run("convert", path, tmp_path / "other", "--weights-only")
            assert ended.code == 1, f"killed at {call.number} {call}: {path} was read"
            assert ended.err.startswith("Error: ")
        clear(command)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), PAIRS)
def test_every_kill(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    command = conversion(kind, to, smallest, tmp_path)
    assert all_killed(runner, command, first_of_each_state) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_threads_are_killed(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    def choose(calls: list[Call]) -> list[Call]:
        return random.Random(kind).sample(calls, 200)

    assert all_killed(runner, conversion(kind, to, smallest, tmp_path, jobs=4), choose) == []
