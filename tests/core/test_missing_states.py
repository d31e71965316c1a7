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
from zckpt.core.missing_states import lacking

from ..conftest import Result

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
    assert lacking(manifest) == ([], [])


def test_small_tensors_may_have_fewer_states(tmp_path: Path) -> None:
    """8-bit optimizers keep quantisation maps, but for tensors that are small."""
    state = state_dicts()
    for name, values in state["optim"]["state"].items():
        if "second" in name:
            values["qmap1"], values["absmax1"] = torch.ones(256), torch.ones(3)
    assert zckpt.read(save(tmp_path / "run", "gathered", state)).warnings == ()


def test_other_states_are_no_loss(tmp_path: Path) -> None:
    """As in classes that train matrices and vectors in different ways."""
    state = state_dicts()
    name = "second.weight"
    state["optim"]["state"][name] = {"step": 2, "momentum_buffer": torch.ones(8, 6)}
    assert zckpt.read(save(tmp_path / "run", "gathered", state)).warnings == ()


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
    assert manifest.warnings == ()
