"""Runs with experts of two ep ranks, made by hand by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TAG = "global_step3"
MOMENTS = ("exp_avg", "exp_avg_sq")
INSIDE = "moe.deepspeed_moe.experts.deepspeed_experts."
GATE = "moe.deepspeed_moe.gate.wg.weight"
DENSE: dict[str, tuple[int, ...]] = {"first": (3,), GATE: (4, 2)}
INNER: dict[str, tuple[int, ...]] = {"w": (2, 2), "b": (2,)}
LOCAL = {f"{INSIDE}{n}.{inner}": shape for inner, shape in INNER.items() for n in range(2)}
"""In the optimizer, which a program gave the weights of all experts before their biases."""
EXPERTS = {f"{INSIDE}{n}.{inner}": shape for n in range(4) for inner, shape in INNER.items()}


def numbers(name: str, slot: str) -> torch.Tensor:
    """Integers that no other tensor begins with, and that bf16 has."""
    shape = (DENSE | EXPERTS)[name]
    first = 10 * [*DENSE, *EXPERTS].index(name) + {"master": 0, "exp_avg": 1, "exp_avg_sq": 2}[slot]
    return torch.arange(first, first + torch.Size(shape).numel()).float().view(shape)


def flat(names: list[str], slot: str) -> torch.Tensor:
    whole = torch.cat([numbers(name, slot).flatten() for name in names])
    return torch.cat([whole, torch.zeros(len(whole) % 2)])


def zero_1() -> list[dict[str, Any]]:
    """Dense parameters are cut over both ranks; each rank has two experts by itself."""
    files = []
    for rank in range(2):
        experts = [f"{INSIDE}{2 * rank + n}.{inner}" for inner in INNER for n in range(2)]
        parts = {
            slot: [flat([*DENSE], slot).chunk(2)[rank].clone(), flat(experts, slot)]
            for slot in ("master", *MOMENTS)
        }
        states = {
            group: {"step": torch.tensor(3.0)}
            | {s: parts[s][group] for s in ("exp_avg", "exp_avg_sq")}
            for group in (0, 1)
        }
        groups = [
            {"lr": 0.1, "params": [0]},
            {"lr": 0.1, "params": [1], "moe": True, "name": "ep_size_2"},
        ]
        optimizer = {
            "zero_stage": 1,
            "partition_count": [2, 1],
            "single_partition_of_fp32_groups": parts["master"],
            "base_optimizer_state": {"state": states, "param_groups": groups},
        }
        files.append({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"})
    return files


def stage_0() -> list[dict[str, Any]]:
    """Each ep rank has a whole optimizer, by number, and a copy of what is dense."""
    files = []
    for rank in range(2):
        experts = [f"{INSIDE}{2 * rank + n}.{inner}" for inner in INNER for n in range(2)]
        names = [*DENSE, *experts]
        states = {
            number: {slot: numbers(name, slot) for slot in MOMENTS} | {"step": 3}
            for number, name in enumerate(names)
        }
        groups = [
            {"lr": 0.1, "params": [0, 1]},
            {"lr": 0.1, "params": [2, 3, 4, 5], "moe": True, "name": "ep_size_2"},
        ]
        masters = [[numbers(n, "master") for n in own] for own in ([*DENSE], experts)]
        base = {"state": states, "param_groups": groups}
        files.append({"optimizer": {"optimizer_state_dict": base, "fp32_groups": masters}})
    return files


def saved(run: Path, make: Callable[[], list[dict[str, Any]]]) -> Path:
    """The run's directory with the optimizers that `make` gives, and the files of all experts."""
    folder = run / TAG
    folder.mkdir(parents=True)
    (run / "latest").write_text(TAG)
    shapes = [{name: torch.Size(shape) for name, shape in own.items()} for own in (DENSE, LOCAL)]
    is_whole = make is stage_0
    model = {
        "module": {name: numbers(name, "master").bfloat16() for name in DENSE},
        "buffer_names": [],
        "param_shapes": None if is_whole else shapes,
        "shared_params": {},
        "num_experts": [4],
        "optimizer": None,
        "global_steps": 3,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0 if is_whole else 1}},
        "ds_version": "0.19.8",
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, value in enumerate(make()):
        name = f"expp_rank_{rank}" if is_whole else f"bf16_zero_pp_rank_{rank}"
        torch.save(value, folder / f"{name}_mp_rank_00_optim_states.pt")
    for number in range(4):
        own = {n: numbers(n, "master").bfloat16() for n in EXPERTS if f"{INSIDE}{number}." in n}
        torch.save(own, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    return run


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Saves a file again after an `edit` of what it holds."""
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)
