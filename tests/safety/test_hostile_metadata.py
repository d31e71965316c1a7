"""Hostile `.metadata`: each ends in one sentence, soon, and nothing is imported."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

import zckpt
from zckpt import errors
from zckpt.formats.dcp import gather
from zckpt.formats.dcp.items import stored_items

from ..conftest import ROOT
from . import hostile_metadata
from .hostile_metadata import Sample

DATA = ROOT / "tests" / "data" / "fsdp2-2.13.0-tiny"
SECONDS = 5.0  # of CPU, for any input under 10 MB
MEMORY = 512 << 20  # bytes
WRONG = dict(hostile_metadata.wrong_types()) | dict(hostile_metadata.other_pickles())
HARMLESS = {"storage_meta", "version", "zckpt", "transform"}
"""Fields that may have other values: a warning, or nothing that reading needs."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "run"))


def refused(run: Path) -> str | None:
    """The message with which every reader refuses it; None if all of them read it."""
    messages = set()
    for read in (zckpt.read, partial(stored_items, tag=None), gather.partitions):
        try:
            read(str(run))
        except errors.ZckptError as error:
            messages.add(error.message)
    for message in messages:
        assert str(run) in message
        assert "\n" not in message
        assert len(message) < 5000
    return min(messages, default=None)


def accepted(run: Path, names: Iterable[str]) -> list[str]:
    """The samples that every reader reads."""
    original = (run / ".metadata").read_bytes()
    read = []
    for name in names:
        (run / ".metadata").write_bytes(original)
        WRONG[name](run)
        start = time.process_time()
        if refused(run) is None:
            read.append(name)
        assert time.process_time() - start < SECONDS, name
    return [name for name in read if name.partition("-")[0] not in HARMLESS]


# of planners of a program's own
KINDS = {f"planner_data-{kind}" for kind in ("none", "dictionary", "dictionary_of_numbers")}


def test_wrong_values_are_refused(run: Path) -> None:
    """Many samples in one test, since each takes milliseconds."""
    names = random.Random(7).sample(sorted(WRONG), len(WRONG) // 20)
    assert not set(accepted(run, names)) - KINDS


@pytest.mark.exhaustive
def test_all_wrong_values_are_refused(run: Path) -> None:
    """Every field with every wrong value."""
    assert set(accepted(run, WRONG)) == KINDS


def test_prefixes_are_refused(run: Path) -> None:
    size = (run / ".metadata").stat().st_size
    for length in range(0, size - 1, 397):
        shutil.copy(DATA / ".metadata", run / ".metadata")
        hostile_metadata.truncated(run, length)
        assert refused(run) is not None, length


def limited(name: str, write: Sample, run: Path) -> None:
    """`zckpt inspect` and `verify` end in a sentence, within the limits of time and memory."""
    write(run)
    base = usage("formats", run)[2]
    for command in ("inspect", "verify"):
        code, seconds, memory, said = usage(command, run)
        assert code in (1, 3), (name, command, said)
        assert "Error" in said or "problem" in said or code == 3, said
        assert "Traceback" not in said, said
        assert "internal" not in said.lower(), said
        assert seconds < SECONDS, (name, command, seconds)
        assert memory - base < MEMORY, (name, command, memory)


def usage(command: str, run: Path) -> tuple[int, float, int, str]:
    """Exit code, seconds of CPU, bytes of memory and all output of a command."""
    words = [sys.executable, "-m", "zckpt", command, *([] if command == "formats" else [str(run)])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    file = run.parent / "output"
    with open(file, "wb") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = file.read_text(errors="replace")
    return process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss << 10, text


HEAVY = [
    name
    if place % 4 == 0 or name == "sparse"  # which takes no time
    else pytest.param(name, marks=pytest.mark.exhaustive)
    for place, name in enumerate(hostile_metadata.heavy())
]


@pytest.mark.parametrize("name", HEAVY)
def test_much_work_is_refused(name: str, run: Path) -> None:
    hostile_metadata.heavy()[name](run)
    start = time.process_time()
    assert refused(run) is not None
    assert time.process_time() - start < 3 * SECONDS  # by three readers


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", hostile_metadata.heavy())
def test_the_limits_are_kept(name: str, run: Path) -> None:
    limited(name, hostile_metadata.heavy(few=False)[name], run)
