"""Trainings that differ from all others here in models, names and sizes, as a stranger's would.

python -m tests.engines.strangers CASE DIR      trains one case into DIR
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .deepspeed import submit

Sizes = tuple[int, int, int]
"""pp, dp, tp"""


@dataclass(frozen=True)
class Stranger:
    """One training run; `model` is a key of strangers_rank.MODELS."""

    name: str
    model: str
    sizes: Sizes
    stage: int = 1
    dtype: str = "bf16"
    groups: str = "decayed"  # or `one`
    info: bool = False  # save universal_checkpoint_info
    method: str = "uniform"  # partition_method of a pipeline
    ep: int = 1
    seed: int = 7
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        pp, dp, tp = self.sizes
        return pp * dp * tp


ACCUMULATED = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
SMALL_GROUPS = {
    "zero_optimization": {"sub_group_size": 100, "stage3_param_persistence_threshold": 0}
}

CASES = {
    case.name: case
    for case in (
        Stranger("decoder_tp2", "decoder", (1, 2, 2), info=True, config=ACCUMULATED),
        Stranger("decoder_tp3", "decoder", (1, 1, 3), 2, "fp32", info=True),
        Stranger("decoder_z3", "decoder", (1, 2, 2), 3, groups="one", config=SMALL_GROUPS),
        Stranger("ties_pp3", "ties", (3, 2, 1)),
        Stranger("far_pp4", "far", (4, 1, 1), method="type:middle"),
        Stranger("plain_z0", "plain", (2, 2, 1), 0, "fp32", groups="one"),
        Stranger("blocks_pp2_tp2", "blocks", (2, 2, 2), info=True),
        Stranger("qwen_tp2", "qwen", (1, 1, 2), groups="one"),
        Stranger("expert_names", "experts", (1, 2, 1), dtype="fp32", groups="config", ep=2),
    )
}


def train(case: Stranger, root: Path) -> Path:
    """Trains `case`, saves it in `root`/run, and what all ranks held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit("strangers_rank", "train", case.world, (case, root.resolve()), root)
    return root / "run"


def resume(case: Stranger, directory: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """What a new engine of `case` with `changes` holds after it loaded `directory`."""
    root.mkdir(parents=True, exist_ok=True)
    resumed, output = replace(case, **changes), root.resolve() / "resumed.pt"
    arguments = (resumed, directory.resolve(), output)
    submit("strangers_rank", "resume", resumed.world, arguments, root)
    held: dict[str, Any] = torch.load(output, weights_only=False)
    return held


if __name__ == "__main__":
    from . import strangers  # a case of `__main__` could not be pickled

    strangers.train(strangers.CASES[sys.argv[1]], Path(sys.argv[2]))
