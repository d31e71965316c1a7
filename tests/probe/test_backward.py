"""Subscribers see the backward: when, in which order, with whole weights, and what they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zckpt import probe

from ..engines import deepspeed
from ..engines.cases import CASES


class Log(probe.Subscriber):
    def __init__(self) -> None:
        self.said: list[str] = []

    def pre_backward_module(self, place: probe.Place) -> None:
        self.said.append(f"before {place.key}")

    def gradient_tensor(self, place: probe.Place, path: str, gradient: Tensor) -> Tensor:
        self.said.append(f"{place.key}/{path} {list(gradient.shape)}")
        return gradient

    def post_backward_module(self, place: probe.Place) -> None:
        self.said.append(f"after {place.key}")


def test_modules_begin_from_outside_and_end_from_inside() -> None:
    model, log = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh())), Log()
    with probe.subscribe(model, log):
        model(torch.ones(4, 2, requires_grad=True)).sum().backward()
    assert log.said == [
        "before (model)#0",
        "(model)#0/out [4, 3]",
        "before 1#0",
        "1#0/out [4, 3]",
        "before 1.0#0",
        "1.0#0/out [4, 3]",
        "after 1.0#0",
        "after 1#0",
        "before 0#0",
        "0#0/out [4, 3]",
        "after 0#0",
        "after (model)#0",
    ]


def test_inputs_without_gradient_end_with_the_backward() -> None:
    model, log = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), Log()
    with probe.subscribe(model, log):
        model(torch.tensor([1, 2])).sum().backward()
    assert log.said[-2:] == ["after (model)#0", "after 0#0"]
    assert log.said.index("after 1#0") < log.said.index("before 0#0")


def test_every_backward_through_a_graph() -> None:
    model, log = nn.Linear(2, 1), Log()
    with probe.subscribe(model, log):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert log.said == ["before (model)#0", "(model)#0/out [1, 1]", "after (model)#0"] * 2


def test_a_module_that_is_called_twice() -> None:
    model, log = nn.Linear(2, 2), Log()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    with probe.subscribe(Twice(), log) as _:
        pass
    twice = Twice()
    with probe.subscribe(twice, log):
        twice(torch.ones(1, 2)).sum().backward()
    calls = [line for line in log.said if line.startswith("before inner")]
    assert calls == ["before inner#1", "before inner#0"]


def test_gradients_that_they_return_take_the_place() -> None:
    class Double(probe.Subscriber):
        def gradient_tensor(self, place: probe.Place, path: str, gradient: Tensor) -> Tensor:
            return gradient * 2 if place.path == "0" else gradient

    gradients = []
    for subscribers in ((), (Double(),), (Double(), Double())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        with probe.subscribe(model, *subscribers):
            model(torch.ones(1, 2)).sum().backward()
        gradients.append([model[0].weight.grad, model[1].weight.grad])
    for times, (first, second) in zip((1, 2, 4), gradients, strict=True):
        assert torch.equal(first, gradients[0][0] * times)
        assert torch.equal(second, gradients[0][1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_modules_have_one_backward(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x * 1, use_reentrant=use_reentrant)

    model, log = Checkpointed(), Log()
    with probe.subscribe(model, log):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    for line in ("before inner.0#0", "after inner.0#0"):
        assert log.said.count(line) == 1


def test_nothing_stays_when_the_block_ends() -> None:
    model, log, x = nn.Linear(2, 1), Log(), torch.ones(1, 2, requires_grad=True)
    with probe.subscribe(model, log):
        model(x)
    assert not x._backward_hooks
    model(x).sum().backward()
    assert log.said == []


def test_values_and_gradients_do_not_change() -> None:
    def trained(*subscribers: probe.Subscriber) -> list[Any]:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        with probe.subscribe(model, *subscribers):
            model(torch.randn(3, 2, 8)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, seen in zip(trained(), trained(Log()), strict=True):
        assert torch.equal(plain, seen)


# -- engines, which gather weights for the backward


@pytest.mark.engines
@pytest.mark.first
def test_weights_are_whole_in_the_backward_of_zero_3(trained: Any, tmp_path: Path) -> None:
    case = CASES["z3_dp2_fp32"]
    arguments = (case, trained(case) / "run", tmp_path / "seen.pt")
    deepspeed.submit("rank", "backward_zero", 2, arguments, tmp_path, case.extension)
    check_engine(torch.load(tmp_path / "seen.pt"))


@pytest.mark.engines
@pytest.mark.first
def test_weights_are_whole_in_the_backward_of_fsdp2(tmp_path: Path) -> None:
    deepspeed.submit("rank", "backward_fsdp", 2, (2, tmp_path / "seen.pt"), tmp_path)
    check_engine(torch.load(tmp_path / "seen.pt"))


def check_engine(seen: dict[str, Any]) -> None:
    """`seen` has what a subscriber noted, the modules with weights, and losses without it."""
    of_modules = seen["modules"]
    for event in ("before", "after"):
        assert {name for name, when, _ in seen["events"] if when == event} >= set(of_modules)
    not_whole = {(name, when) for name, when, is_whole in seen["events"] if not is_whole}
    assert not_whole <= {("embedding", "after")}  # its input has no gradient: it ends last
    assert seen["losses"] == seen["plain"]
