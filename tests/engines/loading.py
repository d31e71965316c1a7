"""Programs of torch alone that load a checkpoint with zckpt.dcp.StorageReader: FSDP2, FSDP1, none.

Each job is a process of its own, which imports torch once and forks the ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from . import models, optimizers, zygote

TIMEOUT = 120.0  # seconds for one job
UNITS = ("trunk", "readout")


@dataclass(frozen=True)
class Job:
    """What the program is like.

    `engine`: fsdp2, fsdp1, plain. `form`: nested, flat (flatten_optimizer_state_dict), app (a
    Stateful), model (alone, under `roots[0]`), bare (a model's keys at the top), boxes (the same,
    cut along the last axes), raw (optimizer.state_dict() with its numbers).
    """

    engine: str = "fsdp2"
    world: int = 2
    form: str = "nested"
    roots: tuple[str, str] = ("model", "optim")
    model: str = "full"
    optimizer: str = "adamw"
    groups: int = 2
    bf16: bool = False
    compiled: bool = False
    losses: int = 0
    reader: Mapping[str, Any] = field(default_factory=dict)  # arguments of StorageReader
    planner: Mapping[str, Any] | None = None  # of DefaultLoadPlanner


@dataclass(frozen=True)
class Program:
    model: nn.Module
    optimizer: torch.optim.Optimizer


def load(job: Job, checkpoint: Path, root: Path) -> dict[str, Any]:
    """What a program holds after loading, and what its ranks read; raises RuntimeError."""
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / "loaded.pt"
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (Path(meeting) / "store", job, checkpoint.resolve(), output)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        ended = subprocess.run(
            [sys.executable, "-m", "tests.engines.loading"],
            input=pickle.dumps((job.world, arguments, root.resolve() / "ranks.log")),
            env=environment,
            capture_output=True,
            timeout=TIMEOUT + 60,
        )
    if ended.returncode:
        raise RuntimeError(ended.stderr.decode())
    made: dict[str, Any] = torch.load(output, weights_only=False)
    return made


def work(rank: int, store: Path, job: Job, checkpoint: Path, output: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=job.world
    )
    program = build(job)
    read = count_reads()
    reader, state = fill(job, program, checkpoint)
    told: list[Any] = [None] * job.world
    distributed.all_gather_object(told, (sum(read), needed(reader, state)))
    held = gather(job, program)
    losses = [train_step(program, step) for step in range(3, 3 + job.losses)]
    if rank == 0:
        torch.save({**held, "losses": losses, "reads": told}, output)


def build(job: Job) -> Program:
    model = models.build(job.model, 999)
    if job.bf16:
        model.bfloat16()
    wrapped: nn.Module = model
    names = {id(each): name for name, each in model.named_parameters()}
    groups = models.parameter_groups(model, job.groups)
    members = [[names[id(each)] for each in group["params"]] for group in groups]
    if job.engine == "fsdp2":
        for unit in UNITS:
            fully_shard(model.get_submodule(unit))
        scalars = {each for each in model.parameters() if not each.ndim}  # FSDP2 cuts none
        fully_shard(model, ignored_params=scalars)
    elif job.engine == "fsdp1":
        around = {"use_orig_params": True, "device_id": torch.device("cpu")}
        for unit in UNITS:
            setattr(model, unit, FullyShardedDataParallel(model.get_submodule(unit), **around))
        wrapped = FullyShardedDataParallel(model, **around)
    named = {
        name.replace("_fsdp_wrapped_module.", ""): each for name, each in wrapped.named_parameters()
    }
    others = [  # what is loaded has other hyper-parameters
        {"params": [named[name] for name in group], "lr": 0.5 + place, "weight_decay": 0.5}
        for place, group in enumerate(members)
    ]
    return Program(wrapped, optimizers.FACTORIES[job.optimizer](others))


class App(Stateful):
    """As in PyTorch's tutorial."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self.program.model, self.program.optimizer
        return {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = self.program.model, self.program.optimizer
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])


def fill(job: Job, program: Program, checkpoint: Path) -> tuple[Any, dict[str, Any]]:
    """Loads, and gives the reader and the state dict that it filled."""
    from zckpt.dcp import StorageReader

    model, optimizer = program.model, program.optimizer
    words = dict(job.reader)
    if job.form == "raw":
        words |= {"model": model, "optimizer": optimizer}
    reader = StorageReader(checkpoint, **words)
    planner = None if job.planner is None else dcp.DefaultLoadPlanner(**job.planner)
    options = StateDictOptions(flatten_optimizer_state_dict=job.form == "flat")
    weights, states = job.roots
    if job.form == "app":
        dcp.load({"app": App(program)}, storage_reader=reader, planner=planner)
        return reader, App(program).state_dict()
    if job.form in ("model", "bare"):
        state: dict[str, Any] = get_model_state_dict(model)
        whole = state if job.form == "bare" else {weights: state}
        dcp.load(whole, storage_reader=reader, planner=planner)
        set_model_state_dict(model, state)
        return reader, {"model": state}
    if job.form == "boxes":
        mesh = init_device_mesh("cpu", (job.world,))
        state = {
            name: distribute_tensor(torch.zeros(each.shape), mesh, [Shard(max(each.ndim - 1, 0))])
            for name, each in model.named_parameters()
        }
        dcp.load(state, storage_reader=reader, planner=planner)
        for name, each in model.named_parameters():
            each.data.copy_(state[name].full_tensor())
        return reader, state
    if job.form == "raw":
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.zeros_like(each) if each.requires_grad else None
        optimizer.step()  # so that there are states to fill
        state = {weights: model.state_dict(), states: optimizer.state_dict()}
        dcp.load(state, storage_reader=reader, planner=planner)
        model.load_state_dict(state[weights])
        optimizer.load_state_dict(state[states])
    else:
        state = {
            weights: get_model_state_dict(model, options=options),
            states: get_optimizer_state_dict(model, optimizer, options=options),
        }
        if job.compiled:  # as torch.compile(model).state_dict() names them
            state[weights] = {f"_orig_mod.{name}": each for name, each in state[weights].items()}
        dcp.load(state, storage_reader=reader, planner=planner)
        set_optimizer_state_dict(model, optimizer, state[states], options=options)
        loaded = {name.removeprefix("_orig_mod."): each for name, each in state[weights].items()}
        set_model_state_dict(model, loaded, options=options)
    return reader, {"model": state[weights], "optim": state[states]}


def count_reads() -> list[int]:
    """Bytes of every read of a load from now on, without those of the checks before it."""
    from zckpt.core.storage.fileio import Reader
    from zckpt.judging import contents

    counts: list[int] = []
    plain: Callable[..., None] = Reader.read

    def read(self: Reader, extent: Any, into: memoryview) -> None:
        counts.append(extent.length)
        plain(self, extent, into)

    check = contents.check_tensors

    def check_tensors(*words: Any) -> list[str]:
        before = len(counts)
        lines = check(*words)
        del counts[before:]
        return lines

    Reader.read = read  # type: ignore[method-assign]
    contents.check_tensors = check_tensors
    return counts


def needed(reader: Any, state: dict[str, Any]) -> int:
    """Bytes of this rank's part of every tensor, in the type that the source has.

    torch's own directories hold a tied weight under each of its names, and each is read.
    """
    from zckpt.core.checkpoint.dtypes import SIZES
    from zckpt.dcp.keys import KeyNames

    numbers = [name for group in reader._groups for name in group]
    names, seen, total = KeyNames(reader.manifest, numbers), set(), 0
    for key, tensor in flattened(state):
        for part in local(tensor):
            meaning = names.meaning(key)
            entries = names.entries(meaning) if meaning else []
            memory = part.data_ptr(), reader._source.stored is not None and key
            if entries and memory not in seen:
                seen.add(memory)
                total += part.numel() * SIZES[entries[-1].dtype]
    return total


def flattened(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [one for key, held in value.items() for one in flattened(held, f"{path}.{key}")]
    return [(path.removeprefix("."), value)]


def local(tensor: Any) -> list[Tensor]:
    if isinstance(tensor, DTensor):
        return [tensor.to_local()]
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor] if isinstance(tensor, Tensor) else []


def gather(job: Job, program: Program) -> dict[str, Any]:
    """Everything that the program holds, whole."""
    model, optimizer = program.model, program.optimizer
    if job.engine == "fsdp1":
        full = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(model, options=full)
        states = get_optimizer_state_dict(model, optimizer, options=full)
    else:
        weights = {name: whole(each) for name, each in model.state_dict().items()}
        states = get_optimizer_state_dict(model, optimizer)
    tensors = {f"{name}/param": whole(each) for name, each in weights.items()}
    steps = {}
    for name, held in states["state"].items():
        for key, value in held.items():
            if key == "step":
                steps[name] = float(value)
            else:
                tensors[f"{name}/{key}"] = whole(value)
    return {"tensors": tensors, "steps": steps, "groups": states["param_groups"]}


def whole(value: Any) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def train_step(program: Program, step: int) -> float:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    loss = models.loss(program.model, step, rank, ranks)
    loss.backward()
    nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)  # as DeepSpeed does unless told else
    program.optimizer.step()
    program.optimizer.zero_grad()
    mean = loss.detach().double()
    distributed.all_reduce(mean)
    return float(mean) / ranks


def main() -> None:
    world, arguments, log = pickle.load(sys.stdin.buffer)
    failure = zygote.run(work, world, arguments, log, TIMEOUT)
    if failure is not None:
        sys.exit(f"{failure}\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    from tests.engines import loading  # so that pickles and forks name this module

    loading.main()
