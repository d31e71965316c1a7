"""The optimizers of two ep ranks without ZeRO, made by hand: what they hold, and contradictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    ZckptError,
)

from ....conftest import texts
from ....faults import copy_file, swap_files
from .made import DENSE, EXPERTS, GATE, INNER, INSIDE, MOMENTS, TAG, change, numbers, saved, stage_0

LOCAL = [f"{INSIDE}{n}.{inner}" for inner in INNER for n in range(2)]
NAMES = [*DENSE, *LOCAL]
"""Those of rank 0, in the order of its optimizer."""
Edit = Callable[[Any], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", stage_0)


def optimizer_of(run: Path, rank: int) -> Path:
    return run / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def edit_all(run: Path, edit: Edit) -> None:
    """Edits the optimizers of both ranks."""
    for rank in range(2):
        change(optimizer_of(run, rank), lambda value: edit(value["optimizer"]))


def model_of(run: Path) -> Path:
    return run / TAG / "mp_rank_00_model_states.pt"


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer["optimizer_state_dict"]["param_groups"]
    return groups


def assert_whole(run: Path, **options: Any) -> None:
    """Every tensor has the numbers of its own expert."""
    zckpt.convert(run, run.with_name("universal"), **options)
    for name in DENSE | EXPERTS:
        for slot in ("master", *MOMENTS):
            loaded = zckpt.load(run.with_name("universal"), f"{name}/{slot}")
            assert torch.equal(loaded, numbers(name, slot)), (name, slot)


# -- names


def test_names_of_the_user_are_those_of_rank_0(run: Path) -> None:
    assert_whole(run, param_names=NAMES)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (NAMES[:-1], "lists 5 parameters, but the optimizer has 6"),
        ([*NAMES[:3], NAMES[3], NAMES[3], NAMES[5]], "twice"),
        ([*NAMES[:2], *NAMES[:1:-1]], "of shape"),
        ([*NAMES[:2], LOCAL[1], LOCAL[0], *LOCAL[2:]], "rounds to the weight"),
    ],
)
def test_names_that_do_not_fit(names: list[str], said: str, run: Path) -> None:
    with pytest.raises(WrongOption, match=said):
        zckpt.read(run, param_names=names)


def test_experts_are_told_apart_from_equal_dense_weights(run: Path) -> None:
    """Groups of experts have none but experts: equal bytes of a dense weight do not matter."""

    def edit(optimizer: Any) -> None:
        for masters in (optimizer["fp32_groups"][0][:1], optimizer["fp32_groups"][1][2:3]):
            masters[0].data = torch.ones(2)
        for slot in MOMENTS:
            optimizer["optimizer_state_dict"]["state"][0][slot] = torch.zeros(2)

    edit_all(run, edit)
    change(model_of(run), lambda value: value["module"].update(first=torch.ones(2).bfloat16()))
    for number in (0, 2):
        path = run / TAG / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        change(path, lambda value, n=number: value[f"{INSIDE}{n}.b"].fill_(1.0))
    manifest = zckpt.read(run)
    groups = {name: manifest.parameters[name].group for name in ("first", f"{INSIDE}2.b")}
    assert (manifest.notices.inferred, groups) == ((), {"first": 0, f"{INSIDE}2.b": 1})


def test_shapes_alone_show_no_names(run: Path) -> None:
    """Of torch's own optimizer, which lists all weights before all biases: the module does not."""
    edit = "optimizer_state_dict"
    for rank in range(2):
        change(optimizer_of(run, rank), lambda v: v.update(optimizer=v["optimizer"][edit]))
    with pytest.raises(MissingData, match="have equal shape"):
        zckpt.read(run)
    report = zckpt.convert(run, run.with_name("universal"), param_names=NAMES)
    assert (report["inferred"], report["warnings"]) == ([], [])
    for name in EXPERTS:
        loaded = zckpt.load(run.with_name("universal"), f"{name}/exp_avg")
        assert torch.equal(loaded, numbers(name, "exp_avg")), name


def test_the_order_of_the_module_is_inferred(run: Path) -> None:
    """An optimizer that lists parameters as the module does: its names are inferred, and said."""
    order = [0, 1, 2, 4, 3, 5]  # of stage_0's numbers, expert after expert

    def edit(value: Any) -> None:
        base = value["optimizer"]["optimizer_state_dict"]
        states = {new: base["state"][old] for new, old in enumerate(order)}
        value["optimizer"] = {**base, "state": states}

    for rank in range(2):
        change(optimizer_of(run, rank), edit)
    manifest = zckpt.read(run)
    assert {*manifest.notices.inferred} == {*EXPERTS}
    assert any(
        "the names of" in line and "are inferred" in line
        for line in texts(manifest.notices.warnings)
    )
    for name in EXPERTS:
        assert torch.equal(zckpt.load(run, f"{name}/exp_avg"), numbers(name, "exp_avg")), name


def test_swapped_optimizers(run: Path) -> None:
    """A master rounds to the weight of its own expert, which another rank has."""
    swap_files(optimizer_of(run, 0), optimizer_of(run, 1))
    with pytest.raises(MissingData, match="rounds to no weight"):
        zckpt.read(run)


# -- second names


def test_second_names_are_found_by_bytes(run: Path) -> None:
    """The engine saves both names of a tied weight, and states none."""
    change(model_of(run), lambda v: v["module"].update(again=v["module"]["first"].clone()))
    assert zckpt.read(run).parameters["first"].aliases == ("again",)


def test_equal_numbers_are_no_second_name(run: Path) -> None:
    """Two norms of ones may be equal by chance: the other one is a weight that is not trained."""
    edit_all(run, lambda optimizer: optimizer["fp32_groups"][0][0].fill_(1.0))

    def edit(value: Any) -> None:
        ones = {name: torch.ones(3).bfloat16() for name in ("first", "other")}
        value["module"] = {**ones, GATE: value["module"][GATE]}

    change(model_of(run), edit)
    with pytest.raises(MissingData, match="first, other have equal bytes"):
        zckpt.read(run)
    parameters = zckpt.read(run, param_names=NAMES).parameters
    assert (parameters["first"].aliases, parameters["other"].trainable) == ((), False)


# -- the copy in the model file


def test_the_copy_in_the_model_file_is_a_replica(run: Path) -> None:
    own = torch.load(optimizer_of(run, 0), weights_only=False)["optimizer"]
    change(model_of(run), lambda value: value.update(optimizer=own))
    copies = [entry.parameter for entry in zckpt.read(run).replicas]
    assert {*copies} == {*DENSE, *LOCAL}
    assert zckpt.verify(run)["differences"] == []
    change(model_of(run), lambda v: v["optimizer"]["fp32_groups"][1][0].add_(0.001))
    assert {line["tensor"] for line in zckpt.verify(run)["differences"]} == {f"{LOCAL[0]}/master"}


# -- what contradicts itself


def test_a_lost_rank(run: Path) -> None:
    optimizer_of(run, 1).unlink()
    with pytest.raises(IncompleteCheckpoint, match="the optimizers of 1 of 2 ep ranks") as caught:
        zckpt.read(run)
    assert "expected expp_rank_1_mp_rank_00" in str(caught.value.hint)


def test_a_rank_too_many(run: Path) -> None:
    copy_file(optimizer_of(run, 1), optimizer_of(run, 2))
    with pytest.raises(InconsistentCheckpoint, match=r"expp_rank_2.* is one file too many"):
        zckpt.read(run)


def name_group(name: str | None) -> Edit:
    return lambda optimizer: groups_of(optimizer)[1].update(name=name)


def two_sizes(optimizer: Any) -> None:
    groups_of(optimizer).append({"lr": 0.1, "params": [], "moe": True, "name": "ep_size_4"})
    optimizer["fp32_groups"].append([])


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (name_group(None), UnsupportedCheckpoint, "groups are not named ep_size_N"),
        (name_group("ep_size_3"), InconsistentCheckpoint, "by an expert-parallel size of 3"),
        (two_sizes, MissingData, "the expert-parallel sizes 2, 4, and in stage 0 no file says"),
    ],
)
def test_sizes_that_the_groups_do_not_show(
    edit: Edit, error: type[ZckptError], said: str, run: Path
) -> None:
    edit_all(run, edit)
    with pytest.raises(error, match=said):
        zckpt.read(run)


def test_groups_in_another_order(run: Path) -> None:
    """DeepSpeed goes through a set of their names, so that processes may differ."""

    def edit(value: Any) -> None:
        for groups in (groups_of(value["optimizer"]), value["optimizer"]["fp32_groups"]):
            groups.reverse()

    change(optimizer_of(run, 1), edit)
    with pytest.raises(UnsupportedCheckpoint, match="lists the optimizer groups in another order"):
        zckpt.read(run)


def step_of_experts(optimizer: Any) -> None:
    for number in groups_of(optimizer)[1]["params"]:
        optimizer["optimizer_state_dict"]["state"][number]["step"] = 4


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda o: groups_of(o)[1].update(lr=0.5), r"states param_groups\[1\].lr 0.5"),
        (lambda o: o["optimizer_state_dict"]["state"][0].update(step=4), "step differs"),
        (step_of_experts, "step differs"),
        (
            lambda o: o["optimizer_state_dict"]["state"][1].pop("exp_avg"),
            "other optimizer states here",
        ),
        (lambda o: o["fp32_groups"][1].pop(), "should have masters of 2, 4 parameters"),
    ],
    ids=["settings", "dense step", "step of experts", "state", "masters"],
)
def test_a_rank_that_differs(edit: Edit, said: str, run: Path) -> None:
    change(optimizer_of(run, 1), lambda value: edit(value["optimizer"]))
    with pytest.raises(InconsistentCheckpoint, match=said):
        zckpt.read(run)
