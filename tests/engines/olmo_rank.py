"""What one rank of OLMo-core does with a small model under FSDP2: it trains, saves and resumes."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from . import torch_rank
from .olmo import LAST, SAVED_AT


def prepare() -> None:
    torch_rank.prepare()
    sys.path.insert(0, os.environ["OLMO_SITE"])  # the tests may have others of its packages
    absent = MagicMock(__spec__=ModuleSpec("cached_path", None), __path__=[])
    absent.cached_path = lambda path, **_: Path(path).resolve(strict=True)  # of this machine
    sys.modules["cached_path"] = sys.modules["cached_path.schemes"] = absent
    from olmo_core.train import checkpoint  # noqa: F401


def sharded(ranks: int) -> nn.Module:
    model = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 20), nn.GELU(), nn.Linear(20, 33))
    return fully_shard(model, mesh=distributed.init_device_mesh("cpu", (ranks,)))


def train(rank: int, store: Path, ranks: int, run: Path, source: Path | None, output: Path) -> None:
    """Trains from the start, or from the last step in `source`, and writes the losses."""
    torch_rank.join(rank, ranks, store)
    from olmo_core.train.checkpoint import Checkpointer
    from olmo_core.train.train_module import BasicTrainModule

    torch.manual_seed(7 if source is None else 8)
    model = sharded(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    module = BasicTrainModule(model, optimizer, rank_microbatch_size=64)
    checkpointer = Checkpointer(work_dir=run.parent / "work")
    first = 0
    if source is not None:
        state = checkpointer.load(Checkpointer.latest_checkpoint(str(source)), module)
        assert state is not None
        first = state["global_step"]
    losses = []
    for step in range(first, LAST):
        if step in SAVED_AT and source is None:
            folder = run / Checkpointer.checkpoint_dirname(step)
            checkpointer.save(folder, module, {"global_step": step, "rank": rank})
        losses.append(update(rank, ranks, step, model, optimizer))
    if rank == 0:
        torch.save(losses, output)


def update(rank: int, ranks: int, step: int, model: Any, optimizer: Any) -> float:
    """One update; the mean of the ranks' losses."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(33, (6, 8), generator=random)
    own = tokens[rank * 6 // ranks : (rank + 1) * 6 // ranks]
    loss = nn.functional.cross_entropy(model(own).flatten(0, 1), own.roll(1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    distributed.all_reduce(whole)
    return whole.item() / ranks
