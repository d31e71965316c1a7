"""Optimizers: which one kept a state, by the keys of the state and of its groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zckpt.training.optimizers import infer_optimizer

OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "SGD without momentum": lambda weights: torch.optim.SGD(weights, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_are_recognized(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    keys = [key for key, value in state["state"].get(0, {}).items() if value is not None]
    assert infer_optimizer(keys, state["param_groups"][0]) == name.split()[0]


@pytest.mark.parametrize(
    ("keys", "group", "name"),
    [
        (["step", "exp_avg", "exp_avg_sq"], {"decoupled_weight_decay": True}, "AdamW"),
        (["exp_avg"], {}, "Lion"),
        (["momentum_buffer"], {"use_muon": True}, "Muon"),
        (["momentum_buffer"], {"ns_steps": 5, "nesterov": True}, "Muon"),  # torch.optim.Muon
        ([], {}, None),
        (["something"], None, None),
    ],
)
def test_other_optimizers_are_recognized(
    keys: list[str], group: dict[str, Any] | None, name: str | None
) -> None:
    assert infer_optimizer(keys, group) == name
