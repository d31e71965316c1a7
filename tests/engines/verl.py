"""Real FSDPCheckpointManager of verl, around a small model on this machine's processor.

.venv-verl/site      verl 0.7.0 and what its checkpoints import; torch is that of the tests
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import torch

from ..conftest import ROOT
from .deepspeed import submit

PACKAGES = ("verl==0.7.0", "omegaconf<2.4", "antlr4-python3-runtime==4.9.3")
SAVED_AT, LAST = 3, 6  # updates


@functools.cache
def site() -> Path:
    """The folder with verl, which is installed there if it is missing; without its dependencies."""
    folder = ROOT / ".venv-verl" / "site"
    if not (folder / "verl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), *PACKAGES], check=True)
    return folder


def run(version: int, ranks: int, root: Path, directory: Path | None = None) -> list[float]:
    """The losses of the updates up to LAST, of FSDP 1 or 2; from `directory`, if there is one.

    verl saves after SAVED_AT updates, into `root`/actor.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "losses.pt"
    os.environ["VERL_SITE"] = str(site())
    submit("verl_rank", "train", ranks, (ranks, version, root.resolve(), directory, output), root)
    losses: list[float] = torch.load(output)
    return losses
