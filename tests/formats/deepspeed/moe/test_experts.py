"""Experts of two ep ranks, made by hand by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import InconsistentCheckpoint
from zckpt.formats.deepspeed.gather import partitions

from ....faults import swap_files

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


@pytest.fixture(params=[zero_1, stage_0], ids=["zero 1", "stage 0"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[], list[dict[str, Any]]] = request.param
    folder = tmp_path / "run" / TAG
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text(TAG)
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
    return tmp_path / "run"


def test_all_ranks_together(run: Path) -> None:
    """Experts stand by their numbers in the whole model, as one rank would have them."""
    manifest = zckpt.read(run)
    in_order = [f"{INSIDE}{n}.{inner}" for inner in INNER for n in range(4)]
    assert list(manifest.parameters) == [*DENSE, *in_order]
    assert manifest.state["module"] == [*DENSE, *EXPERTS]
    assert manifest.source["ep"] == 2
    for name in DENSE | EXPERTS:
        for slot in ("master", *MOMENTS):
            assert torch.equal(zckpt.load(run, f"{name}/{slot}"), numbers(name, slot)), name
        assert zckpt.load(run, f"{name}/param").dtype == torch.bfloat16
    copies = [entry.parameter for entry in manifest.replicas]
    assert {*copies} == ({*DENSE} if manifest.source["zero_stage"] == 0 else set())


def test_the_engine_s_rule_finds_the_same(run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / "universal")
    if zckpt.read(run).source["zero_stage"] == 1:
        names = {
            m.name for part in partitions(str(run / TAG)) for m in getattr(part, "members", ())
        }
        assert f"{INSIDE}3.b/exp_avg_sq" in names
    assert zckpt.verify(run, tmp_path / "universal", gather=True, device="cpu")["equal"]
    assert zckpt.verify(run)["equal"]


@pytest.mark.parametrize("ep", [1, 4])
def test_another_expert_parallel_size(ep: int, run: Path, tmp_path: Path) -> None:
    zckpt.reshard(run, tmp_path / "other", dp=4, ep=ep)
    report = zckpt.verify(run, tmp_path / "other")  # beside settings, which the target completes
    assert (report["tensors"], report["differences"]) == (40, [])


def test_weights_alone(run: Path, tmp_path: Path) -> None:
    zckpt.reshard(run, tmp_path / "other", weights_only=True)
    report = zckpt.verify(run, tmp_path / "other", weights_only=True)
    assert (report["problems"], report["differences"]) == ([], [])


def test_swapped_files_of_experts(run: Path) -> None:
    swap_files(*(run / TAG / f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (1, 3)))
    with pytest.raises(InconsistentCheckpoint, match="holds expert 3 of moe, in the place of exp"):
        zckpt.read(run)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda s: s.update(partition_count=[2, 2]),
            "cut over 2 of 2 ranks, and 2 expert",
        ),
        (
            lambda s: s["base_optimizer_state"]["param_groups"][1].update(name="ep_size_1"),
            "named 'ep_size_1'",
        ),
    ],
)
def test_groups_that_contradict_their_names(
    edit: Callable[[Any], object], said: str, run: Path
) -> None:
    for path in (run / TAG).glob("*optim_states.pt"):
        change(path, lambda value: edit(value["optimizer_state_dict"]))
    with pytest.raises(InconsistentCheckpoint, match=said):
        zckpt.read(run)


@pytest.mark.parametrize("run", [stage_0], indirect=True)
def test_a_copy_without_a_state(run: Path) -> None:
    def edit(value: Any) -> None:
        del value["optimizer"]["optimizer_state_dict"]["state"][1]["exp_avg"]

    change(run / TAG / "expp_rank_1_mp_rank_00_optim_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match=f"its copy of {GATE} has other states"):
        zckpt.read(run)
