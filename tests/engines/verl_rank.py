"""What one rank of verl's trainer does with a small Llama: it trains, saves and resumes it."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from . import torch_rank
from .verl import LAST, SAVED_AT

ABSENT = (
    *("ray", "codetiming", "PIL", "tensordict", "tensordict.tensorclass"),
    *("verl.protocol", "verl.utils.model"),  # they import packages that checkpoints do not need
)


def prepare() -> None:
    torch_rank.prepare()
    sys.path.insert(0, os.environ["VERL_SITE"])  # the tests may have others of its packages
    for name in ABSENT:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    from verl.utils.checkpoint import fsdp_checkpoint_manager  # noqa: F401


def sharded(version: int, ranks: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=33,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    if version == 1:
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id="cpu")
    mesh = distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    rank: int, store: Path, ranks: int, version: int, root: Path, source: Path | None, output: Path
) -> None:
    """Trains from the start, or from `source`, and writes the losses of all ranks' batches."""
    torch_rank.join(rank, ranks, store)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.manual_seed(7 if source is None else 8)
    model = sharded(version, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    if source is not None:
        manager.load_checkpoint(str(source))
    losses = []
    for step in range(0 if source is None else SAVED_AT, LAST):
        if step == SAVED_AT and source is None:
            manager.save_checkpoint(str(root / "actor"), global_step=step)
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(33, (6, 8), generator=random)
        own = tokens[rank * 6 // ranks : (rank + 1) * 6 // ranks]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        distributed.all_reduce(whole)
        losses.append(whole.item() / ranks)
    if rank == 0:
        torch.save(losses, output)
