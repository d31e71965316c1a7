"""Runs with experts of two ep ranks, made by hand by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
LATE_GATE = "late.deepspeed_moe.gate.wg.weight"
LATE = {f"late.deepspeed_moe.experts.deepspeed_experts.{n}.w": (3,) for n in range(2)}
"""Another layer, of two experts."""
MORE = {f"more{n}": (2,) for n in range(5)}
SHAPES: dict[str, tuple[int, ...]] = {**DENSE, **EXPERTS, LATE_GATE: (2, 2), **LATE, **MORE}
Groups = Sequence[tuple[int, Sequence[str]]]
"""Of each flat group the expert-parallel size, and the names on rank 0 in their order."""
GROUPS: Groups = ((1, [*DENSE]), (2, [*LOCAL]))


def numbers(name: str, slot: str) -> torch.Tensor:
    """Integers that no other tensor begins with, and that bf16 has."""
    shape = SHAPES[name]
    first = 10 * [*SHAPES].index(name) + {"master": 0, "exp_avg": 1, "exp_avg_sq": 2}[slot]
    return torch.arange(first, first + torch.Size(shape).numel()).float().view(shape)


def flat(names: Sequence[str], slot: str, ranks: int) -> torch.Tensor:
    """The flat buffer that so many ranks share, with its padding."""
    whole = torch.cat([numbers(name, slot).flatten() for name in names])
    return torch.cat([whole, torch.zeros(-len(whole) % (2 * ranks))])


def on_rank(name: str, ep_rank: int) -> str:
    """What the ep rank of two calls `name`, by its name in the whole model."""
    if not name.startswith(INSIDE):
        return name
    number, _, inner = name.removeprefix(INSIDE).partition(".")
    return f"{INSIDE}{2 * ep_rank + int(number)}.{inner}"


def zero_1(groups: Groups = GROUPS, dp: int = 2, data_first: bool = False) -> list[dict[str, Any]]:
    """All ranks share dense groups; a group of experts is shared by those that have the same ones.

    Neighbors have different experts, or the same (`data_first`).
    """
    files = []
    for rank in range(dp):
        parts: dict[str, list[torch.Tensor]] = {slot: [] for slot in ("master", *MOMENTS)}
        for ep, names in groups:
            sharers = dp // ep
            ep_rank, place = divmod(rank, sharers) if data_first else (rank % ep, rank // ep)
            own = [on_rank(name, ep_rank if ep > 1 else 0) for name in names]
            for slot, tensors in parts.items():
                tensors.append(flat(own, slot, sharers).chunk(sharers)[place].clone())
        states = {
            group: {"step": torch.tensor(3.0)} | {slot: parts[slot][group] for slot in MOMENTS}
            for group, _ in enumerate(groups)
        }
        optimizer = {
            "zero_stage": 1,
            "partition_count": [dp // ep for ep, _ in groups],
            "single_partition_of_fp32_groups": parts["master"],
            "base_optimizer_state": {
                "state": states,
                "param_groups": [
                    {"lr": 0.1, "params": [number]}
                    | ({"moe": True, "name": f"ep_size_{ep}"} if "experts" in names[0] else {})
                    for number, (ep, names) in enumerate(groups)
                ],
            },
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
    optimizers = {
        f"expp_rank_{rank}" if make is stage_0 else f"bf16_zero_pp_rank_{rank}": value
        for rank, value in enumerate(make())
    }
    stage = {"stage": 0 if make is stage_0 else 1}
    without = {"param_shapes": None} if make is stage_0 else {}
    return _saved(run, optimizers, GROUPS, ds_config={"zero_optimization": stage}, **without)


def saved_zero_1(
    run: Path, groups: Groups = GROUPS, dp: int = 2, data_first: bool = False, **model: Any
) -> Path:
    """A run of so many ranks with these groups, and with more in its model file."""
    files = enumerate(zero_1(groups, dp, data_first))
    optimizers = {f"bf16_zero_pp_rank_{rank}": value for rank, value in files}
    return _saved(run, optimizers, groups, dp_world_size=dp, **model)


def _saved(run: Path, optimizers: dict[str, Any], groups: Groups, **changes: Any) -> Path:
    folder = run / TAG
    folder.mkdir(parents=True)
    (run / "latest").write_text(TAG)
    names = [name for _, own in groups for name in own]
    layers = [EXPERTS, *([LATE] if {*LATE} & {*names} else [])]
    model = {
        "module": {n: numbers(n, "master").bfloat16() for n in names if "experts" not in n},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(SHAPES[name]) for name in own} for _, own in groups],
        "shared_params": {},
        "num_experts": [4, 2][: len(layers)],
        "optimizer": None,
        "global_steps": 3,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
    }
    torch.save(model | changes, folder / "mp_rank_00_model_states.pt")
    for name, value in optimizers.items():
        torch.save(value, folder / f"{name}_mp_rank_00_optim_states.pt")
    for layer, experts in enumerate(layers):
        for number in range(model["num_experts"][layer]):
            own = {
                n: numbers(n, "master").bfloat16() for n in experts if f"_experts.{number}." in n
            }
            torch.save(own, folder / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt")
    return run


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Saves a file again after an `edit` of what it holds."""
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)
