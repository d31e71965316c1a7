"""Do hostile files end in one sentence, within 5 s of CPU and 512 MiB, and run nothing?

Every command runs in a fork with these limits and an audit hook: see limited.py. By default a part
of the samples runs, `-m exhaustive` runs every sample with every command.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import hostile
from .hostile import SAMPLES
from .limited import Ended, Limited

PLACE = {  # arguments of each command, in which SRC and DST stand for paths
    "inspect": "inspect SRC",
    "json": "inspect SRC --json --state --layout",
    "steps": "inspect SRC --steps",
    "tensors": "inspect SRC --tensors *",
    "layout": "inspect SRC --layout",
    "state": "inspect SRC --state",
    "verify": "verify SRC --json",
    "stats": "stats SRC --json",
    "diff": "diff SRC SRC",
    "universal": "convert SRC DST",
    "dcp": "convert SRC DST --to dcp",
    "gathered": "convert SRC DST --to gathered",
    "deepspeed": "convert SRC DST --to deepspeed --dp 2",
    "onnxruntime": "convert SRC DST --to onnxruntime",
    "export": "export SRC DST",
}
FEW = ("json", "verify", "universal")


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    process = Limited()
    yield process
    process.close()
    shutil.rmtree(hostile.ROOT, ignore_errors=True)


def run(limited: Limited, name: str, command: str, folder: Path) -> Ended:
    """Runs a command on a sample, whose files lie in `folder`."""
    source, target = next(folder.glob("source*")), folder / "target"
    places = {"SRC": source, "DST": target}
    words = [places.get(word, word) for word in PLACE[command].split()]
    ended = limited.run(*words, *SAMPLES[name].words, folder=folder)
    if target.is_dir():
        shutil.rmtree(target)
    return ended


def fault(name: str, command: str, ended: Ended) -> str | None:
    """What is wrong with the end of a command; None if nothing is."""
    if ended.foreign:
        return f"it did {ended.foreign[:3]}"
    if ended.signal or ended.cpu > 5:
        return f"signal {ended.signal} after {ended.cpu:.1f} s of CPU"
    if "Traceback" in ended.err or "InternalError" in ended.err + ended.out:
        return ended.err[-400:] + ended.out[-400:]
    if ended.code not in (0, 1, 2, 3):  # 2: the target cannot have what the file states
        return f"exit {ended.code}: {ended.err[-300:]}"
    if ended.code in (1, 2):
        lines = [line for line in ended.err.splitlines() if not line.startswith("Warning")]
        if "--json" in PLACE[command]:
            document = json.loads(ended.out)
            if not document["message"] or not document["hint"]:
                return f"an error without a sentence or a hint: {document}"
        elif len(lines) < 2 or lines[0][:7] != "Error: " or lines[1][:6] != "Hint: ":
            return f"not a sentence and a hint: {ended.err[-500:]}"
    if SAMPLES[name].is_refused and ended.code == 0:
        return "it was accepted"
    return None


def check(limited: Limited, name: str, commands: tuple[str, ...], folder: Path) -> None:
    SAMPLES[name].write(folder)
    faults = {
        command: wrong
        for command in commands
        if (wrong := fault(name, command, run(limited, name, command, folder)))
    }
    assert not faults


FIRST = [name for place, name in enumerate(SAMPLES) if place % 80 == 0]


@pytest.mark.parametrize("name", FIRST)
def test_a_hostile_file_ends_in_a_sentence(name: str, limited: Limited, tmp_path: Path) -> None:
    check(limited, name, FEW, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_every_command_ends_in_a_sentence(name: str, limited: Limited, tmp_path: Path) -> None:
    check(limited, name, tuple(PLACE), tmp_path)
    shutil.rmtree(tmp_path)


def test_the_limits_hold(limited: Limited, tmp_path: Path) -> None:
    """The hook, the limits and the judgment of an end see what they are for."""
    shutil.copytree(hostile.EXAMPLE, tmp_path / "source")
    ended = run(limited, FIRST[0], "json", tmp_path)
    assert (ended.code, ended.foreign) == (0, [])
    outside = limited.run("inspect", hostile.EXAMPLE, folder=tmp_path)
    assert any(line.startswith("open") for line in outside.foreign)
    assert fault(FIRST[0], "inspect", outside)
