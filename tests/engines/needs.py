"""Real programs that resume from a checkpoint of which a file is missing, cut, empty or zeros."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zckpt.core.storage.fragments import Extent
from zckpt.files.zipdirectory import read_directory

from ..resume.conftest import cut
from .deepspeed import EngineError, RankDied, submit

SAVED_AT, STEPS = 4, 7  # the step before which they save, and after how many they stop
Steps = dict[int, tuple[float, float]]
"""The loss of each step, and the learning rate of its update."""


@dataclass(frozen=True)
class Program:
    """A training program: `kind` is a key of needs_rank.KINDS, `stage` of ZeRO or None.

    What `has` means stands with its kind.
    """

    name: str
    kind: str
    ranks: int = 1
    stage: int | None = None
    has: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return "needs_rank" if self.stage is None else "needs_zero_rank"


@dataclass(frozen=True)
class Trained:
    """A start: its steps, the files of the checkpoint that it opened, or the error that ended it.

    What safetensors reads is not among the opened files: it opens them in Rust.
    """

    steps: Steps
    opened: frozenset[str]
    error: str = ""


def start(program: Program, root: Path, checkpoint: Path | None = None) -> Trained:
    """Trains and saves once into `root`/run, or resumes from a checkpoint and saves nothing."""
    log = root / "steps"
    log.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = ""
    try:
        submit(program.module, "train", program.ranks, (program, root, checkpoint, port), root)
    except RankDied:  # not by the checkpoint
        raise
    except EngineError as ended:
        error = str(ended)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = {line["step"]: (line["loss"], line["rate"]) for line in lines if "step" in line}
    opened = frozenset(name for line in lines for name in line.get("opened", ()))
    return Trained(steps, opened, error)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_zeros(path: Path) -> None:
    """As a power loss leaves a file whose size is known, and of which no byte was written."""
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def lose_elements(path: Path) -> None:
    """Fills the elements of the largest tensor with zeros, or of all in safetensors."""
    data = bytearray(path.read_bytes())
    if path.suffix == ".safetensors":
        start, length = 8 + int.from_bytes(data[:8], "little"), len(data)
    else:
        with path.open("rb") as file:
            members = read_directory(file.fileno(), Extent(str(path), 0, len(data)))
        storages = [member for name, member in members.items() if "data/" in name]
        largest = max(storages, key=lambda member: member.length)
        start, length = largest.offset, largest.length
    length = min(length, len(data) - start)
    data[start : start + length] = bytes(length)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": remove,
    "cut": cut,
    "empty": empty,
    "zeros": fill_with_zeros,
}
