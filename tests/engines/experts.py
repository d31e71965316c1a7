"""Trainings of models with experts, and directories that the engine resumes: real DeepSpeed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cases import EXTENSIONS
from .deepspeed import submit


@dataclass(frozen=True)
class ExpertCase:
    """One training of the model in `expert_rank`, whose layers have `ep` of their own."""

    name: str
    dp: int
    ep: tuple[int, int]  # of both layers
    stage: int = 2
    dtype: str = "bf16"
    experts: tuple[int, int] = (4, 4)
    groups: str = "config"  # how parameter groups are made, see expert_rank.build_optimizer
    optimizer: str = "adamw"  # of own groups, see optimizers.py
    max_group_size: int | None = None  # None is DeepSpeed's default
    frozen_experts: bool = False
    mixed_order: bool = False  # odd ranks have their groups of experts in another order
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 7
    steps: int = 3

    @property
    def extension(self) -> str | None:
        """The engine's extension that needs a C++ compiler, or None."""
        return EXTENSIONS.get(self.optimizer)


BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
ALIGNED = {"zero_optimization": {"parameter_alignment": True}}
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
DATA_FIRST = {"use_data_before_expert_parallelism": True}
FUSED = "deepspeed fused adam"  # the only optimizer that gets FP16_Optimizer here
SCALE = {"fp16": {"initial_scale_power": 8}}

CASES = {
    case.name: case
    for case in (
        ExpertCase("dp4_ep2", 4, (2, 2)),
        ExpertCase("dp4_ep1", 4, (1, 1)),
        ExpertCase("dp4_ep4", 4, (4, 4)),
        ExpertCase("dp2_ep2", 2, (2, 2)),
        ExpertCase("dp2_ep1", 2, (1, 1)),
        ExpertCase("dp4_ep2_z1", 4, (2, 2), stage=1),
        ExpertCase("dp4_ep2_fp32", 4, (2, 2), dtype="fp32", stage=1),
        ExpertCase("dp4_ep2_bf16_optimizer", 4, (2, 2), stage=1, config=BF16_OPTIMIZER),
        ExpertCase("dp4_ep2_data_first", 4, (2, 2), config=DATA_FIRST),
        ExpertCase("dp4_ep2_own_groups", 4, (2, 2), groups="own"),
        ExpertCase("dp4_ep2_cut_groups", 4, (2, 2), groups="own", max_group_size=150),
        ExpertCase("dp4_ep2_round_robin", 4, (2, 2), groups="own", config=ROUND_ROBIN),
        ExpertCase("dp4_ep4_ep2", 4, (4, 2), groups="own", experts=(4, 6)),
        ExpertCase("dp4_ep4_ep2_mixed", 4, (4, 2), groups="own", experts=(4, 6), mixed_order=True),
        ExpertCase("dp4_ep2_frozen_experts", 4, (2, 2), frozen_experts=True),
        ExpertCase("dp4_ep2_aligned", 4, (2, 2), config=ALIGNED),
    )
}
WITHOUT_ZERO = {
    case.name: case
    for case in (
        ExpertCase("dp4_ep2_z0", 4, (2, 2), stage=0),
        ExpertCase("dp4_ep2_z0_fp32", 4, (2, 2), stage=0, dtype="fp32"),
        ExpertCase(
            "dp4_ep4_ep2_z0", 4, (4, 2), stage=0, groups="own", experts=(4, 6), frozen_experts=True
        ),
        ExpertCase("dp2_ep2_z0_fp16", 2, (2, 2), stage=0, dtype="fp16", groups="own", config=SCALE),
        ExpertCase("dp2_ep2_z0_fused", 2, (2, 2), stage=0, groups="own", optimizer=FUSED),
        ExpertCase("dp2_ep1_z0_fused", 2, (1, 1), stage=0, groups="own", optimizer=FUSED),
    )
}


def train(case: ExpertCase, root: Path, *, losses: int = 3) -> Path:
    """Trains `case`, saves it in `root`/run and what the ranks held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    arguments = (case, root.resolve(), losses)
    submit("expert_rank", "train", case.dp, arguments, root, case.extension)
    return root / "run"


def resume(
    case: ExpertCase, directory: Path, root: Path, *, losses: int = 3, **changes: Any
) -> dict[str, Any]:
    """What the ranks of a new engine hold after it loaded `directory`, and its next losses.

    The engine is that of `case` with `changes` and another seed.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "resumed.pt"
    resumed = dataclasses.replace(case, **changes)
    arguments = (resumed, directory.resolve(), output, losses)
    submit("expert_rank", "resume", resumed.dp, arguments, root, resumed.extension)
    recorded: dict[str, Any] = torch.load(output, weights_only=False)
    return recorded
