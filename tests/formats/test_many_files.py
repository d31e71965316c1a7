"""Many other files lie beside checkpoints: samples, logs. They are listed, and hardly looked at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zckpt import api
from zckpt.core.storage import sources
from zckpt.formats.deepspeed_states import target
from zckpt.resume import listing

from ..conftest import EXAMPLE, ROOT

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
MANY = 300
Count = Callable[[object, str], list[int]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "out"
    shutil.copytree(TRAINER, run / "checkpoint-4")
    return run


def fill(folder: Path) -> None:
    for number in range(MANY):
        (folder / f"sample_{number:05d}.json").touch()
        (folder / f"train-{number}.log").touch()


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """How often a function is called from now on."""

    def counted(module: object, name: str) -> list[int]:
        calls = [0]
        function = getattr(module, name)

        def call(*words: Any, **more: Any) -> Any:
            calls[0] += 1
            return function(*words, **more)

        monkeypatch.setattr(module, name, call)
        return calls

    return counted


@pytest.mark.parametrize("look", ["find", "list"])
def test_files_of_a_run_are_neither_opened_nor_asked(look: str, run: Path, count: Count) -> None:
    def calls() -> list[int]:
        counts = [count(os, name) for name in ("stat", "open", "lstat")]
        if look == "find":
            api.read(run)
        else:
            listing.list_checkpoints(str(run))
        return [each[0] for each in counts]

    if look == "find":  # a run of DeepSpeed itself, of which one tag is read
        shutil.rmtree(run)
        shutil.copytree(EXAMPLE, run)
    before = calls()
    fill(run)
    after = calls()
    for now, then in zip(after, before, strict=True):
        assert now - then <= 2 * MANY, (before, after)  # of 2 * MANY files


def test_a_conversion_asks_once_whose_the_files_beside_it_are(
    run: Path, tmp_path: Path, count: Count
) -> None:
    fill(run / "checkpoint-4")
    calls = count(target, "program_of")
    api.reshard(run / "checkpoint-4", tmp_path / "dst", dp=4, dry_run=True)
    assert 0 < calls[0] < 20


def test_no_file_beside_a_checkpoint_is_opened_to_see_its_kind(run: Path, count: Count) -> None:
    api.read(run / "checkpoint-4")
    opened = count(sources, "opened")
    fill(run / "checkpoint-4")
    api.read(run / "checkpoint-4")
    assert opened[0] < MANY / 2
