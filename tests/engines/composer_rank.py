"""What one rank of Composer does: it fits a small model under FSDP, saves it, resumes it."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from . import torch_rank
from .composer import LAST, SAVED_AT

SAMPLES, BATCH = 48, 12
ABSENT = (
    "mcli",  # the client of a service
    # no build of it fits torch without CUDA, and only models of images use it
    *(f"torchvision{name}" for name in ("", ".transforms", ".transforms.functional", ".datasets")),
    *(f"torchvision.{name}" for name in ("models", "models.resnet", "ops", "utils")),
)


def prepare() -> None:
    """Imports Composer, without packages that a small model does not need."""
    torch_rank.prepare()
    sys.path.append(os.environ["COMPOSER_SITE"])
    for name in ABSENT:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})
    torch.cuda.current_device = lambda: "cpu"  # where FSDP 1 is told to put the model
    import composer  # noqa: F401


class Samples(Dataset[tuple[torch.Tensor, ...]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(place)
        return torch.randn(8, generator=random), torch.randn(4, generator=random)


def fit(
    rank: int, store: Path, ranks: int, version: int, root: Path, source: Path | None, output: Path
) -> None:
    """Trains from the start, or from `source`, and writes the losses of all ranks' batches."""
    os.environ |= {"FSDP_VERSION": str(version), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    torch_rank.join(rank, ranks, store)
    from composer import Callback, ComposerModel, Trainer
    from composer.optim import LinearWithWarmupScheduler
    from composer.utils import dist

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            self.net[0]._fsdp_wrap = self.net[2]._fsdp_wrap = True

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])  # type: ignore[no-any-return]

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(outputs, batch[1])

    losses: list[float] = []

    class Losses(Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, logger: Any) -> None:
            loss = state.loss.detach().clone()
            distributed.all_reduce(loss)
            losses.append(loss.item() / ranks)

    torch.manual_seed(7 if source is None else 8)
    model, samples = Model(), Samples()
    sharded = {"state_dict_type": "sharded", "sharding_strategy": "FULL_SHARD"}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        schedulers=LinearWithWarmupScheduler("2ba"),
        train_dataloader=DataLoader(
            samples, BATCH // ranks, sampler=dist.get_sampler(samples, shuffle=False)
        ),
        max_duration=f"{LAST}ba",
        device="cpu",
        precision="fp32",
        callbacks=[Losses()],
        parallelism_config={"fsdp": {**sharded, "mixed_precision": "PURE"}},
        save_folder=None if source else str(root / "run"),
        save_interval=f"{SAVED_AT}ba",
        load_path=None if source is None else str(source),
        progress_bar=False,
    )
    trainer.fit()
    if rank == 0:
        torch.save(losses, output)
