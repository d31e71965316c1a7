"""What one rank of a small program does whose groups, scheduler and optimizer are given.

    save    trains some updates, saves, and goes on
    load    loads, and must go on with the same losses
    held    loads, writes what it holds then, and goes on

`Program` is of DeepSpeed; `rows_save` and `rows_load` are of FSDP2, whose ranks save files alone;
`sharded_save` and `sharded_held` of the same with torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from . import oracle, torch_rank
from . import rank as engine_rank

prepare = engine_rank.prepare

RULES: dict[str, Callable[[str], bool]] = {
    "bias": lambda name: name.endswith("bias"),
    "small": lambda name: name.endswith("bias") or name.startswith("1."),
    "backwards": lambda name: name.endswith("bias"),
    "middle": lambda name: name.startswith("1."),
}
"""Which parameters stand in the second group; `backwards` has each group in the other order."""


STEPS = 4


class Program(NamedTuple):
    """`groups` is a key of RULES; `config` is merged into the ds_config."""

    stage: int
    groups: str = "bias"
    optimizer: str | None = "AdamW"
    config: Mapping[str, Any] = {}
    decays: bool = False  # with a LambdaLR
    frozen: str = "none"  # what the names of frozen parameters begin with
    rate: float = 0.01
    updates: int = 4


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def groups_of(net: nn.Module, rule: str, frozen: str = "none") -> list[dict[str, Any]]:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    named = {name: each for name, each in net.named_parameters() if each.requires_grad}
    order = list(named)[::-1] if rule == "backwards" else list(named)
    return [
        {"params": [named[n] for n in order if RULES[rule](n) == second], "weight_decay": decay}
        for second, decay in ((False, 0.1), (True, 0.0))
    ]


def build(program: Program, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    net = model()
    groups = groups_of(net, program.groups, program.frozen)
    own = program.optimizer
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": program.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **program.config,
    }
    return deepspeed.initialize(
        model=net,
        model_parameters=groups,
        optimizer=None if own is None else getattr(torch.optim, own)(groups, lr=program.rate),
        lr_scheduler=engine_rank.decaying if program.decays else None,
        config=config,
    )[0]


def losses(engine: Any, updates: int = STEPS) -> list[float]:
    """Those of the next updates; every rank has the same rows."""
    found = []
    for number in range(updates):
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def loss_of(net: Any, number: int) -> Tensor:
    loss: Tensor = net(torch.linspace(-1, 1 + number, 16).view(2, 8)).square().mean()
    return loss


def save(rank: int, store: Path, ranks: int, program: Program, root: Path) -> None:
    """Writes `root`/run, what it holds to `root`/oracle.pt, and the losses that follow."""
    engine_rank.join(rank, ranks, store)
    engine = build(program, 1)
    losses(engine, program.updates)
    engine.save_checkpoint(str(root / "run"))
    if program.frozen != "none" or program.decays:
        write(oracle.record(engine), root / "oracle.pt")
    following = losses(engine)
    if rank == 0:
        torch.save(following, root / "losses.pt")


def load(
    rank: int, store: Path, ranks: int, program: Program, directory: Path, expected: list[float]
) -> None:
    """Raises if the program does not load a checkpoint, or has other losses than expected."""
    engine_rank.join(rank, ranks, store)
    engine = build(program, 2)
    path, _ = engine.load_checkpoint(str(directory))
    assert path is not None, "nothing was loaded"
    following = losses(engine)
    torch.testing.assert_close(following, expected, rtol=1e-5, atol=1e-7)


def held(
    rank: int, store: Path, ranks: int, program: Program, directory: Path, output: Path
) -> None:
    """What a program holds that has loaded a checkpoint, and the losses that follow."""
    engine_rank.join(rank, ranks, store)
    engine = build(program, 2)
    path, _ = engine.load_checkpoint(str(directory))
    assert path is not None, "nothing was loaded"
    state = oracle.record(engine)
    following = losses(engine)
    write(None if state is None else {**state, "losses": following}, output)


def write(state: Mapping[str, Any] | None, output: Path) -> None:
    if state is not None:  # on rank 0
        torch.save(dict(state), output)


# -- FSDP2 with torch.distributed.checkpoint


def sharded(program: Program, ranks: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = model()
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    fully_shard(net, mesh=mesh)
    groups = groups_of(net, program.groups, program.frozen)
    return net, torch.optim.AdamW(groups, lr=program.rate)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(net, optimizer)
    return {"model": weights, "optim": states}


def whole_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What all ranks hold, in the form of the DeepSpeed programs."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    tensors = {f"{name}/param": each.full_tensor().clone() for each, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{names[parameter]}/{key}"] = state[key].full_tensor().clone()
    groups = [
        {**group, "params": [names[each] for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    steps = {names[each]: int(state["step"]) for each, state in optimizer.state.items()}
    return {"tensors": tensors, "steps": steps, "groups": groups}


def sharded_save(rank: int, store: Path, ranks: int, program: Program, root: Path) -> None:
    torch_rank.join(rank, ranks, store)
    net, optimizer = sharded(program, ranks, 1)
    following_losses(net, optimizer, program.updates)
    optimizer.zero_grad()
    dcp.save(state_of(net, optimizer), checkpoint_id=root / "run")
    state = whole_state(net, optimizer)
    write(state if rank == 0 else None, root / "oracle.pt")


def sharded_held(
    rank: int, store: Path, ranks: int, program: Program, directory: Path, output: Path
) -> None:
    torch_rank.join(rank, ranks, store)
    net, optimizer = sharded(program, ranks, 2)
    state = state_of(net, optimizer)
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = whole_state(net, optimizer)
    following = following_losses(net, optimizer)
    write({**found, "losses": following} if rank == 0 else None, output)


# -- FSDP2, as verl saves it


def rows(ranks: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = model()
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def following_losses(
    net: nn.Module, optimizer: torch.optim.Optimizer, updates: int = STEPS
) -> list[float]:
    found = []
    for number in range(updates):
        optimizer.zero_grad()
        loss = loss_of(net, number)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def rows_save(rank: int, store: Path, ranks: int, root: Path) -> None:
    torch_rank.join(rank, ranks, store)
    net, optimizer = rows(ranks, 1)
    following_losses(net, optimizer)
    rest = f"world_size_{ranks}_rank_{rank}.pt"
    (root / "actor").mkdir(exist_ok=True)
    torch.save(net.state_dict(), root / "actor" / f"model_{rest}")
    torch.save(optimizer.state_dict(), root / "actor" / f"optim_{rest}")
    torch.save({"lr_scheduler": None, "rng": None}, root / "actor" / f"extra_state_{rest}")
    following = following_losses(net, optimizer)
    if rank == 0:
        torch.save(following, root / "losses.pt")


def rows_load(rank: int, store: Path, ranks: int, directory: Path, expected: list[float]) -> None:
    """Loads this rank's files as verl does; the next losses must be those expected."""
    torch_rank.join(rank, ranks, store)
    net, optimizer = rows(ranks, 2)
    rest = f"world_size_{ranks}_rank_{rank}.pt"
    net.load_state_dict(torch.load(directory / f"model_{rest}", weights_only=False))
    optimizer.load_state_dict(torch.load(directory / f"optim_{rest}", weights_only=False))
    following = following_losses(net, optimizer)
    torch.testing.assert_close(following, expected, rtol=1e-5, atol=1e-7)
