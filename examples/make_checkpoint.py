"""How examples/run was made: four ranks of real DeepSpeed, ZeRO-2, bf16, on a CPU.

    python examples/make_checkpoint.py DIRECTORY

Two parameter groups (with and without weight decay), a tied embedding, a frozen layer, a buffer.
Needs deepspeed and torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

DP, STEPS, ROWS = 4, 7, 24
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS // DP,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5}},
}


class Model(nn.Module):
    """Predicts the next of eight tokens; shapes are odd, so that ZeRO has to pad."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 19)
        self.register_buffer("running_mean", torch.zeros(19))
        self.frozen = nn.Linear(19, 19).requires_grad_(False)
        self.fc1 = nn.Linear(19, 29)
        self.fc2 = nn.Linear(29, 19)
        self.head = nn.Linear(19, 41, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        self.running_mean.lerp_(x.detach().mean((0, 1)).to(self.running_mean.dtype), 0.1)
        x = x + self.fc2(torch.tanh(self.fc1(self.frozen(x))))
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def train(rank: int, directory: str, meeting: str) -> None:
    """One rank: seven steps, then the checkpoint."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    # on a CPU DeepSpeed would compile an operator for shared memory that this does not need
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=DP)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=CONFIG)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 41, (ROWS, 9), generator=generator)
        engine.backward(engine(tokens[rank::DP]))
        engine.step()
    engine.save_checkpoint(directory)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (str(target), f"{folder}/store"), nprocs=DP)
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's, not part of the state
        (target / script).unlink(missing_ok=True)
