"""Several subscribers at once: their order, what they change, and what engines do around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from zckpt import probe
from zckpt.probe.subscribers import mapped, modules


class Log(probe.Subscriber):
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def pre_forward_module(
        self, place: probe.Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.said.append(f"{self.name} before {place.key}")
        return args, kwargs

    def post_forward_module(self, place: probe.Place, args: tuple[Any, ...], output: Any) -> Any:
        self.said.append(f"{self.name} after {place.key}")
        return output


class Scale(probe.Subscriber):
    """Doubles what goes into modules called `path`, and adds one to what comes out."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pre_forward_tensor(self, place: probe.Place, path: str, tensor: Tensor) -> Tensor:
        return tensor * 2 if place.path == self.path else tensor

    def post_forward_tensor(self, place: probe.Place, path: str, tensor: Tensor) -> Tensor:
        return tensor + 1 if place.path == self.path else tensor


def test_they_are_told_as_contexts_nest() -> None:
    said: list[str] = []
    model = nn.Sequential(nn.ReLU())
    a, b, c = (Log(name, said) for name in "abc")
    with probe.subscribe(model, a, b), probe.subscribe(model, c):
        model(torch.ones(1))
    assert said[:6] == [f"{name} before {key}" for key in ("(model)#0", "0#0") for name in "abc"]
    assert said[6:] == [f"{name} after {key}" for key in ("0#0", "(model)#0") for name in "cba"]


def test_every_call_that_ends_is_left() -> None:
    class Leave(probe.Subscriber):
        def leave_module(self, module: nn.Module) -> None:
            left.append(module)

    left: list[nn.Module] = []
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    with probe.subscribe(model, Leave()):
        model(torch.ones(2))
        assert left == [*model, model]
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(3))
    assert left == [*model, model] * 2


def test_values_that_they_return_take_the_place() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with probe.subscribe(model, Scale("1")):
        assert model(torch.tensor([3.0])).tolist() == [7.0]
    assert model(torch.tensor([3.0])).tolist() == [3.0]


def test_keyword_arguments_are_inputs() -> None:
    class Keywords(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return x + y

    with probe.subscribe(model := Keywords(), Scale("(model)")):
        assert model(torch.tensor([1.0]), y=torch.tensor([10.0])).tolist() == [23.0]


def test_they_run_inside_the_hooks_of_an_engine() -> None:
    """The engine's hooks were registered first: all-gather before the forward, release after it."""
    model, said = nn.ReLU(), list[str]()
    model.register_forward_pre_hook(lambda *about: said.append("gather"))
    model.register_forward_hook(lambda *about: said.append("release"))
    with probe.subscribe(model, Log("probe", said)):
        model(torch.ones(1))
    assert said == ["gather", "probe before (model)#0", "probe after (model)#0", "release"]


@dataclass
class Held:
    hidden: Tensor
    count: int


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1),
        [torch.ones(1), 3, None],
        Pair(torch.ones(1), torch.ones(1)),
        {"a": (torch.ones(1),), "b": "text"},
        Held(torch.ones(1), 3),
        BaseModelOutput(last_hidden_state=torch.ones(1)),
        "text",
        None,
    ],
)
def test_containers_stay_what_they_are(value: Any) -> None:
    assert mapped(value, "out", lambda path, tensor: tensor) is value
    paths: list[str] = []

    def change(path: str, tensor: Tensor) -> Tensor:
        paths.append(path)
        return tensor + 1

    changed = mapped(value, "out", change)
    assert type(changed) is type(value)
    values: list[float] = []
    mapped(changed, "out", lambda path, tensor: (values.append(tensor.item()), tensor)[1])
    assert values == [2.0] * len(paths)


def test_paths_see_through_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    plain = ["(model)", "0", "1", "1.0"]
    assert list(modules(model)) == plain
    assert list(modules(nn.DataParallel(model))) == plain
    compiled = torch.compile(model, backend="eager")
    assert list(modules(compiled)) == plain
    assert list(modules(torch.compile(model, backend="eager", fullgraph=True))) == ["(model)"]

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    assert list(modules(Mine())) == ["(model)", "module", "module.0", "module.1", "module.1.0"]


def test_activation_checkpointing_wrappers_have_no_path_of_their_own() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    assert list(modules(model)) == ["(model)", "0", "0.0"]
