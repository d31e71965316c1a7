"""Real DeepSpeed with AutoEP: a small Mixtral whose experts DeepSpeed spreads over ranks.

python -m tests.engines.autoep CASE DIR      trains one case into DIR
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .deepspeed import submit
from .experts import BF16_OPTIMIZER


@dataclass(frozen=True)
class AutoEPCase:
    """One training run."""

    name: str
    dp: int
    ep: int
    stage: int = 2
    tp: int = 1  # of `dp` ranks, so many neighbors share a part of the dense layers
    dtype: str = "bf16"
    experts: int = 4
    family: str = "mixtral"  # or qwen3_moe
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 7
    steps: int = 3


CASES = {
    case.name: case
    for case in (
        AutoEPCase("autoep_dp2_ep2", 2, 2),
        AutoEPCase("autoep_dp4_ep2", 4, 2),
        AutoEPCase("autoep_dp4_ep2_z1_fp32", 4, 2, stage=1, dtype="fp32"),
        AutoEPCase("autoep_dp4_ep4_bf16_optimizer", 4, 4, stage=1, config=BF16_OPTIMIZER),
        AutoEPCase("autoep_dp2_ep1_qwen", 2, 1, family="qwen3_moe"),
        AutoEPCase("autoep_dp2_ep2_z3", 2, 2, stage=3),
        AutoEPCase("autoep_dp2_ep2_z0", 2, 2, stage=0),
        AutoEPCase("autoep_dp4_ep2_tp2", 4, 2, tp=2),
        AutoEPCase("autoep_dp4_ep4_tp2_z0", 4, 4, stage=0, tp=2),
        AutoEPCase("autoep_dp4_ep2_tp2_z3", 4, 2, stage=3, tp=2),
    )
}


def train(case: AutoEPCase, root: Path) -> Path:
    """Trains `case`, saves it in `root`/run, and what all ranks held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit("autoep_rank", "train", case.dp, (case, root.resolve()), root)
    return root / "run"


def resume(case: AutoEPCase, directory: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """What a new engine of `case` with `changes` holds after it loaded `directory`."""
    root.mkdir(parents=True, exist_ok=True)
    resumed, output = replace(case, **changes), root.resolve() / "resumed.pt"
    submit("autoep_rank", "resume", resumed.dp, (resumed, directory.resolve(), output), root)
    record: dict[str, Any] = torch.load(output, weights_only=False)
    return record


if __name__ == "__main__":
    from . import autoep  # a case of `__main__` could not be pickled

    autoep.train(autoep.CASES[sys.argv[1]], Path(sys.argv[2]))
