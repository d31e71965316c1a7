"""Fine-tunes as people run them: whole models and LoRA, in every way that Trainer runs on.

    weights   full, lora (PEFT on q and v of 12 layers, so that sorted names are not in order)
    engine    one, ddp, zero1, zero2, zero3, fsdp (FSDP2, sharded), fsdp_full (FSDP2, whole)
    program   trainer (transformers.Trainer), sft (TRL's SFTTrainer), accelerate (an own loop),
              pair (an own loop of two models, optimizers and schedulers), second (of the second)

All run unmodified on a processor in fp32, so that losses of different engines can be compared.
accelerate shards with GPUs only; it is told that it has them (see `finetune_rank.py`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .deepspeed import submit

ENGINES = ("one", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_full")
SAVED_AT, LOSSES = 3, 5


@dataclass(frozen=True)
class Run:
    """What is trained, by what, on how many ranks."""

    weights: str
    engine: str
    ranks: int = 2
    program: str = "trainer"
    seed: int = 7

    @property
    def name(self) -> str:
        return f"{self.program}-{self.weights}-{self.engine}-{self.ranks}"

    def on(self, engine: str | None = None, ranks: int | None = None) -> Run:
        """The same training on another engine, or another number of ranks."""
        made = replace(self, engine=engine or self.engine, ranks=ranks or self.ranks)
        return replace(made, ranks=1) if made.engine == "one" else made


def train(run: Run, root: Path, **changes: Any) -> Path:
    """Trains 3 steps, saves, goes on for 5; returns the saved directory.

    `root`/oracle.pt is what the program held when it saved: `tensors` by `name/weight`,
    `name/exp_avg` and the like, `steps`, `groups`, and the `losses` of the 5 steps after.
    `changes` are fields of TrainingArguments.
    """
    return Path(_submit(run, root, None, "oracle.pt", changes)["directory"])


def resume(run: Run, directory: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """What the program holds after resuming from `directory`, and its next 5 losses.

    Its random weights are others than in `train`. Raises EngineError with the program's message.
    """
    return _submit(run, root, directory.resolve(), "resumed.pt", changes)


def _submit(
    run: Run, root: Path, directory: Path | None, output: str, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = root.resolve() / output
    arguments = (run, port, root.resolve(), directory, path, changes or {})
    submit("finetune_rank", "work", run.ranks, arguments, root)
    result: dict[str, Any] = torch.load(path, weights_only=False)
    return result
