"""How torch itself reads these directories, and one that it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ...conftest import ROOT
from ..equality import same_bits

DATA = ROOT / "tests" / "data" / "fsdp2-2.13.0-w2"  # FSDP2, two ranks, two groups, a scheduler


def whole(directory: Path) -> dict[str, Any]:
    """What torch itself reads."""
    file = directory.parent / "whole.pt"
    dcp_to_torch_save(directory, file)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state


def alike(a: Any, b: Any) -> bool:
    """Equal values, tensors bit for bit; the order of keys does not count."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def saved(run: Path, state: dict[str, Any], group: dict[str, Any], *, flat: bool = False) -> None:
    """A checkpoint of two weights, a and b, in a group each."""
    model = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    moments = {n: {"exp_avg": w + 1, "exp_avg_sq": w * w, **state} for n, w in model.items()}
    optim: dict[str, Any] = {"state": moments, "param_groups": []}
    optim["param_groups"] = [{**group, "lr": n * 0.1, "params": ["ab"[n]]} for n in range(2)]
    if flat:
        optim = {f"state.{n}.{k}": v for n, moment in moments.items() for k, v in moment.items()}
        optim |= {f"param_groups.{n}.{k}": v for n in "ab" for k, v in group.items()}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=run)
