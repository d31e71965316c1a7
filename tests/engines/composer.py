"""Real Composer on this machine's processor: trains a small model under FSDP, or resumes it.

.venv-composer/site      mosaicml 0.32.1 and what it imports; torch is that of the tests
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .deepspeed import submit
from .sites import site

PACKAGES = (
    *("mosaicml==0.32.1", "torchmetrics==1.7.4", "coolname", "importlib-metadata<9", "zipp"),
    "pillow",
)
SAVED_AT, LAST = 3, 6  # updates


def run(version: int, ranks: int, root: Path, directory: Path | None = None) -> list[float]:
    """The losses of the updates up to LAST, of FSDP 1 or 2; from `directory`, if there is one.

    Composer saves after SAVED_AT updates, into `root`/run/ep0-ba3.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "losses.pt"
    os.environ["COMPOSER_SITE"] = str(site("composer", PACKAGES))
    submit("composer_rank", "fit", ranks, (ranks, version, root.resolve(), directory, output), root)
    losses: list[float] = torch.load(output)
    return losses
