"""What one rank does in runs that zckpt.probe records: DeepSpeed resumed, FSDP2 trained."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import zckpt
from zckpt import probe

from .cases import Case

STEPS = 3
WIDTH = 16
ROWS = 24  # of a global batch: divisible by every number of ranks in use


def deepspeed_runs(
    rank: int, store: Path, case: Case, runs: list[tuple[Path, Path | None]], losses: Path
) -> None:
    """Resumes each directory, records its next steps where asked, and writes all losses."""
    from . import rank as engine_rank

    engine_rank.join(rank, case.dp, store)
    found = []
    for directory, record in runs:
        engine = engine_rank.build_engine(case, case.seed + 1000)
        engine.load_checkpoint(str(directory), **case.load)
        if record is None:
            found.append([engine_rank.train_step(engine) for _ in range(STEPS)])
        else:
            with probe.record(engine, record, parameters=True):
                found.append([engine_rank.train_step(engine) for _ in range(STEPS)])
        engine.destroy()
        del engine
        gc.collect()
    if rank == 0:
        torch.save(found, losses)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        expanded = functional.gelu(self.expand(self.norm(hidden)))
        output: Tensor = hidden + self.contract(expanded)
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.layers(self.embedding(tokens)))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def build_fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [held for held in trained if held.ndim > 1], "weight_decay": 0.1},
        {"params": [held for held in trained if held.ndim == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def fsdp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(23, (ROWS, 5), generator=generator)[rank::ranks]
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state, states = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": states}, checkpoint_id=path)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state, states = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=states)


def _raise_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for held in optimizer.state.values():
        held["step"] += 1


def _swap_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = optimizer.state[model.get_parameter("layers.1.expand.weight")]
    first, second = held["exp_avg"], held["exp_avg_sq"]
    held["exp_avg"], held["exp_avg_sq"] = second.clone(), first.abs()


def _raise_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.011


def _reset_frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.get_parameter("frozen.weight").mul_(0.5)


def _stale_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.get_parameter("layers.2.contract.weight").mul_(1.01)


FSDP_FAULTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "step": _raise_step,
    "moments": _swap_moments,
    "rate": _raise_rate,
    "frozen": _reset_frozen,
    "stale": _stale_weight,
}


def fsdp_runs(rank: int, store: Path, dp: int, root: Path) -> None:
    """Trains, saves; saves what was loaded again, with every fault too, and what zckpt makes of the
    original by way of a universal checkpoint; records what follows each.

    Writes `root`/NAME (recorded) and `root`/losses.pt: of `plain`, which is not recorded, too.
    """
    torch.distributed.init_process_group("gloo", store.as_uri(), rank=rank, world_size=dp)
    model, optimizer = build_fsdp(0)
    fsdp_steps(model, optimizer, 0)
    save(model, optimizer, root / "checkpoints" / "original")
    for name in ("copy", *FSDP_FAULTS):
        model, optimizer = build_fsdp(1)
        load(model, optimizer, root / "checkpoints" / "original")
        FSDP_FAULTS.get(name, lambda *about: None)(model, optimizer)
        save(model, optimizer, root / "checkpoints" / name)
    if rank == 0:
        zckpt.convert(root / "checkpoints" / "original", root / "checkpoints" / "universal")
        zckpt.convert(
            root / "checkpoints" / "universal", root / "checkpoints" / "written", to="dcp"
        )
    torch.distributed.barrier()
    losses: dict[str, Any] = {}
    for name in ("plain", "original", "copy", "written", *FSDP_FAULTS):
        model, optimizer = build_fsdp(2)
        source = "original" if name == "plain" else name
        load(model, optimizer, root / "checkpoints" / source)
        if name == "plain":
            losses[name] = fsdp_steps(model, optimizer, STEPS)
            continue
        with probe.record(model, root / name, step=STEPS, optimizer=optimizer, parameters=True):
            losses[name] = fsdp_steps(model, optimizer, STEPS)
    if rank == 0:
        torch.save(losses, root / "losses.pt")


def fsdp_resumed(rank: int, store: Path, dp: int, root: Path, folder: Path) -> None:
    """Loads the checkpoints that `fsdp_runs` has written, at another number of ranks, and records
    what follows into `folder`."""
    torch.distributed.init_process_group("gloo", store.as_uri(), rank=rank, world_size=dp)
    for name in ("original", *FSDP_FAULTS):
        model, optimizer = build_fsdp(2)
        load(model, optimizer, root / "checkpoints" / name)
        with probe.record(model, folder / name, step=STEPS, optimizer=optimizer, parameters=True):
            fsdp_steps(model, optimizer, STEPS)


class Weights(probe.Subscriber):
    """Notes at each event of the backward whether the module's own weights are whole."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.events: list[tuple[str, str, bool]] = []

    def note(self, place: probe.Place, when: str) -> None:
        whole = []
        for name, parameter in place.module.named_parameters(recurse=False):
            path = name if place.is_root else f"{place.path}.{name}"
            has_bytes = parameter.untyped_storage().nbytes() >= parameter.nbytes > 0
            is_local = not hasattr(parameter, "to_local")
            whole.append(tuple(parameter.shape) == self.shapes[path] and has_bytes and is_local)
        self.events.append((place.path, when, all(whole)))

    def pre_backward_module(self, place: probe.Place) -> None:
        self.note(place, "before")

    def gradient_tensor(self, place: probe.Place, path: str, gradient: Tensor) -> Tensor:
        self.note(place, "gradient")
        return gradient

    def post_backward_module(self, place: probe.Place) -> None:
        self.note(place, "after")


def _with_inputs(model: nn.Module, skipped: tuple[str, ...]) -> list[str]:
    """Modules with trained weights whose inputs have gradients, so that they end in time."""
    return [
        path
        for path, module in model.named_modules()
        if any(each.requires_grad for each in module.parameters(recurse=False))
        and path not in skipped
    ]


def zero_backward(rank: int, store: Path, case: Case, directory: Path, output: Path) -> None:
    """Trains a step of a resumed engine with and without a subscriber of the backward."""
    from . import models
    from . import rank as engine_rank

    engine_rank.join(rank, case.dp, store)
    plain = models.build(case.model, 0)
    shapes = {
        name: tuple(each.shape) for name, each in plain.named_parameters(remove_duplicate=False)
    }
    losses, weights = {}, Weights(shapes)
    for name in ("plain", "losses"):
        engine = engine_rank.build_engine(case, case.seed + 1000)
        engine.load_checkpoint(str(directory))
        subscribers = (weights,) if name == "losses" else ()
        with probe.subscribe(engine, *subscribers):
            losses[name] = [engine_rank.train_step(engine) for _ in range(2)]
        engine.destroy()
    if rank == 0:
        modules = _with_inputs(plain, ("", "embedding"))
        torch.save({"events": weights.events, "modules": modules, **losses}, output)


def fsdp_backward(rank: int, store: Path, dp: int, output: Path) -> None:
    """The same with FSDP2."""
    torch.distributed.init_process_group("gloo", store.as_uri(), rank=rank, world_size=dp)
    plain = Model()
    shapes = {
        name: tuple(each.shape) for name, each in plain.named_parameters(remove_duplicate=False)
    }
    losses, weights = {}, Weights(shapes)
    for name in ("plain", "losses"):
        model, optimizer = build_fsdp(0)
        with probe.subscribe(model, *((weights,) if name == "losses" else ())):
            losses[name] = fsdp_steps(model, optimizer, 0)
    if rank == 0:
        modules = _with_inputs(plain, ("", "embedding"))
        torch.save({"events": weights.events, "modules": modules, **losses}, output)
