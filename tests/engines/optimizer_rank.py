"""What one rank does for the matrix of optimizers: train or resume a tiny model, give its losses.

The engines' own ways alone: fully_shard with dcp.save, torch.save of state dicts, DeepSpeed's
save_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from . import rank
from .many_optimizers import ROWS

ROWS_OF_BATCH, WIDTH = 24, 12
STEPS, LOSSES = 3, 3
prepare = rank.prepare


class Run(NamedTuple):
    model: Any  # as the engine wraps it
    optimizers: list[torch.optim.Optimizer]  # none where the engine steps them


def train(
    number: int, store: Path, ranks: int, optimizer: str, engine: str, path: Path, output: Path
) -> None:
    """Saves `path`, and trains on."""
    rank.join(number, ranks, store)
    run = ENGINES[engine].build(optimizer, 7)
    for step in range(STEPS):
        train_step(run, step)
    ENGINES[engine].save(run, path)
    go_on(run, output)


def resume(
    number: int, store: Path, ranks: int, optimizer: str, engine: str, path: Path, output: Path
) -> None:
    """Loads `path` into a new one with other weights."""
    rank.join(number, ranks, store)
    resumed = ENGINES[engine].build(optimizer, 1007)
    ENGINES[engine].load(resumed, path)
    go_on(resumed, output)


def go_on(run: Run, output: Path) -> None:
    losses = [train_step(run, STEPS + step) for step in range(LOSSES)]
    if torch.distributed.get_rank() == 0:
        torch.save(losses, output)


def build_model(optimizer: str, seed: int) -> nn.Module:
    """One of its weights is square."""
    torch.manual_seed(seed)
    width = ROWS[optimizer].width
    return nn.Sequential(
        nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, WIDTH)
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The matrices, and the vectors with a learning rate of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "lr": 0.01},
        {"params": [each for each in parameters if each.ndim < 2], "lr": 0.02},
    ]


def train_step(run: Run, step: int) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    number, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randn(2, ROWS_OF_BATCH, WIDTH, generator=generator)
    inputs, targets = batch[:, number::ranks]
    loss = (run.model(inputs) - targets).square().mean()
    if run.optimizers:
        loss.backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    else:
        run.model.backward(loss)
        run.model.step()
    mean = loss.detach().double()
    torch.distributed.all_reduce(mean)
    return float(mean) / ranks


# -- torch


def build_sharded(optimizer: str, seed: int) -> Run:
    model = build_model(optimizer, seed)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return Run(model, ROWS[optimizer].build(groups_of(model)))


def build_whole(optimizer: str, seed: int) -> Run:
    model = build_model(optimizer, seed)
    optimizers = ROWS[optimizer].build(groups_of(model))
    return Run(nn.parallel.DistributedDataParallel(model), optimizers)


def states(run: Run) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizers)
    return {"model": model, "optim": optim}


def save_sharded(run: Run, path: Path) -> None:
    dcp.save(states(run), checkpoint_id=path)


def load_sharded(run: Run, path: Path) -> None:
    state = states(run)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        run.model,
        run.optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )


def save_whole(run: Run, path: Path) -> None:
    """As programs do it: numbers of parameters. Of two optimizers torch joins the state dicts."""
    one = len(run.optimizers) == 1
    optim = run.optimizers[0].state_dict() if one else states(run)["optim"]
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
        torch.save({"model": run.model.module.state_dict(), "optim": optim}, path / "run.pt")


def load_whole(run: Run, path: Path) -> None:
    (file,) = path.glob("*.pt")
    state = torch.load(file, weights_only=False)
    run.model.module.load_state_dict(state["model"])
    if len(run.optimizers) == 1:
        run.optimizers[0].load_state_dict(state["optim"])
    else:
        set_state_dict(
            run.model,
            run.optimizers,
            model_state_dict={},
            optim_state_dict=state["optim"],
        )


# -- DeepSpeed


def build_zero(stage: int) -> Callable[[str, int], Run]:
    def build(optimizer: str, seed: int) -> Run:
        model = build_model(optimizer, seed)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS_OF_BATCH // torch.distributed.get_world_size(),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        }
        optimizers = ROWS[optimizer].build(groups_of(model))
        if len(optimizers) > 1:
            raise NotImplementedError("deepspeed.initialize takes one optimizer")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizers[0], config=config)
        return Run(engine, [])

    return build


def save_zero(run: Run, path: Path) -> None:
    run.model.save_checkpoint(str(path))


def load_zero(run: Run, path: Path) -> None:
    loaded, _ = run.model.load_checkpoint(str(path))
    assert loaded is not None


class Engine(NamedTuple):
    build: Callable[[str, int], Run]
    save: Callable[[Run, Path], None]
    load: Callable[[Run, Path], None]


ENGINES = {
    "FSDP2": Engine(build_sharded, save_sharded, load_sharded),
    "torch.save": Engine(build_whole, save_whole, load_whole),
    **{
        f"DeepSpeed {stage}": Engine(build_zero(stage), save_zero, load_zero)
        for stage in (0, 1, 2, 3)
    },
}
