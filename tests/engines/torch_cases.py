"""Which trainings with PyTorch's own means are worth checking: one row per form of a checkpoint.

FSDP takes no 0-dim parameter (torch 2.13, both kinds: "doesn't support scalar parameters"); it is
left out of the sharding (`ignored_params`, `ignored_states`) and is a plain tensor on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training run, at each of `worlds`."""

    name: str
    engine: str = "fsdp2"  # a key of torch_rank.ENGINES
    layout: str = "nested"  # what is saved: a key of torch_layouts.LAYOUTS
    worlds: tuple[int, ...] = (1, 2, 4)
    model: str = "scalar"  # a key of models.VARIANTS
    groups: int = 2  # 1 to 4, see models.named_groups; with fsdp1_flat always 2
    frozen_in_groups: bool = False  # hand frozen parameters to the optimizer as well
    optimizer: str = "adamw"  # a key of optimizers.FACTORIES
    scheduler: bool = False  # a LambdaLR, which adds `initial_lr` to the groups
    dtype: str = "fp32"  # of the module: "fp32" or "bf16"; there are no other masters
    mesh: tuple[int, ...] | None = None  # 2 x 2: (replicate, shard), or (dp, tp) with `parallel`
    parallel: bool = False  # tensor parallel in the second dimension of the mesh
    inner: bool = False  # some weights are Shard(1)
    writer: Mapping[str, Any] = field(default_factory=dict)  # arguments of FileSystemWriter
    seed: int = 7
    steps: int = 3  # trained before saving
    reload: str = "exact"  # what torch makes of its own files: "exact", "same world", "refused"


FORMS = [
    Case("fsdp2_dcp"),
    Case("fsdp2_flat", layout="flat"),
    Case("fsdp2_raw", layout="raw"),
    Case("fsdp1_dcp", "fsdp1"),
    Case("fsdp1_flat", "fsdp1_flat"),
    Case("fsdp2_full", layout="full"),
    Case("fsdp1_full", "fsdp1", layout="full"),
    Case("ddp", "plain", layout="one file"),
]

CASES: dict[str, Case] = {case.name: case for case in FORMS}
