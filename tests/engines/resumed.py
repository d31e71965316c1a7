"""Programs that resume by themselves, on this machine: started, killed, started again."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .deepspeed import EngineError, submit

STEPS, KILLED_AT = 8, 5  # they save at 2 and at 4


@dataclass(frozen=True)
class Program:
    """A training program: `kind` is a key of resumed_rank.KINDS, `stage` of ZeRO, or 0."""

    name: str
    kind: str
    stage: int = 0
    lora: bool = False

    @property
    def module(self) -> str:
        is_zero = self.stage or self.kind in ("zero", "pipeline")
        return "resumed_rank" if is_zero else "resumed_fsdp_rank"


@dataclass(frozen=True)
class Trained:
    """What a start has logged: the path that it got, and the losses by step."""

    path: str | None
    report: dict[str, Any]
    losses: dict[int, float]


def start(program: Program, run: Path, ranks: int, kill: str = "") -> Trained:
    """Starts the program on so many ranks, and waits until it ends, or was killed in a `kill`."""
    log = run.parent / "losses"
    log.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (program, run, ranks, kill, log, port)
    try:
        submit(program.module, "train", ranks, arguments, run.parent)
        assert not kill
    except EngineError as error:
        if not kill or "died" not in str(error):
            printed = (run.parent / "engine.log").read_text()[-3000:]
            raise EngineError(f"{error}: {printed}") from error
    return logged(log)


def logged(log: Path) -> Trained:
    """What rank 0 of a start has noted in its file."""
    path, report, losses = None, {}, {}
    for line in map(json.loads, log.read_text().splitlines()):
        if "path" in line:
            path, report = line["path"], line["report"] or {}
        else:
            losses[line["step"]] = line["loss"]
    return Trained(path, report, losses)
