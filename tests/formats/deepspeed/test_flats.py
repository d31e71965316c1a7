"""Flat buffers of ranks that were cut by hand, in every way that DeepSpeed saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint

from . import made

GROUPS: made.Groups = (
    {"fc.weight": (3, 5), "one": (1,), "none": (0, 4), "fc.bias": (3,)},
    {"norm": (7,)},
)
Cut = Callable[[made.Groups, int], made.States]


def without_padding(groups: made.Groups, dp: int) -> made.States:
    return made.stage_2(groups, dp, saves_padding=False)


CUTS: list[Cut] = [made.stage_2, without_padding, made.stage_3]


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", CUTS)
def test_what_was_cut_is_whole_again(cut: Cut, dp: int, tmp_path: Path) -> None:
    run = made.saved(tmp_path / "run", cut(GROUPS, dp))
    manifest, expected = zckpt.read(run), made.whole(GROUPS)
    if cut is made.stage_3:  # which saves weights as masters alone
        expected = {name: each for name, each in expected.items() if not name.endswith("/param")}
    assert {*manifest.entries} == {*expected}
    for name, tensor in expected.items():
        assert torch.equal(zckpt.load(run, name), tensor), name
    assert manifest.step == 3


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_of_one_element_is_a_number(cut: Cut, tmp_path: Path) -> None:
    """Also where the partitions of another group have one element as well."""
    groups = ({"weight": (6,)}, {"one": (1,)})
    model, ranks = cut(groups, 1)
    for each in kept(ranks[0]):
        each["d"] = torch.tensor([0.5])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert {entry.slot for entry in manifest.entries.values()} - {"param"} == {*made.SLOTS}
    assert [manifest.parameters[name].scalars["d"].value for name in ("weight", "one")] == [0.5] * 2


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_per_rank(cut: Cut, tmp_path: Path) -> None:
    model, ranks = cut(GROUPS, 2)
    for each in kept(ranks[1]):
        each["step"] += 1
    run = made.saved(tmp_path / "run", (model, ranks))
    with pytest.raises(InconsistentCheckpoint, match="step"):
        zckpt.read(run)
    assert zckpt.read(run, step_policy="max").step == 4
    assert zckpt.read(run, step_policy="min").step == 3


def lost_state(ranks: list[dict[str, Any]]) -> None:
    del kept(ranks[1])[0]["exp_avg"]


def lost_step(ranks: list[dict[str, Any]]) -> None:
    del kept(ranks[1])[0]["step"]


def another_type(ranks: list[dict[str, Any]]) -> None:
    kept(ranks[1])[0]["exp_avg"] = kept(ranks[1])[0]["exp_avg"].double()


def too_long(ranks: list[dict[str, Any]]) -> None:
    masters(ranks[1])[0] = torch.zeros(len(masters(ranks[1])[0]) + 4)


def one_group_fewer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        masters(rank).pop()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lost_state, "only some ranks hold 'exp_avg' of flat group 0"),
        (lost_step, "only some ranks hold a step"),
        (another_type, "ranks keep exp_avg in different types: F32, F64"),
        (too_long, "which does not fit its 4 parameters"),
        (one_group_fewer, "have 1 flat groups, but shapes are listed for 2"),
    ],
)
def test_ranks_that_contradict_each_other(
    cut: Cut, spoil: Callable[[list[dict[str, Any]]], None], message: str, tmp_path: Path
) -> None:
    model, ranks = cut(GROUPS, 2)
    spoil(ranks)
    run = made.saved(tmp_path / "run", (model, ranks))
    with pytest.raises(InconsistentCheckpoint) as caught:
        zckpt.read(run)
    assert message in caught.value.message


def test_optimizer_states_on_nvme(tmp_path: Path) -> None:
    """Stage 3 saves empty buffers where the numbers lie on another disk."""
    model, ranks = made.stage_3(GROUPS, 2)
    for rank in ranks:
        masters(rank)[:] = [torch.zeros(0) for _ in masters(rank)]
    with pytest.raises(UnsupportedCheckpoint, match="NVMe"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_step_that_an_elastic_save_has_cut_off(
    lost: int, is_stored: bool, tmp_path: Path
) -> None:
    """The storage still has it, or another rank; if none has, it is lost."""
    model, ranks = made.stage_2(GROUPS, 2)
    for number, rank in enumerate(ranks):
        state = rank["optimizer_state_dict"]
        states = [*state["base_optimizer_state"]["state"].values()]
        for own in states:
            step = torch.tensor([3.0])
            cut = step[:0] if is_stored else torch.empty(0)
            own["step"] = cut if number < lost else step
        state["base_optimizer_state"] = states
    run = made.saved(tmp_path / "run", (model, ranks))
    if is_stored or lost == 1:
        assert zckpt.read(run).step == 3
    else:
        with pytest.raises(InconsistentCheckpoint, match="the step of flat group 0 is lost"):
            zckpt.read(run)


def kept(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank's optimizer keeps of each flat group."""
    state = rank["optimizer_state_dict"]
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return [*base["state"].values()]


def masters(rank: dict[str, Any]) -> list[torch.Tensor]:
    state = rank["optimizer_state_dict"]
    tensors: list[torch.Tensor] = (
        state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]
    )
    return tensors
