"""ZeroRedundancyOptimizer's partition: against torch's own, and undone."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer

from zckpt import errors
from zckpt.formats.gathered.zero_redundancy import dealt, partition

GROUPS = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4)


def torchs(groups: list[list[int]], world: int) -> list[list[list[int]]]:
    """What torch 2.13 makes of them, by place in the group."""
    tensors = [[torch.empty(numel) for numel in group] for group in groups]
    places = {id(t): place for group in tensors for place, t in enumerate(group)}
    optimizer = SimpleNamespace(
        world_size=world,
        param_groups=[{"params": group} for group in tensors],
        _partition_parameters_cache=[],
    )
    for name in ("_get_min_index", "_partition_param_group"):
        method = getattr(ZeroRedundancyOptimizer, name)
        setattr(optimizer, name, method.__get__(optimizer))
    parts = ZeroRedundancyOptimizer._partition_parameters(optimizer)
    return [[[places[id(t)] for t in group["params"]] for group in rank] for rank in parts]


@given(GROUPS, st.integers(1, 5))
def test_the_rule_is_torchs(groups: list[list[int]], world: int) -> None:
    assert partition(groups, world) == torchs(groups, world)


@given(GROUPS, st.integers(1, 5))
def test_dealing_again_gives_the_order_back(groups: list[list[int]], world: int) -> None:
    parts = partition(groups, world)
    numels = [
        [[groups[group][place] for place in part] for group, part in enumerate(rank)]
        for rank in parts
    ]
    names = [f"rank{rank}.pt" for rank in range(world)]
    unknown = [[[None for _ in own] for own in rank] for rank in numels]
    assert dealt(groups, numels, names, "") == dealt(groups, unknown, names, "")
    largest = [sorted(group, reverse=True) for group in groups]
    for group, order in enumerate(dealt(largest, numels, names, "")):
        places = [parts[rank][group][position] for rank, position in order]
        assert places == sorted(range(len(groups[group])), key=lambda p: -groups[group][p])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[[4, 1]], [[3, 2]]], None),
        ([[[5]], [[]]], None),
        ([[[1], [7]], [[], [7, 7]]], None),
        (
            [[[1], [7, 7]], [[], [7]]],
            "rank0.pt has 2 parameters of group 1, .* rank 0 of 2 should have 1",
        ),
        ([[[4, 1]], [[3]]], "rank0.pt has 2 parameters of group 0, .* should have 1$"),
        ([[[]], [[5]]], "rank0.pt has 0 parameters of group 0, .* should have 1$"),
        ([[[1]], [[5]]], "rank0.pt has 1 parameter of group 0, .* should have 1 of other sizes"),
    ],
)
def test_what_the_rule_never_makes_is_refused(ranks: list[list[list[int]]], said: str) -> None:
    groups = [sorted(chain(*own), reverse=True) for own in zip(*ranks, strict=True)]
    names = [f"rank{rank}.pt" for rank in range(len(ranks))]
    if said is None:
        dealt(groups, ranks, names, "")
        return
    with pytest.raises(errors.InconsistentCheckpoint, match=said):
        dealt(groups, ranks, names, "")
