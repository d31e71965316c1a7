"""The groups of all ranks in the order of rank 0's.

If layers of experts have several expert-parallel sizes, DeepSpeed (0.19.8, moe/utils.py) goes
through a set of their names, so that every process may list its groups of experts in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Dictionaries = Sequence[dict[str, Any]]
LISTS = (
    "single_partition_of_fp32_groups",
    "group_paddings",
    "partition_count",
    "param_alignment_paddings",
)
"""What a rank's optimizer state lists by group, as far as it is read."""


def in_order_of_first(
    states: Dictionaries, bases: Dictionaries
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Optimizer states and base states of all ranks, with the groups in the order of the first's.

    Ranks whose groups have other names keep their order: the reader refuses these later.
    """
    first = _names(bases[0])
    ordered_states, ordered_bases = [], []
    for state, base in zip(states, bases, strict=True):
        names = _names(base)
        if names != first and sorted(names) == sorted(first):
            order = _order(names, first)
            base = _base(base, order)
            state = {
                **state,
                **{key: [state[key][old] for old in order] for key in LISTS if key in state},
                "base_optimizer_state": base,
            }
        ordered_states.append(state)
        ordered_bases.append(base)
    return ordered_states, ordered_bases


def _names(base: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Name and kind of every group of a rank."""
    groups = base.get("param_groups") or ()
    return [(str(group.get("name")), group.get("moe") is True) for group in groups]


def _order(names: Sequence[tuple[str, bool]], first: Sequence[tuple[str, bool]]) -> list[int]:
    """For each group of the first rank, its place in another; equal names stand in one order."""
    places: dict[tuple[str, bool], list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return [places[name].pop(0) for name in first]


def _base(base: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """The base optimizer's state with its groups, each of one flat tensor, in another order."""
    states, groups = base["state"], base["param_groups"]
    return {
        **base,
        "state": {new: states[old] for new, old in enumerate(order) if old in states},
        "param_groups": [{**groups[old], "params": [new]} for new, old in enumerate(order)],
    }
