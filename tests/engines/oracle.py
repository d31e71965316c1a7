"""What a DeepSpeed engine holds in memory, gathered without any checkpoint code of the engine.

Stage 1, 2 and BF16_Optimizer keep one flat buffer per group, cut over the ranks; stage 3 cuts each
parameter. `safe_get_full_*` are not used: they raise on some ranks with several groups and are
wrong with round_robin_gradients (0.19.8). The place of a parameter is where its data really lie.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn


class Place(NamedTuple):
    """Where a parameter lies: elements of flat tensor number `flat`."""

    flat: int
    offset: int
    length: int


class Layout(NamedTuple):
    flats: list[Tensor]  # this rank's live master partitions
    places: dict[str, Place]  # of each trainable parameter
    groups: list[list[str]]  # names in the order of the torch parameter groups
    cut_each_parameter: bool  # stage 3: a place is in every rank's flat tensor
    whole_momentum: dict[int, list[tuple[str, int]]]  # by flat: names and sizes, see `touching`


def record(engine: Any) -> dict[str, Any] | None:
    """The engine's whole state on rank 0, None on the others."""
    module, optimizer = engine.module, engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return described(engine, gather_weights(module), *whole_states(module, optimizer))
    layout = read_layout(module, optimizer)
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, local_states(optimizer, layout))
    weights = gather_weights(module)
    if distributed.get_rank() != 0:
        return None

    tensors = {f"{name}/param": weight for name, weight in weights.items()}
    steps, scalars = {}, {}
    for group, names in zip(optimizer.optimizer.param_groups, layout.groups, strict=True):
        for name in names:
            states = [rank[layout.places[name].flat] for rank in ranks]
            for slot in states[0]["tensors"]:
                parts = [state["tensors"][slot] for state in states]
                full = assemble(parts, layout.places[name], weights[name].shape, layout)
                tensors[f"{name}/{slot}"] = full
            for slot, full in whole_tensors(name, states).items():
                tensors[f"{name}/{slot}"] = full.view(weights[name].shape)
            kept = states[0]["scalars"]
            assert all(state["scalars"] == kept for state in states), f"ranks differ: {name}"
            steps[name] = kept.get("step", plain(group.get("step")))
            scalars[name] = {key: value for key, value in kept.items() if key != "step"}
            if not getattr(engine, "zenflow", False):  # its weights are newer than its masters
                check_rounding(name, tensors[f"{name}/master"], weights[name])
    return described(engine, {}, tensors, steps, scalars, layout.groups)


def described(
    engine: Any,
    weights: dict[str, Tensor],
    tensors: dict[str, Tensor],
    steps: dict[str, Any],
    scalars: dict[str, Any],
    names: list[list[str]],
) -> dict[str, Any] | None:
    """The record: these tensors, steps and scalars, `names` by group, and the rest of the engine.

    `weights` are those of the module that are not among the tensors yet.
    """
    if distributed.get_rank() != 0:
        return None
    module, optimizer, scheduler = engine.module, engine.optimizer, engine.lr_scheduler
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    saved = module.state_dict()
    owners = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "tensors": {f"{name}/param": weight for name, weight in weights.items()} | tensors,
        "steps": steps,
        "scalars": scalars,
        "groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": members}
            for group, members in zip(groups, names, strict=True)
        ],
        "trainable": [name for name, each in module.named_parameters() if each.requires_grad],
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
        "buffers": {name: each.clone() for name, each in module.named_buffers() if name in saved},
        "aliases": {
            name: owners[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if owners[id(parameter)] != name
        },
        "counters": {
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "global_samples": engine.global_samples,
        },
        "lr_scheduler": copy.deepcopy(scheduler.state_dict()) if scheduler else None,
    }


def whole_states(module: nn.Module, optimizer: Any) -> tuple[Any, Any, Any, Any]:
    """Tensors, steps, scalars and names by group of an engine without ZeRO (stage 0).

    Every rank has all of it. The names are those of the parameters that live in the wrapper's
    groups, or in torch's: nothing is matched. Frozen parameters that torch's list contains are left
    out.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer: one flat tensor per group
        groups = zip(
            optimizer.fp16_groups,
            optimizer.fp16_groups_flat,
            optimizer.fp32_groups_flat,
            strict=True,
        )
        pairs = [
            [(parameter, flat, place_in(parameter, whole, 0).offset) for parameter in group]
            for group, whole, flat in groups
        ]
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        pairs = [
            [(parameter, master, None) for parameter, master in zip(group, masters, strict=True)]
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        ]
    else:
        pairs = [
            [(each, each, None) for each in group["params"] if each.requires_grad]
            for group in optimizer.param_groups
        ]
    base = getattr(optimizer, "optimizer", optimizer)
    numbers = {
        key
        for master, kept in base.state.items()
        if isinstance(kept, dict)  # else a number of no parameter
        for key, value in kept.items()
        if not torch.is_tensor(value) or value.shape != master.shape
    }
    tensors: dict[str, Tensor] = {}
    steps, scalars = {}, {}
    # it uses the count of the last parameter for the whole group (0.19.8, fused_adam.py)
    shares_count = type(base).__name__ == "FusedAdam"
    for group, members in zip(base.param_groups, pairs, strict=True):
        for parameter, master, first in members:
            name, shape = names[id(parameter)], parameter.shape
            kept = dict(base.state.get(master, {}))
            shaped = {
                key: value
                for key, value in kept.items()
                if torch.is_tensor(value) and value.shape == master.shape
                if key not in numbers or value.numel() > 1
            }
            if master is not parameter:
                shaped["master"] = master
            for slot, value in shaped.items():
                part = value.detach()
                if first is not None:
                    part = part[first : first + shape.numel()].view(shape)
                tensors[f"{name}/{slot}"] = part.clone(memory_format=torch.contiguous_format)
            if master is not parameter:
                check_rounding(name, tensors[f"{name}/master"], parameter.detach())
            rest = {key: plain(value) for key, value in kept.items() if key not in shaped}
            steps[name] = rest.pop("step", plain(group.get("step")))
            scalars[name] = rest
        if shares_count:
            own = [names[id(parameter)] for parameter, _, _ in members]
            steps |= dict.fromkeys(own, steps[own[-1]])
    return tensors, steps, scalars, [[names[id(item[0])] for item in members] for members in pairs]


def read_layout(module: nn.Module, optimizer: Any) -> Layout:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return read_partitioned_parameters(names, optimizer)
    if hasattr(optimizer, "bf16_groups_flat"):  # BF16_Optimizer
        groups, wholes = optimizer.bf16_groups, optimizer.bf16_groups_flat
        flats = optimizer.fp32_groups_flat_partition
    else:
        groups, wholes = optimizer.bit16_groups, optimizer.bit16_groups_flat
        flats = optimizer.single_partition_of_fp32_groups
    places = {
        names[id(parameter)]: place_in(parameter, whole, number)
        for number, (group, whole) in enumerate(zip(groups, wholes, strict=True))
        for parameter in group
    }
    named = [[names[id(parameter)] for parameter in group] for group in groups]
    return Layout(list(flats), places, named, False, touching(names, optimizer))


def touching(names: dict[int, str], optimizer: Any) -> dict[int, list[tuple[str, int]]]:
    """What this rank has a part of, in the groups whose momentum is not partitioned.

    Muon orthogonalizes whole matrices, so in stage 1 and 2 without offload (0.19.8) a rank keeps,
    one after the other, the whole momentum of each parameter that reaches into its partition. A
    parameter cut by a boundary is on both sides.
    """
    if not hasattr(optimizer, "params_in_partition") or optimizer.cpu_offload:
        return {}
    return {
        number: [(names[id(parameter)], parameter.numel()) for parameter in parameters]
        for number, parameters in enumerate(optimizer.params_in_partition)
        if optimizer.optimizer.param_groups[number].get("use_muon", False)
    }


def place_in(parameter: Tensor, whole: Tensor, number: int) -> Place:
    """The parameter's data are a view of the group's flat 16-bit buffer."""
    offset, rest = divmod(parameter.data_ptr() - whole.data_ptr(), whole.element_size())
    assert rest == 0, "not a view"
    assert 0 <= offset <= whole.numel() - parameter.numel(), "not a view"
    return Place(number, offset, parameter.numel())


def read_partitioned_parameters(names: dict[int, str], optimizer: Any) -> Layout:
    groups: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    places = {}
    for number, sub_group in enumerate(optimizer.fp16_groups):
        for parameter in sub_group:
            name = names[id(parameter)]
            places[name] = Place(*optimizer.grad_position[optimizer.get_param_id(parameter)])
            assert places[name].flat == number
            groups[optimizer.sub_group_to_group_id[number]].append(name)
    flats = optimizer.fp32_partitioned_groups_flat
    return Layout(list(flats), places, groups, True, {})


def local_states(optimizer: Any, layout: Layout) -> list[dict[str, dict[str, Any]]]:
    """Master and optimizer state of each flat tensor on this rank."""
    states: list[dict[str, dict[str, Any]]] = []
    largest = max(layout.flats, key=torch.Tensor.numel)
    partitioned = {
        key
        for key, value in optimizer.optimizer.state.get(largest, {}).items()
        if torch.is_tensor(value) and value.shape == largest.shape
    }
    for number, flat in enumerate(layout.flats):
        kept = dict(optimizer.optimizer.state.get(flat, {}))
        whole = {}
        if number in layout.whole_momentum and "momentum_buffer" in kept:
            momentum = kept.pop("momentum_buffer")
            whole["momentum_buffer"] = cut(momentum, layout.whole_momentum[number])
        kept = {key: value for key, value in kept.items() if not is_own(value, flat)}
        shaped = {
            key: value
            for key, value in kept.items()
            if torch.is_tensor(value) and value.ndim and (key in partitioned or value.numel() != 1)
        }
        tensors = {"master": flat, **shaped}
        states.append(
            {
                "tensors": {key: value.detach().clone() for key, value in tensors.items()},
                "whole": whole,
                "scalars": {key: plain(value) for key, value in kept.items() if key not in shaped},
            }
        )
    return states


def is_own(value: Any, flat: Tensor) -> bool:
    """Whether a state of a rank's flat tensor is no number and has no part for each element.

    Only the next losses show whether it came back.
    """
    if torch.is_tensor(value):
        return value.numel() not in (1, flat.numel())
    return isinstance(value, (dict, list, tuple)) or hasattr(value, "__dict__")


def cut(flat: Tensor, sizes: list[tuple[str, int]]) -> dict[str, Tensor]:
    pieces = torch.split(flat.detach().clone(), [size for _, size in sizes])
    return {name: piece for (name, _), piece in zip(sizes, pieces, strict=True)}


def whole_tensors(name: str, states: list[dict[str, dict[str, Any]]]) -> dict[str, Tensor]:
    """States that some ranks hold in full; the copies must agree."""
    found: dict[str, Tensor] = {}
    for state in states:
        for slot, pieces in state["whole"].items():
            if name in pieces:
                first = found.setdefault(slot, pieces[name])
                assert torch.equal(first, pieces[name]), f"ranks differ: {name}/{slot}"
    return found


def plain(value: Any) -> Any:
    """By value; a tensor that is not 0-d as lists, so that its shape shows."""
    return value.tolist() if torch.is_tensor(value) else value


def assemble(parts: list[Tensor], place: Place, shape: torch.Size, layout: Layout) -> Tensor:
    """A parameter's full tensor from every rank's part."""
    start, stop = place.offset, place.offset + place.length
    if layout.cut_each_parameter:
        full = torch.cat([part[start:stop] for part in parts])[: shape.numel()]
    else:
        full = torch.cat(parts)[start:stop]
    return full.view(shape).clone()


def gather_weights(module: nn.Module) -> dict[str, Tensor]:
    """What the module holds, in full."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(
        [each for each in module.parameters() if hasattr(each, "ds_id")]
    ):
        return {
            name: parameter.detach().clone(memory_format=torch.contiguous_format)
            for name, parameter in module.named_parameters()
        }


def check_rounding(name: str, master: Tensor, weight: Tensor) -> None:
    """A master that is not the origin of the module's weight was cut from a wrong place."""
    assert torch.equal(master.to(weight.dtype), weight), f"master of {name} is not its weight"
