"""Experts of two ep ranks, made by hand by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint
from zckpt.formats.deepspeed.gather import partitions

from ....faults import copy_file, swap_files
from .made import (
    DENSE,
    EXPERTS,
    GATE,
    INNER,
    INSIDE,
    MOMENTS,
    TAG,
    change,
    numbers,
    saved,
    stage_0,
    zero_1,
)


@pytest.fixture(params=[zero_1, stage_0], ids=["zero 1", "stage 0"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path / "run", request.param)


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


# -- the files of experts


def file_of(run: Path, number: int, layer: int = 0) -> Path:
    return run / TAG / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def states_counts(run: Path, counts: list[Any]) -> None:
    """The model file says that layers have so many experts."""
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(num_experts=counts))


def test_a_count_that_is_huge(run: Path) -> None:
    """As of a damaged file: not every file that is missing is named."""
    states_counts(run, [1 << 60])
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_0_expert_4_mp_rank_00") as caught:
        zckpt.read(run)
    assert len(caught.value.paths) == 64


@pytest.mark.parametrize("counts", [["4"], [0], [-1], [True]])
def test_counts_that_are_none(counts: list[Any], run: Path) -> None:
    states_counts(run, counts)
    with pytest.raises(CorruptCheckpoint, match=r"the model states list \[.*\] experts by layer"):
        zckpt.read(run)


@pytest.mark.parametrize(("layer", "number"), [(0, 4), (1, 0)])
def test_a_file_too_many(layer: int, number: int, run: Path) -> None:
    copy_file(file_of(run, 3), file_of(run, number, layer))
    with pytest.raises(
        InconsistentCheckpoint, match=f"layer_{layer}_expert_{number}.* one file too"
    ):
        zckpt.read(run)


def test_a_tensor_that_is_no_expert_s(run: Path) -> None:
    change(file_of(run, 2), lambda value: value.update(first=torch.zeros(3)))
    with pytest.raises(CorruptCheckpoint, match="not a file of one expert: it has 'first'"):
        zckpt.read(run)


@pytest.mark.parametrize(
    "edit",
    [
        lambda value: value.pop(f"{INSIDE}2.b"),
        lambda value: value.update({f"{INSIDE}2.b": torch.zeros(3).bfloat16()}),
        lambda value: value.update({f"{INSIDE}2.b": torch.zeros(2)}),
        lambda value: value.clear(),
    ],
    ids=["lost", "another shape", "another type", "empty"],
)
def test_experts_that_are_not_alike(edit: Callable[[Any], object], run: Path) -> None:
    change(file_of(run, 2), edit)
    with pytest.raises(InconsistentCheckpoint, match="holds other tensors than layer_0_expert_0"):
        zckpt.read(run)


def test_experts_behind_no_gate_of_the_module(run: Path) -> None:
    def edit(value: Any) -> None:
        value["module"]["other"] = value["module"].pop(GATE)

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="is not the next layer of experts"):
        zckpt.read(run)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_a_rank_without_an_equal_share(run: Path) -> None:
    """Rank 0 lists experts 0 and 2, but every rank counts its own from 0."""

    def edit(value: Any) -> None:
        shapes = value["param_shapes"][1]
        named = {n.replace(f"{INSIDE}1.", f"{INSIDE}2."): shape for n, shape in shapes.items()}
        value["param_shapes"][1] = named

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="rank 0 has 2 of the 4 experts of moe"):
        zckpt.read(run)


def test_ranks_that_cannot_share_the_experts(run: Path) -> None:
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(dp_world_size=3))
    with pytest.raises((InconsistentCheckpoint, IncompleteCheckpoint), match=r"3 ranks|of 3"):
        zckpt.read(run)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_steps_of_ep_ranks_that_differ(run: Path) -> None:
    def edit(value: Any) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1

    change(run / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.read(run)
    steps = {n: p.step for n, p in zckpt.read(run, step_policy="max").parameters.items()}
    assert {n for n, step in steps.items() if step == 4} == {*EXPERTS}
