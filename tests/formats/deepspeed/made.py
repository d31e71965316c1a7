"""Directories of ZeRO made by hand, of a few integers each, by the rules of DeepSpeed 0.19.8.

A master has the integers from 1 on, its moments the same and 100 or 50 more: bf16 has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

Groups = Sequence[Mapping[str, tuple[int, ...]]]
States = tuple[dict[str, Any], list[dict[str, Any]]]
"""What the model file has, and the optimizer file of each rank."""

SLOTS = {"master": 0.0, "exp_avg": 100.0, "exp_avg_sq": 50.0}
TAG = "global_step3"


def whole(groups: Groups) -> dict[str, torch.Tensor]:
    """All tensors by the names of entries."""
    tensors: dict[str, torch.Tensor] = {}
    first = 1
    for group in groups:
        for name, shape in group.items():
            numbers = torch.arange(first, first + prod(shape), dtype=torch.float32).view(shape)
            tensors |= {f"{name}/{slot}": numbers + more for slot, more in SLOTS.items()}
            tensors[f"{name}/param"] = numbers.bfloat16()
            first += prod(shape)
    return tensors


def stage_2(groups: Groups, dp: int, saves_padding: bool = True) -> States:
    """A group is flattened, padded to twice the ranks, and cut (stage_1_and_2.py).

    BF16_Optimizer saves masters with the padding, the others without it.
    """
    tensors = whole(groups)
    model = _model(
        groups, dp, {name: tensors[f"{name}/param"] for group in groups for name in group}
    )
    ranks = [_optimizer(2, [dp] * len(groups)) for _ in range(dp)]
    for number, group in enumerate(groups):
        for slot in SLOTS:
            flat = torch.cat([tensors[f"{name}/{slot}"].flatten() for name in group])
            padding = -len(flat) % (2 * dp)
            parts = torch.cat([flat, torch.zeros(padding)]).chunk(dp)
            for rank, (part, optimizer) in enumerate(zip(parts, ranks, strict=True)):
                state = optimizer["optimizer_state_dict"]
                if slot != "master":
                    _kept(state["base_optimizer_state"], number)[slot] = part.clone()
                    continue
                if not saves_padding:
                    part = part[: max(0, min(len(part), len(flat) - rank * len(part)))]
                state["single_partition_of_fp32_groups"].append(part.clone())
                state["param_alignment_paddings"].append([0] * len(group))
    return model, ranks


def stage_3(groups: Groups, dp: int) -> States:
    """Each parameter is padded and cut; a rank's parts of a group follow each other (stage3.py)."""
    tensors = whole(groups)
    model = _model(
        groups, dp, {name: torch.zeros(0).bfloat16() for group in groups for name in group}
    )
    ranks = [_optimizer(3, dp) for _ in range(dp)]
    for number, group in enumerate(groups):
        for slot in SLOTS:
            cut = [_padded(tensors[f"{name}/{slot}"].flatten(), dp).chunk(dp) for name in group]
            for rank, optimizer in enumerate(ranks):
                state = optimizer["optimizer_state_dict"]
                part = torch.cat([parts[rank] for parts in cut])
                if slot == "master":
                    state["fp32_flat_groups"].append(part)
                else:
                    _kept(state["optimizer_state_dict"], number)[slot] = part
    return model, ranks


def stage_0(groups: Groups, masters: str | None = "fp32_groups") -> States:
    """The model file has the whole optimizer, by number.

    `masters` is the key of its wrapper's: `fp32_groups` are those of every parameter, and
    `fp32_groups_flat` those of every group, whose weights are views of one buffer. None is torch's
    own optimizer, which updates fp32 weights (fp16/fused_optimizer.py and unfused_optimizer.py).
    """
    tensors, is_flat = whole(groups), masters == "fp32_groups_flat"
    module: dict[str, torch.Tensor] = {}
    base: dict[str, Any] = {"state": {}, "param_groups": []}
    of_groups: list[Any] = []
    for group in groups:
        flats = {slot: _flat(tensors, group, slot) for slot in SLOTS}
        views = flats["master"].bfloat16().split([prod(shape) for shape in group.values()])
        for (name, shape), view in zip(group.items(), views, strict=True):
            weight = tensors[f"{name}/master"] if masters is None else tensors[f"{name}/param"]
            module[name] = view.view(shape) if is_flat else weight
        owners = [flats] if is_flat else [{s: tensors[f"{n}/{s}"] for s in SLOTS} for n in group]
        first = len(base["state"])
        for number, own in enumerate(owners, first):
            moments = {slot: own[slot].clone() for slot in SLOTS if slot != "master"}
            base["state"][number] = {"step": torch.tensor(3.0), **moments}
        numbers = [*range(first, first + len(owners))]
        base["param_groups"].append({"lr": 0.1, "params": numbers})
        of_groups.append(flats["master"] if is_flat else [own["master"] for own in owners])
    optimizer = base if masters is None else {"optimizer_state_dict": base, masters: of_groups}
    model = _model(groups, 1, module)
    return {**model, "param_shapes": None, "optimizer": optimizer}, []


def _flat(tensors: Mapping[str, torch.Tensor], names: Iterable[str], slot: str) -> torch.Tensor:
    return torch.cat([tensors[f"{name}/{slot}"].flatten() for name in names])


def saved(run: Path, states: States) -> Path:
    """The run's directory with these files."""
    model, ranks = states
    folder = run / TAG
    folder.mkdir(parents=True)
    (run / "latest").write_text(TAG)
    is_3 = bool(ranks) and ranks[0]["optimizer_state_dict"]["zero_stage"] == 3
    for rank, optimizer in enumerate(ranks):
        torch.save(optimizer, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if is_3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if not is_3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    return run


def _padded(flat: torch.Tensor, parts: int) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(-len(flat) % parts)])


def _model(groups: Groups, dp: int, module: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(s) for name, s in group.items()} for group in groups],
        "shared_params": {},
        "global_steps": 3,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def _optimizer(stage: int, count: Any) -> dict[str, Any]:
    masters, base = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    state = {
        "zero_stage": stage,
        "partition_count": count,
        masters: [],
        base: {"state": {}, "param_groups": []},
    }
    if stage != 3:
        state["param_alignment_paddings"] = []
    return {"optimizer_state_dict": state, "ds_version": "0.19.8"}


def _kept(base: dict[str, Any], number: int) -> dict[str, Any]:
    """What the optimizer keeps of a flat group, which has a group of its own."""
    if number not in base["state"]:
        base["state"][number] = {"step": torch.tensor(3.0)}
        base["param_groups"].append({"lr": 0.1, "params": [number]})
    state: dict[str, Any] = base["state"][number]
    return state
