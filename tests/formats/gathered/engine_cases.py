"""Which runs of real engines are read here, and what each of them held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ...engines.torch_cases import CASES

Trained = Callable[..., Path]


def oracle_of(trained: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(trained / "oracle.pt", weights_only=False)
    return oracle


def names_of(oracle: Mapping[str, Any]) -> list[str]:
    """The optimizer's parameters, group by group."""
    return [name for group in oracle["groups"] for name in group["params"]]


def source_of(trained: Path) -> Path:
    single = trained / "run" / "checkpoint.pt"
    return single if single.exists() else trained / "run"


WHOLE = ["zro", "zro_three_groups", "ddp", "ddp_files", "ddp_bf16", "ddp_strided", "ddp_unused"]
FULL = ["fsdp2_full", "fsdp1_full", "fsdp1_flat_full"]
RANKS = ["zro_ranks", "zro_ranks_three_groups", "fsdp2_local", "fsdp2_inner_local"]
SHARDED = ["fsdp1_sharded_pt", "fsdp1_flat_sharded_pt"]
FIRST = {("zro", 2), ("zro_ranks", 2), ("fsdp2_local", 2), ("fsdp1_sharded_pt", 2)}


def engines(*cases: str) -> list[Any]:
    """All cases at all their world sizes, some of them in the default run."""
    return [
        pytest.param(
            case,
            world,
            marks=[pytest.mark.engines, *([pytest.mark.first] if (case, world) in FIRST else [])],
        )
        for case in cases
        for world in CASES[case].worlds
    ]
