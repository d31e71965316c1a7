"""Real Checkpointer of OLMo-core, around a small model on this machine's processor.

.venv-olmo/site      OLMo-core 3.0.0 and what its checkpoints import; torch is that of the tests
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .deepspeed import submit
from .sites import site

PACKAGES = (
    *("ai2-olmo-core==3.0.0", "omegaconf<2.4", "antlr4-python3-runtime==4.9.3"),
    *("dataclass-extensions==0.5.0", "bettermap==1.3.1", "dill"),
)
SAVED_AT, LAST = (2, 3), 6  # updates


def run(ranks: int, root: Path, directory: Path | None = None) -> list[float]:
    """The losses of the updates up to LAST; from `directory`, if there is one.

    OLMo-core saves after SAVED_AT updates, into `root`/run/stepN, and finds the last one there.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "losses.pt"
    os.environ["OLMO_SITE"] = str(site("olmo", PACKAGES))
    submit("olmo_rank", "train", ranks, (ranks, root.resolve() / "run", directory, output), root)
    losses: list[float] = torch.load(output)
    return losses
