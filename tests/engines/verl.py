"""Real FSDPCheckpointManager of verl, around a small model on this machine's processor.

.venv-verl/site      verl 0.7.0 and what its checkpoints import; torch is that of the tests
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .deepspeed import submit
from .sites import site

PACKAGES = ("verl==0.7.0", "omegaconf<2.4", "antlr4-python3-runtime==4.9.3")
SAVED_AT, LAST = 3, 6  # updates


def run(version: int, ranks: int, root: Path, directory: Path | None = None) -> list[float]:
    """The losses of the updates up to LAST, of FSDP 1 or 2; from `directory`, if there is one.

    verl saves after SAVED_AT updates, into `root`/actor.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "losses.pt"
    os.environ["VERL_SITE"] = str(site("verl", PACKAGES))
    submit("verl_rank", "train", ranks, (ranks, version, root.resolve(), directory, output), root)
    losses: list[float] = torch.load(output)
    return losses
