"""A checkpoint of large modules by real DeepSpeed, ZeRO-3 on four ranks: `python -m` with a folder.

`checkpoints` runs that in a process of its own, and makes universal ones of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DP = 4


def checkpoints(root: Path, layers: int, width: int) -> dict[str, Path]:
    """`layers` square Linears of `width`: as ZeRO-3's files, universal, and as fp32 weights."""
    import zckpt

    from . import deepspeed

    subprocess.run(
        [sys.executable, "-m", f"{__package__}.wide", str(root), str(layers), str(width)],
        check=True,
        env={**os.environ, **deepspeed.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    zckpt.convert(root / "zero3", root / "universal")
    zckpt.convert(root / "zero3", root / "weights", weights_only=True, dtype="fp32")
    return {name: root / name for name in ("zero3", "universal", "weights")}


def train(rank: int, store: Path, root: Path, layers: int, width: int) -> None:
    """One step of SGD, which keeps no moments: the files hold the weights alone."""
    import deepspeed
    import torch
    from torch import nn

    from . import rank as engine_rank

    engine_rank.join(rank, DP, store)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3},
        },
    )
    engine.backward(engine(torch.ones(1, width)).square().mean())
    engine.step()
    engine.save_checkpoint(str(root / "zero3"))


def main() -> None:
    from . import rank, zygote

    root, layers, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank.prepare()
    arguments = (root / "store", root, layers, width)
    if failure := zygote.run(train, DP, arguments, root / "engine.log", 180.0):
        raise SystemExit(failure)


if __name__ == "__main__":
    main()
