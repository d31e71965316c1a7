"""A small program of plain torch: builds, trains, saves and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..equality import same_bits


class Net(nn.Module):
    """Two layers with a normalisation, whose statistics have the shape of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)
        self.third = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.third(self.second(self.norm(self.first(x))))
        return output


Pair = tuple[nn.Module, torch.optim.Optimizer]


def build(seed: int = 0, kind: Any = torch.optim.AdamW, named: bool = False) -> Pair:
    """With names in the optimizer's groups if it is `named`, as torch >= 2.6 takes them."""
    torch.manual_seed(seed)
    model = Net()
    each = [(pair if named else pair[1], pair[1].ndim) for pair in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, ndim in each if ndim > 1], "weight_decay": 0.1},
        {"params": [p for p, ndim in each if ndim < 2], "lr": 0.02},
    ]
    return model, kind(groups, lr=0.01)


def names_by_group(pair: Pair) -> list[str]:
    named = list(pair[0].named_parameters())
    return [name for name, p in named if p.ndim > 1] + [name for name, p in named if p.ndim < 2]


def train(pair: Pair, steps: int, seed: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        loss = pair[0](torch.randn(8, 7)).square().mean()
        pair[1].zero_grad()
        loss.backward()
        pair[1].step()
        losses.append(loss.item())
    return losses


def trained_pair(kind: Any = torch.optim.AdamW, named: bool = False) -> Pair:
    pair = build(kind=kind, named=named)
    train(pair, 3)
    return pair


def resumed_pair(folder: Path, kind: Any = torch.optim.AdamW) -> Pair:
    """A fresh program, which loads with torch's defaults."""
    pair = build(seed=7, kind=kind)
    pair[0].load_state_dict(torch.load(folder / "model.pt"))
    pair[1].load_state_dict(torch.load(folder / "optim.pt"))
    return pair


def assert_same_run(a: Pair, b: Pair) -> None:
    for (name, one), other in zip(
        a[0].state_dict().items(), b[0].state_dict().values(), strict=True
    ):
        assert same_bits(one, other), name
    ours, theirs = a[1].state_dict(), b[1].state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        assert list(state) == list(theirs["state"][number])
        for key, value in state.items():
            other = theirs["state"][number][key]
            assert same_bits(value, other) if isinstance(value, Tensor) else value == other
    for one, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in one.items() if k != "param_names"} == {
            k: v for k, v in other.items() if k != "param_names"
        }
    assert train(a, 3, seed=9) == train(b, 3, seed=9)


def save(folder: Path, pair: Pair, model: str = "model.pt", optim: str = "optim.pt") -> Path:
    folder.mkdir(exist_ok=True)
    if model.endswith(".safetensors"):
        save_file(pair[0].state_dict(), folder / model)
    else:
        torch.save(pair[0].state_dict(), folder / model)
    torch.save(pair[1].state_dict(), folder / optim)
    return folder
