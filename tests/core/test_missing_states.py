"""States of an optimizer that one parameter lacks and its neighbors have; and what is no loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zckpt
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import StepPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.missing_states import missing_states
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.storage.fragments import Runs

from ..conftest import Result, texts

# torch 2.6 has no `no_dist`, which would say that one process is meant
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

Change = Callable[[dict[str, Any]], Any]


class Net(nn.Module):
    """Parameters of one, two and four axes, and one that no loss reaches."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 8, bias=False)
        self.filter = nn.Conv2d(2, 2, 3)
        self.gain = nn.Parameter(torch.ones(()))
        if unused:
            self.unused = nn.Linear(3, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = self.second(self.norm(self.first(inputs))) * self.gain
        return self.filter(rows.view(1, 2, -1, 8)).square().mean()


def state_dicts(
    kind: Callable[..., Any] = torch.optim.AdamW, unused: bool = False
) -> dict[str, Any]:
    """What a program of one process would save, after two updates."""
    torch.manual_seed(2)
    model = Net(unused)
    named = dict(model.named_parameters())
    if kind is getattr(torch.optim, "Muon", None):  # trains matrices alone
        named = {name: each for name, each in named.items() if each.ndim == 2}
    optimizer = kind(named.values())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).backward()
        optimizer.step()
    of = {id(parameter): name for name, parameter in named.items()}
    group = {**optimizer.param_groups[0], "params": list(named)}
    state = {of[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": [group]}}


def save(folder: Path, form: str, state: dict[str, Any]) -> Path:
    if form == "dcp":
        dcp.save(state, checkpoint_id=folder)
    else:
        folder.mkdir()
        torch.save(state["model"], folder / "model.pt")
        torch.save(state["optim"], folder / "optim.pt")
    return folder


KINDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    **{
        name: getattr(torch.optim, name)
        for name in (
            *("AdamW", "NAdam", "RAdam", "Rprop", "ASGD", "Adagrad", "Adadelta", "Adamax"),
            *("Adafactor", "Muon"),
        )
        if hasattr(torch.optim, name)
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["dcp", "gathered"])
def test_whole_states_are_no_loss(kind: str, form: str, tmp_path: Path) -> None:
    """Adafactor factors matrices; a centered RMSprop has more states than another one."""
    manifest = zckpt.read(save(tmp_path / "run", form, state_dicts(KINDS[kind])))
    assert missing_states(manifest) == ([], [])


def test_small_tensors_may_have_fewer_states(tmp_path: Path) -> None:
    """8-bit optimizers keep quantisation maps, but for tensors that are small."""
    state = state_dicts()
    for name, values in state["optim"]["state"].items():
        if "second" in name:
            values["qmap1"], values["absmax1"] = torch.ones(256), torch.ones(3)
    assert zckpt.read(save(tmp_path / "run", "gathered", state)).notices.warnings == ()


def test_other_states_are_no_loss(tmp_path: Path) -> None:
    """As in classes that train matrices and vectors in different ways."""
    state = state_dicts()
    name = "second.weight"
    state["optim"]["state"][name] = {"step": 2, "momentum_buffer": torch.ones(8, 6)}
    assert zckpt.read(save(tmp_path / "run", "gathered", state)).notices.warnings == ()


LOSSES: dict[str, tuple[Change, str, str]] = {
    "a moment": (
        lambda state: state["first.weight"].pop("exp_avg"),
        "first.weight",
        "exp_avg",
    ),
    "two moments": (
        lambda state: state["norm.bias"].pop("exp_avg") + state["norm.bias"].pop("exp_avg_sq"),
        "norm.bias",
        "exp_avg, exp_avg_sq",
    ),
    "the step": (lambda state: state["norm.weight"].pop("step"), "norm.weight", "step"),
    "a moment of the only one with so many axes": (
        lambda state: state["filter.weight"].pop("exp_avg_sq"),
        "filter.weight",
        "exp_avg_sq",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", ["dcp", "gathered"])
def test_a_lost_state_is_named(
    loss: str, form: str, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    change, name, keys = LOSSES[loss]
    state = state_dicts()
    change(state["optim"]["state"])
    run = save(tmp_path / "run", form, state)
    said = f"{name}: the optimizer's {keys} is missing"
    verified = zckpt("verify", run)
    assert verified.code == 3
    assert said in verified.out + verified.err
    for target in ("universal", "dcp", "gathered", "deepspeed"):
        ended = zckpt("convert", run, tmp_path / target, "--to", target)
        if ended.code == 0:
            assert said in ended.err
        else:  # the target must have what is missing
            assert name in ended.err
    # a universal checkpoint keeps the sentence, and reading it again adds no second one
    again = zckpt("inspect", tmp_path / "universal", "--json").document["problems"]
    assert [line for line in again if said in line] == [line for line in again if name in line]
    assert len(again) == 1


def test_a_parameter_that_was_never_updated(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    run = save(tmp_path / "run", "gathered", state_dicts(unused=True))
    ended = zckpt("verify", run)
    assert ended.code == 0
    said = "unused.weight: the optimizer has no state"
    assert said in str(zckpt("verify", run, "--json").document["notes"])
    assert said in zckpt("convert", run, tmp_path / "target").err


def test_a_frozen_parameter_needs_no_state(tmp_path: Path) -> None:
    state = state_dicts(unused=True)
    state["optim"]["param_groups"][0]["params"].remove("unused.weight")
    manifest = zckpt.read(save(tmp_path / "run", "gathered", state))
    assert not manifest.parameters["unused.weight"].trainable
    assert [line.code for line in manifest.notices.warnings] == ["frozen-inferred"]


# -- manifests without files


def kept(*of: str, **changes: Parameter) -> Manifest:
    """Parameters of a group, each as its name, axes and states: `w 2 ab`. The state `s` is the
    step, and `n` a number; all others are tensors of its shape. `changes` are further ones."""
    entries, parameters, numbers = {}, {}, list[StateRow]()
    for name, axes, keys in ((*each.split(), "")[:3] for each in of):
        shape = (2,) * int(axes)
        if "n" in keys:
            numbers.append(StateRow("n", "number", (name,), Scalar(1, "int")))
        step = 1 if "s" in keys else None
        parameters[name] = Parameter(shape, group=0, step=step)
        for key in set(keys) - {"s", "n"}:
            entries[name, key] = Entry(name, key, "F32", shape, Runs([]))
    states = States(tuple(numbers))
    return Manifest("", "x", Run(), entries, {**parameters, **changes}, states=states)


def of_the_group(names: str, keys: str) -> str:
    return (
        f"{names}: the optimizer's {keys} is missing, which other parameters of the same group have"
    )


@pytest.mark.parametrize(
    "of",
    [
        ["v 2 a", "w 2 ab"],
        ["v 2 a", "w 2 ab", "t 1 a", "u 1 a"],  # those with as many axes count
        ["v 2 a", "w 2 ab", "u 2"],  # and those with a state
        ["v 2 a", "w 2 ab", "x 2 ab"],
        ["v 2 a", "t 1 ab", "u 1 ab"],  # the only one of two axes
        ["v 2 a", "w 3 ab"],
    ],
)
def test_what_half_of_the_like_ones_have_or_all_others_is_lost(of: list[str]) -> None:
    assert texts(missing_states(kept(*of))[0]) == [of_the_group("v", "b")]


def test_what_two_lack_and_two_have_is_lost_of_both() -> None:
    lost, _ = missing_states(kept("t 2 a", "u 2 a", "v 2 ab", "w 2 ab"))
    assert texts(lost) == [of_the_group("t, u", "b")]


@pytest.mark.parametrize(
    "of",
    [
        ["u 2 a", "v 2 a", "w 2 ab"],  # most lack it
        ["u 2 a", "v 2 a", "s 1 ab", "t 1 ab"],  # matrices alone lack it
        ["u 2 a", "v 1 a", "s 3 ab", "t 3 ab"],  # another one of other axes lacks it
        ["v 2 ac", "w 2 ab"],  # another one instead
        ["v 2 a", "w 2 an"],  # a number is no tensor
        ["v 2 ns", "w 2 n"],  # an optimizer that keeps no tensors
    ],
)
def test_what_is_not_lost(of: list[str]) -> None:
    assert missing_states(kept(*of)) == ([], [])


@pytest.mark.parametrize(("where", "is_lost"), [(None, True), ("state", True), ("group", False)])
def test_a_step_is_lost_where_each_parameter_has_its_own(where: str | None, is_lost: bool) -> None:
    place = None if where is None else StepPlace(where, "F32")
    manifest = kept("v 2 a", "w 2 as", "x 2 as").replace(step_place=place)
    lost, stateless = missing_states(manifest)
    assert (texts(lost), stateless) == ([of_the_group("v", "step")] if is_lost else [], [])


@pytest.mark.parametrize(
    ("parameter", "is_named"),
    [
        (Parameter((2, 2), group=0), True),
        (Parameter((2, 2), group=0, trainable=False), False),
        (Parameter((0, 2), group=0), False),  # it has no elements
        (Parameter((2, 2), group=1), False),  # nobody in its group has a state
    ],
)
def test_who_needs_a_state(parameter: Parameter, is_named: bool) -> None:
    lost, stateless = missing_states(kept("v 2 a", "w 2 a", x=parameter))
    said = (
        "x: the optimizer has no state, although other parameters of the same group have "
        "one: never updated, or the state is lost"
    )
    assert (lost, texts(stateless)) == ([], [said] if is_named else [])


def test_the_groups_step_is_no_state_of_a_parameter() -> None:
    manifest = kept("v 2 as", "w 2 s").replace(step_place=StepPlace("group", "F32"))
    assert missing_states(manifest)[1][0].message.startswith("w: the optimizer has no state")
