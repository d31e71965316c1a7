"""A run with several checkpoints, and what of it must stay as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zckpt.processes.launcher import LAUNCHERS

from ..conftest import EXAMPLE
from ..test_resume import files

Snapshot = dict[str, tuple[bytes, int]]
"""The bytes and the time of every file, by its name."""
TAGS = ("global_step5", "global_step6", "global_step7")
BESIDE = ".zckpt"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three tags of ZeRO-2 for 4 ranks; `latest` names the last one."""
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "out"))
    for tag in TAGS[:-1]:
        shutil.copytree(run / TAGS[-1], run / tag)
    return run


def snapshot(folder: Path) -> Snapshot:
    return {
        name: (data, os.stat(folder / name).st_mtime_ns) for name, data in files(folder).items()
    }


def original(run: Path) -> dict[str, bytes]:
    """The files of a run without those that zckpt keeps beside them."""
    return {name: data for name, data in files(run).items() if not name.startswith(BESIDE)}


def flip(path: Path, place: float = 0.5) -> None:
    """Flips a bit in a file; the place is a part of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": lambda tag: cut(tag / OPTIMIZER),
    "lost": lambda tag: (tag / OPTIMIZER).unlink(),
    "flipped": lambda tag: flip(tag / OPTIMIZER),
    "empty": lambda tag: shutil.rmtree(tag) or tag.mkdir(),  # type: ignore[func-returns-value]
}
