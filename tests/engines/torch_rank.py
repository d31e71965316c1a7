"""What one rank of a PyTorch training does: build the engine, train, save or load, record."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from . import device, models, optimizers, torch_oracle
from .device import DEVICE, backend, on_cpu
from .torch_cases import Case
from .torch_layouts import LAYOUTS, Loading

prepare = device.prepare
UNITS = ("trunk", "readout")  # are sharded by themselves, all else by the root


@dataclass
class Run:
    """A training on this rank."""

    model: nn.Module  # as the engine wraps it
    module: models.Model  # the same without DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR | None
    facts: torch_oracle.Facts
    share: tuple[int, int] = (0, 1)  # this rank's part of the global batch: (part, parts)
    step: int = 0


def join(rank: int, ranks: int, store: Path) -> None:
    distributed.init_process_group(
        backend(ranks), init_method=store.as_uri(), rank=rank, world_size=ranks
    )


def train(rank: int, store: Path, case: Case, world: int, root: Path, losses: int) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, world, store)
    run = build(case, case.seed)
    for step in range(case.steps):
        train_step(run, case.late if step < case.steps - 1 else "")
    LAYOUTS[case.layout].save(run, root / "run", case.writer)
    finish(run, root / "oracle.pt", losses)


def resume(
    rank: int,
    store: Path,
    case: Case,
    world: int,
    checkpoint: Path,
    options: dict[str, Any],
    reader: tuple[str, dict[str, Any]] | None,
    output: Path,
    losses: int,
) -> None:
    """Loads into a freshly initialized run, writes what it then holds.

    `reader` is the dotted name of a storage reader, and its options.
    """
    join(rank, world, store)
    run = build(case, case.seed + 1000)
    if reader is not None:
        module, _, name = reader[0].rpartition(".")
        factory = getattr(importlib.import_module(module), name)
        options["reader"] = lambda path: factory(path, **reader[1])
    LAYOUTS[case.layout].load(run, Loading(checkpoint, **options))
    if run.step == 0:
        go_forward(run, case.steps)
    finish(run, output, losses)


def go_forward(run: Run, step: int) -> None:
    """Where the checkpoint holds neither the place in the data nor the scheduler."""
    run.step = step
    if run.scheduler is not None:
        state = {
            "last_epoch": step,
            "_step_count": step + 1,
            "_last_lr": [group["lr"] for group in run.optimizer.param_groups],
        }
        run.scheduler.load_state_dict({**run.scheduler.state_dict(), **state})


def finish(run: Run, output: Path, losses: int) -> None:
    """Writes what the run holds now, with the losses of the steps that follow."""
    state = torch_oracle.record(run)
    following = [train_step(run) for _ in range(losses)]
    if distributed.get_rank() == 0:
        torch.save(on_cpu({**state, "losses": following}), output)


def build(case: Case, seed: int) -> Run:
    model = models.build(case.model, seed).to(DEVICE)
    if case.dtype == "bf16":
        model.bfloat16()
    facts = torch_oracle.Facts.of(model)
    groups = [
        ([name for name in names if case.frozen_in_groups or name in facts.trainable], options)
        for names, options in models.named_groups(model, case.groups)
    ]
    mesh = build_mesh(case)
    wrapped, named = ENGINES[case.engine](model, case, mesh)
    if case.engine == "fsdp1_flat":
        options = [options for _, options in groups]
        groups = list(zip(unit_names(named), options, strict=True))
    parameters = [
        {"params": [named[name] for name in names], **options} for names, options in groups
    ]
    optimizer = (
        ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, betas=(0.8, 0.95))
        if case.engine == "zro"
        else optimizers.FACTORIES[case.optimizer](parameters)
    )
    scheduler = decaying(optimizer) if case.scheduler else None
    share = (distributed.get_rank(), distributed.get_world_size())
    if case.parallel:
        share = (mesh["dp"].get_local_rank(), mesh["dp"].size())
    return Run(wrapped, model, optimizer, scheduler, facts, share)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def build_mesh(case: Case) -> DeviceMesh:
    world = distributed.get_world_size()
    if case.mesh is None:
        return init_device_mesh(DEVICE, (world,), mesh_dim_names=("shard",))
    names = ("dp", "tp") if case.parallel else ("replicate", "shard")
    return init_device_mesh(DEVICE, case.mesh, mesh_dim_names=names)


Wrapped = tuple[nn.Module, dict[str, Tensor]]  # with its parameters by their names in the model


def scalars(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.ndim == 0}


def fsdp2(model: models.Model, case: Case, mesh: DeviceMesh) -> Wrapped:
    if case.parallel:
        split_over_tensors(model, mesh["tp"])
        mesh = mesh["dp"]
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": scalars(model)}
    if case.inner:
        inner = model.mixer[2].weight
        options["shard_placement_fn"] = lambda each: Shard(1) if each is inner else None
    for unit in UNITS:
        fully_shard(model.get_submodule(unit), **options)
    fully_shard(model, **options)
    return model, dict(model.named_parameters())


def split_over_tensors(model: models.Model, mesh: DeviceMesh) -> None:
    """Weights that FSDP cuts once more: in the other dimension, and in the same one."""
    plan = {
        "trunk.0": ColwiseParallel(use_local_output=False),  # its parts are not equal
        "trunk.2": RowwiseParallel(),
        "readout": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def fsdp1(model: models.Model, case: Case, mesh: DeviceMesh) -> Wrapped:
    flat = case.engine == "fsdp1_flat"
    options: dict[str, Any] = {
        "use_orig_params": not flat,
        "device_id": torch.device(DEVICE),
        "ignored_states": scalars(model),
    }
    if case.mesh is not None:
        options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    # With use_orig_params=False what is frozen must be apart.
    for unit in (*UNITS, *(["bottleneck"] if flat else [])):
        setattr(model, unit, FullyShardedDataParallel(model.get_submodule(unit), **options))
    wrapped = FullyShardedDataParallel(model, **options)
    return wrapped, {torch_oracle.clean(name): each for name, each in wrapped.named_parameters()}


def unit_names(named: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Two groups of flat parameters: the root's, those of its units."""
    trainable = [name for name, each in named.items() if each.requires_grad]
    return (
        [name for name in trainable if "." not in name],
        [name for name in trainable if "." in name],
    )


def plain(model: models.Model, case: Case, mesh: DeviceMesh) -> Wrapped:
    if models.VARIANTS[case.model].strided:
        models.transpose_trunk(model)
    return DistributedDataParallel(model, find_unused_parameters=True), dict(
        model.named_parameters()
    )


ENGINES: dict[str, Callable[[models.Model, Case, DeviceMesh], Wrapped]] = {
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "fsdp1_flat": fsdp1,
    "plain": plain,
    "zro": plain,
}


def train_step(run: Run, frozen: str = "") -> float:
    """Trains on the batch of this step; the mean loss of the global batch.

    The parameters of the submodule `frozen` are not updated.
    """
    loss = models.loss(run.model, run.step, *run.share)
    loss.backward()
    if not isinstance(run.model, DistributedDataParallel):
        average_ignored(run.model)
    for parameter in run.module.get_submodule(frozen).parameters() if frozen else ():
        parameter.grad = None
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.scheduler is not None:
        run.scheduler.step()
    run.step += 1
    return average(loss.detach().double()).item()


def average_ignored(model: nn.Module) -> None:
    """FSDP does not reduce the gradients of what it was told to ignore."""
    for parameter in scalars(model):
        average(parameter.grad)


def average(tensor: Tensor) -> Tensor:
    distributed.all_reduce(tensor)
    tensor /= distributed.get_world_size()
    return tensor
