"""What a PyTorch training holds in memory, gathered from its live parameters and states."""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor

COUNTED = {"step", "mu_product"}  # 0-dim, but no tensor of a 0-dim parameter
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


class Facts(NamedTuple):
    """What is known of a model before an engine has it."""

    trainable: list[str]
    frozen: list[str]
    aliases: dict[str, str]
    buffers: list[str]

    @classmethod
    def of(cls, model: nn.Module) -> Facts:
        named = dict(model.named_parameters())
        owners = {id(parameter): name for name, parameter in named.items()}
        saved = model.state_dict()
        return cls(
            [name for name, each in named.items() if each.requires_grad],
            [name for name, each in named.items() if not each.requires_grad],
            {
                name: owners[id(parameter)]
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if owners[id(parameter)] != name
            },
            [name for name, _ in model.named_buffers() if name in saved],
        )


def clean(name: str) -> str:
    return WRAPPERS.sub("", name)


def record(run: Any) -> dict[str, Any]:
    """The run's whole state; every rank must call it."""
    if isinstance(run.model, FullyShardedDataParallel):
        weights, states, groups = gather_flat(run)
    else:
        weights, states, groups = gather(run)
    buffers = {clean(name): each for name, each in run.model.named_buffers()}
    buffers = {name.removeprefix("module."): each.clone() for name, each in buffers.items()}
    tensors = {f"{name}/param": weight for name, weight in weights.items()}
    steps, scalars = {}, {}
    for name in run.facts.trainable:
        state = dict(states.get(name, {}))
        if "step" in state:
            steps[name] = int(state.pop("step"))
        scalars[name] = {
            key: plain(value)
            for key, value in state.items()
            if key in COUNTED or not torch.is_tensor(value)
        }
        tensors |= {
            f"{name}/{key}": value for key, value in state.items() if key not in scalars[name]
        }
    for group in groups:
        if "step" in group:
            steps |= dict.fromkeys(group["params"], int(group["step"]))
    return {
        "tensors": tensors,
        "steps": steps,
        "scalars": scalars,
        "groups": groups,
        "trainable": run.facts.trainable,
        "frozen": run.facts.frozen,
        "never": [name for name in run.facts.trainable if not states.get(name)],  # stepped
        "buffers": {name: buffers[name] for name in run.facts.buffers},
        "aliases": run.facts.aliases,
        "lr_scheduler": copy.deepcopy(run.scheduler.state_dict()) if run.scheduler else None,
    }


Gathered = tuple[dict[str, Tensor], dict[str, dict[str, Any]], list[dict[str, Any]]]


def gather(run: Any) -> Gathered:
    """Weights, states by name, groups; what only some ranks hold is collected from them."""
    named = {clean(name): each for name, each in run.module.named_parameters()}
    names = {id(parameter): name for name, parameter in named.items()}
    held = {
        names[id(parameter)]: {key: whole(value) for key, value in state.items()}
        for parameter, state in getattr(run.optimizer, "optim", run.optimizer).state.items()
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, held)
    states = {name: state for rank in ranks for name, state in rank.items()}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in run.optimizer.param_groups
    ]
    return {name: whole(each) for name, each in named.items()}, states, copied(groups)


def gather_flat(run: Any) -> Gathered:
    """The same from FSDP1's flat parameters."""
    with FullyShardedDataParallel.summon_full_params(run.model, writeback=False):
        weights = {clean(name): whole(each) for name, each in run.model.named_parameters()}
    # With offload_to_cpu=True it crashes on a processor (torch 2.13).
    with FullyShardedDataParallel.state_dict_type(
        run.model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        optim = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
    return weights, copied(optim["state"]), copied(optim["param_groups"])


def whole(value: Any) -> Any:
    """A copy of a tensor, its own and complete; anything else as it is.

    Ranks that gather a GPU's DTensor over gloo crash (torch 2.11): it goes to the CPU before.
    """
    if not torch.is_tensor(value):
        return value
    full = value.detach().cpu().full_tensor() if isinstance(value, DTensor) else value.detach()
    return full.clone(memory_format=torch.contiguous_format)


def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def plain(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value
