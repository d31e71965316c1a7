"""A program of FSDP2 that loads what ranks of other axes saved, with zckpt's reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .torch_rank import prepare  # noqa: F401

Names = Sequence[tuple[str, tuple[int, ...], int | None]]
"""Name, whole shape, and number of the optimizer's group; None if it is frozen."""


def whole_model(names: Names) -> nn.Module:
    """A module that has these parameters, whatever layers they were of."""
    root = nn.Module()
    for name, shape, group in names:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.full(shape, 0.5), group is not None))
    return root


def load(rank: int, store: Path, run: Path, rules: str | None, names: Names, output: Path) -> None:
    """Writes what the ranks hold after loading: weights, and states of the optimizer by name."""
    from zckpt.dcp import StorageReader

    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    model = whole_model(names)
    fully_shard(model)
    groups = sorted({group for _, _, group in names if group is not None})
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.get_parameter(name) for name, _, own in names if own == group]}
            for group in groups
        ],
        lr=0.5,
    )
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    checkpoint.load(state, storage_reader=StorageReader(run, tp_rules=rules))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    held = {}
    for name, each in model.named_parameters():
        assert isinstance(each, DTensor)
        held[f"{name}/{'master' if each.requires_grad else 'param'}"] = each.full_tensor().detach()
        for slot, value in optimizer.state.get(each, {}).items():
            held[f"{name}/{slot}"] = value.full_tensor() if isinstance(value, DTensor) else value
    rates = [group["lr"] for group in optimizer.param_groups]
    if rank == 0:
        torch.save({"tensors": held, "rates": rates}, output)
