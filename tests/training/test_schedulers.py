"""What schedulers of torch keep for groups: what zckpt makes for other groups, they load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from zckpt.training.schedulers import OF_GROUPS, for_groups, keeps_rates, with_rates

Make = Callable[[torch.optim.Optimizer], Any]
MADE: dict[str, Make] = {
    "lambda": lambda own: schedulers.LambdaLR(own, lambda step: 0.5**step),
    "step": lambda own: schedulers.StepLR(own, 1),
    "several steps": lambda own: schedulers.MultiStepLR(own, [2, 4]),
    "plateau": schedulers.ReduceLROnPlateau,
    "one cycle": lambda own: schedulers.OneCycleLR(own, 0.1, 10),
    "cyclic": lambda own: schedulers.CyclicLR(own, 0.01, 0.1, cycle_momentum=False),
    "one after another": lambda own: schedulers.SequentialLR(
        own, [schedulers.LinearLR(own), schedulers.StepLR(own, 2)], [3]
    ),
    "at once": lambda own: schedulers.ChainedScheduler(
        [schedulers.LinearLR(own), schedulers.StepLR(own, 2)]
    ),
}


def made(make: Make, count: int) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(count)]
    return make(torch.optim.SGD(groups, lr=0.2, momentum=0.9))


def lists_in(state: Any) -> dict[str, int]:
    """The lists of a state and their lengths, with those of schedulers inside."""
    found = {key: len(value) for key, value in state.items() if isinstance(value, list)}
    for place, inside in enumerate(state.get("_schedulers", ())):
        found |= {f"{place}.{key}": length for key, length in lists_in(inside).items()}
    return found


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("count", [1, 2])
def test_other_groups(name: str, count: int) -> None:
    """Every list is as long as that of a scheduler which torch makes for so many groups."""
    state = made(MADE[name], count).state_dict()
    wanted = made(MADE[name], 3)
    moved = for_groups(state, [0] * 3)
    assert lists_in(moved) == lists_in(wanted.state_dict())
    assert any(key.rpartition(".")[2] in OF_GROUPS for key in lists_in(moved))
    wanted.load_state_dict(moved)


def test_each_group_has_what_its_origin_had() -> None:
    state = {"base_lrs": [1.0, 2.0], "_last_lr": [0.1, 0.2], "_milestones": [5, 6]}
    assert for_groups(state, [1, 0, 1]) == {
        "base_lrs": [2.0, 1.0, 2.0],
        "_last_lr": [0.2, 0.1, 0.2],
        "_milestones": [5, 6],
    }


def test_rates() -> None:
    inside = {"base_lrs": [1.0, 2.0], "_last_lr": [0.1, 0.2], "last_epoch": 3}
    state = {"_schedulers": [inside, inside], "_last_lr": [0.1, 0.2]}
    groups = [{"lr": 7.0, "initial_lr": 8.0}, {"lr": 9.0}]
    changed = {"base_lrs": [8.0, 2.0], "_last_lr": [7.0, 9.0], "last_epoch": 3}
    assert with_rates(state, groups) == {"_schedulers": [changed] * 2, "_last_lr": [7.0, 9.0]}
    assert keeps_rates(state)
    assert not keeps_rates({"last_batch_iteration": 3})
