"""A program of FSDP2 that loads what ranks of other axes saved, with zckpt's reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from . import grid_models as models
from .torch_rank import prepare  # noqa: F401

Names = Sequence[tuple[str, tuple[int, ...], int | None]]
"""Name, whole shape, and number of the optimizer's group; None if it is frozen."""


def whole_model(names: Names) -> nn.Module:
    """A module that has these parameters, whatever layers they were of."""
    root = nn.Module()
    for name, shape, group in names:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.full(shape, 0.5), group is not None))
    return root


def load(rank: int, store: Path, run: Path, rules: str | None, names: Names, output: Path) -> None:
    """Writes what the ranks hold after loading: weights, and states of the optimizer by name."""
    from zckpt.dcp import StorageReader

    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    model = whole_model(names)
    fully_shard(model)
    groups = sorted({group for _, _, group in names if group is not None})
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.get_parameter(name) for name, _, own in names if own == group]}
            for group in groups
        ],
        lr=0.5,
    )
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    checkpoint.load(state, storage_reader=StorageReader(run, tp_rules=rules))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    held = {}
    for name, each in model.named_parameters():
        assert isinstance(each, DTensor)
        held[f"{name}/{'master' if each.requires_grad else 'param'}"] = each.full_tensor().detach()
        for slot, value in optimizer.state.get(each, {}).items():
            held[f"{name}/{slot}"] = value.full_tensor() if isinstance(value, DTensor) else value
    rates = [group["lr"] for group in optimizer.param_groups]
    if rank == 0:
        torch.save({"tensors": held, "rates": rates}, output)


class Layers(nn.Module):
    """The layers of a pipeline in one module, under the names that `PipelineModule` gives them."""

    def __init__(self, axis: models.Axis) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": models.Embedding(axis)})
        for number, layer in {
            1: models.Attention(axis),
            3: models.Frozen(),
            4: models.Gated(axis),
            5: models.Normed(),
            6: models.Attention(axis),
            7: nn.LayerNorm(models.WIDTH),
        }.items():
            self.add_module(str(number), layer)

    def forward(self, tokens: Tensor) -> Tensor:
        embed = self.tied_modules["embed"]
        hidden = self.get_submodule("1")(embed(tokens))
        hidden = models.shifted(hidden)
        for number in range(3, 8):
            hidden = self.get_submodule(str(number))(hidden)
        return models.logits(embed, hidden)


def step(rank: int, store: Path, world: int, source: Path, target: Path, number: int) -> None:
    """Loads `source`, trains the step of this number, saves `target` and what ranks held.

    Several ranks are FSDP2's, with a directory of torch.distributed.checkpoint. One rank is a plain
    program with model.pt and optim.pt.
    """
    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=world)
    alone = [distributed.new_group([each]) for each in range(world)][rank]
    torch.manual_seed(11)
    model = Layers(models.Axis(alone))
    if world > 1:
        fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in trained if each.ndim > 1]},
            {"params": [each for each in trained if each.ndim < 2]},
        ],
        lr=0.5,
    )
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    if world > 1:
        checkpoint.load(state, checkpoint_id=source)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    else:
        model.load_state_dict(torch.load(source / "model.pt"))
        set_optimizer_state_dict(model, optimizer, torch.load(source / "optim.pt"))
    tokens, targets = models.batch(number, rank, world)
    loss = models.loss(model(tokens), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    mean = loss.detach().double()
    distributed.all_reduce(mean)
    tensors = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        tensors[f"{name}/param"] = _full(each.detach())
        for slot, value in optimizer.state.get(each, {}).items():
            tensors[f"{name}/{slot}"] = _full(value)
    if world > 1:
        checkpoint.save(state, checkpoint_id=target)
    else:
        target.mkdir()
        torch.save(state["model"], target / "model.pt")
        torch.save(state["optim"], target / "optim.pt")
    if rank == 0:
        torch.save({"tensors": tensors, "loss": float(mean) / world}, target.with_suffix(".held"))


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
