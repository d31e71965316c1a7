"""A power loss after every call leaves the whole target or none."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from zckpt.copying.journal import MARK

from . import tiny
from .faults import Conversion, Good, clear, conversion, good, tree
from .powerloss import Disk, below, losses, write
from .runner import Call, Runner
from .test_kills import resumes, second

PAIRS = [(kind, to) for kind in tiny.SOURCES for to in tiny.WRITTEN]
FIRST = list(zip(tiny.SOURCES, (*tiny.WRITTEN[1:-1], "deepspeed-2"), strict=True))
FIRST += [("universal", "hf")]
TARGET = "new/target"


def recorded(runner: Runner, conversion: Conversion) -> Good:
    """The calls of a run with their data, also those on the folder of the target's new parent."""
    return good(runner, conversion, conversion.outer.parent)


def broken(expected: Good, state: dict[str, bytes]) -> bool:
    """Whether a state has a target that is not whole."""
    target = below(state, TARGET)
    return target is not None and target != {**expected.target, "": b""}


@pytest.mark.parametrize(("kind", "to"), FIRST)
def test_the_target_is_whole_or_absent(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    run = conversion(kind, to, smallest, tmp_path)
    expected = recorded(runner, run)
    states = with_target = 0
    wrong = []
    for number, call, disk in losses(expected.calls, tmp_path):
        for state in disk.states(range(number, number + 10)):
            states += 1
            with_target += f"{TARGET}/" in state
            if broken(expected, state):
                wrong.append(f"after {call.number} {call}")
    print(f"{states} states, {with_target} with a target")
    assert with_target
    assert wrong == []


@pytest.mark.parametrize(("kind", "to"), FIRST[:2])
def test_a_target_that_is_reported_stays(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    """After exit code 0 no power loss takes it away, nor its folder, which the run has created."""
    run = conversion(kind, to, smallest, tmp_path)
    expected = recorded(runner, run)
    disk = Disk(tmp_path)
    for call in expected.calls:
        disk.apply(call)
    for state in disk.states(range(20)):
        assert below(state, TARGET) == {**expected.target, "": b""}


def test_a_rename_before_the_sync_is_seen(
    runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    run = conversion("gathered", "universal", smallest, tmp_path)
    expected = recorded(runner, run)
    (staged,) = [call.path for call in expected.calls if call.other == str(run.target)]
    moved = {call.path: call.other for call in expected.calls if call.other}  # one file each
    for path in {call.path for call in expected.calls if call.function == "fsync"}:
        if f"{staged}/" not in f"{path}/":
            continue
        names = {path, moved.get(path), *(old for old, new in moved.items() if new == path)}
        synced = {("fsync", name) for name in names}
        calls = [call for call in expected.calls if (call.function, call.path) not in synced]
        assert any(
            broken(expected, state)
            for _number, _call, disk in losses(calls, tmp_path)
            for state in disk.states(range(4))
        ), f"{path} was not synced"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "to"), PAIRS)
def test_every_state_goes_on(
    kind: str, to: str, runner: Runner, smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    """What a power loss left of `.partial` is continued with --resume."""
    run = conversion(kind, to, smallest, tmp_path)
    if not resumes(run.command):
        pytest.skip("there is no --resume")
    assert all_go_on(runner, run, tmp_path, 4, 1.0) == []


def test_some_states_go_on(runner: Runner, smallest: Callable[[str], Path], tmp_path: Path) -> None:
    run = conversion("universal", "deepspeed-2", smallest, tmp_path)
    if not resumes(run.command):
        pytest.skip("there is no --resume")
    assert all_go_on(runner, run, tmp_path, 1, 0.02) == []


def all_go_on(runner: Runner, run: Conversion, root: Path, seeds: int, share: float) -> list[str]:
    """The target's mark is an attribute of its folder, which was synced before the rename."""
    expected = recorded(runner, run)
    assert second(runner, run)[0] == 0
    mark = os.getxattr(run.target, MARK)
    clear(run)
    chance, seen, wrong = random.Random(0), set(), []
    for number, call, disk in losses(expected.calls, root):
        for state in disk.states(range(number, number + seeds)):
            key = hash(frozenset(state.items()))
            if key in seen or chance.random() > share:
                continue
            seen.add(key)
            wrong += continued(runner, run, expected, state, call, mark)
    print(f"{len(seen)} states continued")
    return wrong


def continued(
    runner: Runner,
    run: Conversion,
    expected: Good,
    state: dict[str, bytes],
    call: Call,
    mark: bytes,
) -> list[str]:
    write(state, run.outer.parent)
    if os.path.lexists(run.target):
        os.setxattr(run.target, MARK, mark)
    code, said = second(runner, run)
    is_good = not code and os.path.lexists(run.target) and tree(run.target) == expected.target
    clear(run)
    return [] if is_good else [f"{code} after {call.number} {call}: {said[-300:]}"]


def test_the_model_knows_what_is_synced(tmp_path: Path) -> None:
    """A file without the sync of its folder may be lost; so may bytes without that of the file."""
    disk = Disk(tmp_path)

    def call(function: str, name: str, **more: object) -> None:
        path = str(tmp_path / name) if name else str(tmp_path)
        values = {"other": "", "offset": 0, "length": 0, "result": 0, "flags": 0, "data": b""}
        values.update(more)
        assert disk.apply(Call(1, function, path, error=0, **values))  # type: ignore[arg-type]

    call("open", "a", flags=os.O_CREAT)
    call("write", "a", data=b"xy", result=2)
    assert {tuple(state.items()) for state in disk.states(range(8))} == {
        (),
        (("a", b""),),
        (("a", b"\0\0"),),
        (("a", b"xy"),),
    }
    call("fsync", "a")
    assert {tuple(state.items()) for state in disk.states(range(8))} == {(), (("a", b"xy"),)}
    call("fsync", "")
    assert {tuple(state.items()) for state in disk.states(range(8))} == {(("a", b"xy"),)}
