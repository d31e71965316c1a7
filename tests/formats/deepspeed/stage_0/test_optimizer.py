"""The whole optimizer of a model file, made by hand: what is read of it, refused, and written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of
from zckpt.core.checkpoint.inert import Scalar
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    ZckptError,
)

from ...equality import same_bits
from .. import made

GROUPS: list[dict[str, tuple[int, ...]]] = [{"a": (2, 3), "b": (3,)}, {"c": (4,), "d": (5, 1)}]
TORCH, WHOLE, FLAT = None, "fp32_groups", "fp32_groups_flat"
Edit = Callable[[dict[str, Any]], object]


def unchanged(model: dict[str, Any]) -> None:
    pass


def saved(tmp_path: Path, masters: str | None, edit: Edit = unchanged) -> Path:
    """A run whose model file an `edit` has changed."""
    model, _ = made.stage_0(GROUPS, masters)
    edit(model)
    return made.saved(tmp_path / "run", (model, []))


def base_of(model: dict[str, Any]) -> dict[str, Any]:
    """The state dict of torch's optimizer."""
    base: dict[str, Any] = model["optimizer"].get("optimizer_state_dict", model["optimizer"])
    return base


def assert_same_tensors(run: Path, other: Path) -> None:
    """Beside settings, which a target completes."""
    report = zckpt.verify(run, other)
    assert report["tensors"]
    assert (report["problems"], report["differences"]) == ([], [])


@pytest.mark.parametrize("masters", [TORCH, WHOLE, FLAT])
def test_each_form_is_read_bit_for_bit(masters: str | None, tmp_path: Path) -> None:
    run, expected = saved(tmp_path, masters), made.whole(GROUPS)
    manifest = zckpt.read(run)
    assert {name: about.group for name, about in manifest.parameters.items()} == {
        name: number for number, group in enumerate(GROUPS) for name in group
    }
    assert (manifest.step, manifest.notices.inferred) == (3, ())
    if masters is None:
        weights = {name for name in expected if name.endswith("/param")}
        expected |= {name: expected[name.replace("param", "master")] for name in weights}
        expected = {name: each for name, each in expected.items() if "/master" not in name}
    assert {*map(name_of, manifest.entries)} == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(zckpt.load(run, name), tensor), name


@pytest.mark.parametrize("masters", [TORCH, WHOLE, FLAT])
def test_what_is_written_is_read_again(masters: str | None, tmp_path: Path) -> None:
    run = saved(tmp_path, masters)
    zckpt.reshard(run, tmp_path / "other", dp=2)
    (path,) = (tmp_path / "other").glob("*/mp_rank_00_model_states.pt")
    before, (after, _) = torch.load(path, weights_only=False), made.stage_0(GROUPS, masters)
    groups = [own["params"] for own in base_of(before)["param_groups"]]
    assert groups == [own["params"] for own in base_of(after)["param_groups"]]
    assert (masters is None) or masters in before["optimizer"]
    assert_same_tensors(run, tmp_path / "other")


# -- masters that do not fit


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
def test_a_lost_group_of_masters(masters: str, tmp_path: Path) -> None:
    run = saved(tmp_path, masters, lambda model: model["optimizer"][masters].pop())
    with pytest.raises(InconsistentCheckpoint, match="should have masters of"):
        zckpt.read(run)


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
def test_a_lost_number(masters: str, tmp_path: Path) -> None:
    run = saved(tmp_path, masters, lambda m: base_of(m)["param_groups"][0]["params"].pop())
    with pytest.raises(InconsistentCheckpoint, match="should have masters of"):
        zckpt.read(run)


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
def test_masters_that_are_no_tensors(masters: str, tmp_path: Path) -> None:
    def edit(model: dict[str, Any]) -> None:
        model["optimizer"][masters][0] = ["lost", "lost"] if masters == WHOLE else "lost"

    with pytest.raises(CorruptCheckpoint, match="not a list of tensors"):
        zckpt.read(saved(tmp_path, masters, edit))


@pytest.mark.parametrize(
    ("masters", "said"),
    [(WHOLE, r"b of shape \[4\], but it has \[3\]"), (FLAT, "10 elements, but it has 9")],
)
def test_stated_shapes_that_masters_do_not_have(masters: str, said: str, tmp_path: Path) -> None:
    """Files of zckpt's state names and shapes, so that no bytes are compared."""

    def edit(model: dict[str, Any]) -> None:
        model["param_shapes"] = [{**group} for group in GROUPS]
        model["param_shapes"][0]["b"] = (4,)
        model["module"]["b"] = torch.zeros(4).bfloat16()

    with pytest.raises(InconsistentCheckpoint, match=said):
        zckpt.read(saved(tmp_path, masters, edit))


def test_a_stated_name_without_a_weight(tmp_path: Path) -> None:
    def edit(model: dict[str, Any]) -> None:
        model["param_shapes"] = [{"x": (2, 3), "b": (3,)}, GROUPS[1]]

    with pytest.raises(
        InconsistentCheckpoint, match="the optimizer has x, but the module does not"
    ):
        zckpt.read(saved(tmp_path, WHOLE, edit))


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (lambda m: m.update(optimizer=None), IncompleteCheckpoint, "no optimizer files"),
        (lambda m: m["optimizer"].pop("optimizer_state_dict"), CorruptCheckpoint, "no state of a"),
        (
            lambda m: m.update(num_experts=[2]),
            IncompleteCheckpoint,
            "optimizer files of all ep ranks are missing",
        ),
    ],
)
def test_files_that_lack_an_optimizer(
    edit: Edit, error: type[ZckptError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        zckpt.read(saved(tmp_path, WHOLE, edit))


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
def test_names_that_torch_keeps(names: list[str], tmp_path: Path) -> None:
    """Since 2.6 an optimizer may state them, so that no shape has to show them."""
    model, _ = made.stage_0([{"a": (3,), "b": (3,)}], TORCH)
    base_of(model)["param_groups"][0]["param_names"] = names
    run = made.saved(tmp_path / "run", (model, []))
    assert zckpt.read(run).notices.inferred == ()
    for number, name in enumerate(names):
        moment = base_of(model)["state"][number]["exp_avg"]
        assert torch.equal(zckpt.load(run, f"{name}/exp_avg"), moment)


def test_names_that_torch_keeps_of_another_model(tmp_path: Path) -> None:
    def edit(model: dict[str, Any]) -> None:
        for group, names in zip(base_of(model)["param_groups"], ("ax", "cd"), strict=True):
            group["param_names"] = [*names]

    with pytest.raises(
        InconsistentCheckpoint, match="the optimizer has x, but the module does not"
    ):
        zckpt.read(saved(tmp_path, TORCH, edit))


# -- states


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
def test_states_of_other_shapes(masters: str, tmp_path: Path) -> None:
    """One number is a number, beside any shape; what has none of both shapes is kept as it is."""

    def edit(model: dict[str, Any]) -> None:
        for number, state in base_of(model)["state"].items():
            state |= {"product": torch.tensor([0.5 + number]), "rows": torch.arange(7) + number}

    run = saved(tmp_path, masters, edit)
    manifest = zckpt.read(run)
    numbers = {name: own["product"] for name, own in manifest.states.scalars.items()}
    first = [*GROUPS[0]] if masters == FLAT else ["a"]
    assert all(isinstance(number, Scalar) for number in numbers.values())
    assert {name for name, number in numbers.items() if number.value == 0.5} == {*first}
    other = manifest.states.other_values
    assert other.keys() == ({"a", "c"} if masters == FLAT else {*"abcd"})
    assert {key for states in other.values() for key in states} == {"rows"}
    if masters == WHOLE:  # a flat group has no place for rows
        zckpt.reshard(run, tmp_path / "other", dp=2)
        assert_same_tensors(run, tmp_path / "other")


def test_one_element_is_a_slot_where_all_parameters_have_one(tmp_path: Path) -> None:
    """A state of one element is a number only if another parameter shows that it is one."""
    groups: list[dict[str, tuple[int, ...]]] = [{"a": (1,), "b": (1,)}]
    model, _ = made.stage_0(groups, WHOLE)
    for state in base_of(model)["state"].values():
        state["average"] = torch.tensor([0.5])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, [])))
    assert ("a", "average") in manifest.entries
    assert "average" not in manifest.states.scalars.get("a", {})


# -- parameters without a state


def test_frozen_parameters_of_torch_keep_their_numbers(tmp_path: Path) -> None:
    """One without a state is frozen, as the engine gives all others a gradient."""
    run = saved(tmp_path, TORCH, lambda model: base_of(model)["state"].pop(0))
    manifest = zckpt.read(run)
    assert [n for n, about in manifest.parameters.items() if not about.trainable] == ["a"]
    zckpt.reshard(run, tmp_path / "other", dp=2)
    (path,) = (tmp_path / "other").glob("*/mp_rank_00_model_states.pt")
    optimizer = torch.load(path, weights_only=False)["optimizer"]
    assert [own["params"] for own in optimizer["param_groups"]] == [[0, 1], [2, 3]]
    assert ([*optimizer["state"]], optimizer["zckpt_frozen"]) == ([1, 2, 3], [0])
    again = zckpt.read(tmp_path / "other")
    assert [n for n, about in again.parameters.items() if not about.trainable] == ["a"]
    assert_same_tensors(run, tmp_path / "other")


def test_weights_alone_need_no_names(tmp_path: Path) -> None:
    """Two weights of one shape in a reversed order: nothing shows which number is which."""
    groups: list[dict[str, tuple[int, ...]]] = [{"a": (2, 3), "b": (3,), "c": (3,)}]
    model, _ = made.stage_0(groups, TORCH)
    model["module"] = {name: model["module"][name] for name in "cba"}
    run = made.saved(tmp_path / "run", (model, []))
    with pytest.raises(MissingData, match="b have equal shape"):
        zckpt.read(run)
    zckpt.convert(run, tmp_path / "weights", weights_only=True)
    for name in "abc":
        weight = zckpt.load(tmp_path / "weights", f"{name}/param")
        assert torch.equal(weight, model["module"][name])


def test_masters_are_weights_and_need_names(tmp_path: Path) -> None:
    run = saved(tmp_path, WHOLE, lambda model: model["module"]["b"].add_(1))
    with pytest.raises(MissingData, match="rounds to no weight"):
        zckpt.convert(run, tmp_path / "weights", weights_only=True)
