"""Real DeepSpeed with more than one model rank: pipelines, tensor parallelism, AutoTP.

python -m tests.engines.grids CASE DIR      trains one case into DIR
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .deepspeed import submit


@dataclass(frozen=True)
class GridCase:
    """One training run. `model` is `pipe`, `tensor` or `llama`; see grid_models.py."""

    name: str
    model: str
    pp: int = 1
    tp: int = 1
    dp: int = 1
    stage: int = 1
    dtype: str = "bf16"
    groups: int = 2
    ties: int = 1  # keys of tied layers of a pipeline
    method: str = "uniform"  # partition_method of a pipeline
    info: bool = True  # save universal_checkpoint_info, as Megatron-DeepSpeed does
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    seed: int = 7
    lists_frozen: bool = True  # the program gives its optimizer frozen parameters too
    fused: bool = False  # DeepSpeed's FusedAdam, which without ZeRO gets FP16_Optimizer
    more: int = 3  # steps after the save, or after loading, whose losses are recorded
    learns: bool = False  # targets that depend on the tokens, and not random ones

    @property
    def extension(self) -> str | None:
        return "FusedAdamBuilder" if self.fused else None


BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
SPREAD = {"checkpoint": {"parallel_write": {"pipeline_stage": True}}}  # over the data ranks
SCALE = {"fp16": {"initial_scale_power": 8}}
ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
SUB_GROUPS = {"zero_optimization": {"sub_group_size": 150}}

CASES = {
    case.name: case
    for case in (
        GridCase("pipe_pp2_dp2", "pipe", pp=2, dp=2, info=False),
        GridCase("pipe_pp2_dp2_fp32", "pipe", pp=2, dp=2, dtype="fp32", groups=3, info=False),
        GridCase("pipe_pp3_dp1_bf16", "pipe", pp=3, info=False, config=BF16_OPTIMIZER),
        GridCase("pipe_pp4_dp1", "pipe", pp=4, info=False),
        GridCase("pipe_pp1_dp2", "pipe", dp=2, info=False, config=SPREAD),
        GridCase("pipe_pp2_dp1_fp16", "pipe", pp=2, dtype="fp16", info=False, config=SCALE),
        GridCase("pipe_pp2_dp1_ties", "pipe", pp=2, ties=2, info=False),
        GridCase("pipe_pp2_dp1_plain", "pipe", pp=2, ties=0, method="parameters", info=False),
        GridCase("tensor_tp2_dp2", "tensor", tp=2, dp=2),
        GridCase("tensor_tp2_dp2_z2", "tensor", tp=2, dp=2, stage=2, dtype="fp32", config=ROBIN),
        GridCase("tensor_tp2_dp1_bf16", "tensor", tp=2, config=BF16_OPTIMIZER),
        GridCase("tensor_tp2_dp2_z3", "tensor", tp=2, dp=2, stage=3, config=SUB_GROUPS),
        GridCase("tensor_tp1_dp2", "tensor", dp=2, dtype="fp32", info=False),
        GridCase("pipe_pp2_dp1_z0_fp16", "pipe", pp=2, stage=0, dtype="fp16", config=SCALE),
        GridCase(
            "pipe_pp2_dp1_z0_plain", "pipe", pp=2, stage=0, dtype="fp16", ties=0, config=SCALE
        ),
        GridCase("pipe_pp2_dp1_z0_fused", "pipe", pp=2, stage=0, dtype="fp16", fused=True),
        GridCase(
            "pipe_pp2_tp2_z0_fused", "pipe", pp=2, tp=2, stage=0, dtype="fp16", ties=0, fused=True
        ),
        GridCase("pipe_pp2_dp1_z0_fp32", "pipe", pp=2, stage=0, dtype="fp32"),
        GridCase("pipe_pp2_tp2_z0_fp32", "pipe", pp=2, tp=2, stage=0, dtype="fp32"),
        GridCase("pipe_pp2_dp1_fused_z0_fp32", "pipe", pp=2, stage=0, dtype="fp32", fused=True),
        GridCase("pipe_pp2_dp2_z0_bf16", "pipe", pp=2, dp=2, stage=0),
        GridCase("pipe_pp2_tp2_z0_fp16", "pipe", pp=2, tp=2, stage=0, dtype="fp16", config=SCALE),
        GridCase("tensor_tp2_dp2_z0", "tensor", tp=2, dp=2, stage=0),
        GridCase("tensor_tp2_dp1_z0_fp32", "tensor", tp=2, stage=0, dtype="fp32"),
        GridCase("llama_tp2_dp1_z0", "llama", tp=2, stage=0, dtype="fp16", config=SCALE),
        GridCase("llama_tp2_dp2", "llama", tp=2, dp=2),
        GridCase("llama_tp2_dp1_z2", "llama", tp=2, stage=2),
        GridCase("llama_tp2_dp1_z3", "llama", tp=2, stage=3),
        GridCase("llama_tp4_dp1", "llama", tp=4),
        GridCase("pipe_pp2_tp2_dp1", "pipe", pp=2, tp=2),
        GridCase("pipe_pp2_tp2_dp2", "pipe", pp=2, tp=2, dp=2, groups=3),
        GridCase("pipe_pp2_tp2_dp1_fp32", "pipe", pp=2, tp=2, dtype="fp32"),
    )
}

NAMED = [  # others need --param-names
    name for name in CASES if not name.endswith("z0_fp32") and name not in
    ("pipe_pp2_dp1_z0_fp16", "pipe_pp2_tp2_z0_fp16", "pipe_pp2_dp1_z0_fused")
]  # fmt: skip


def train(case: GridCase, root: Path) -> Path:
    """Trains `case`, saves it in `root`/run, and what all ranks held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit(
        "grid_rank", "train", case.pp * case.tp * case.dp, (case, root.resolve()), root,
        case.extension,
    )  # fmt: skip
    return root / "run"


def resume(
    case: GridCase,
    directory: Path,
    root: Path,
    dp: int,
    pp: int | None = None,
    universal: Path | None = None,
) -> dict[str, Any]:
    """What all ranks of a new engine of `case`, at other sizes, hold after `load_checkpoint`.

    `universal` is the record of the source's engine if `directory` is for `load_universal`: frozen
    weights and buffers, which that loader leaves alone, are set from there.
    """
    root.mkdir(parents=True, exist_ok=True)
    config = case.config
    if universal is not None:
        config = {**config, "checkpoint": {"load_universal": True}}
    resumed = replace(case, dp=dp, pp=pp or case.pp, config=config)
    output = root.resolve() / "resumed.pt"
    arguments = (resumed, directory.resolve(), output, universal)
    ranks = resumed.pp * case.tp * dp
    submit("grid_rank", "resume", ranks, arguments, root, case.extension)
    held: dict[str, Any] = torch.load(output, weights_only=False)
    return held


if __name__ == "__main__":
    from . import grids  # a case of `__main__` could not be pickled

    grids.train(grids.CASES[sys.argv[1]], Path(sys.argv[2]))
