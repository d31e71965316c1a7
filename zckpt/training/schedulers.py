"""The values that learning rate schedulers store for each group of the optimizer.

A scheduler of torch 2.13 has lists with an item per group. If it contains other schedulers, each of
these has such lists. DeepSpeed's own schedulers (0.19.8, runtime/lr_schedules.py) store only the
number of the last update: they take the rates from the ds_config. Schedulers also store
`initial_lr` in the optimizer's groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

RATES = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Maps each list of rates in a scheduler's state to the hyper-parameter with equal values."""
# without `_schedule_phases` and `_milestones`, which may have this length by chance
OF_GROUPS = frozenset(
    (*RATES, "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
)
"""Keys of a scheduler's lists with one item per group."""
MAXIMA = ("max_lrs",)
"""The key of a CyclicLR's largest rates, which are in no group."""
INSIDE = "_schedulers"
"""The key of the inner schedulers' states in a SequentialLR or a ChainedScheduler."""

Scheduler = Mapping[str, Any]


def for_groups(scheduler: Scheduler, origins: Sequence[int]) -> dict[str, Any]:
    """Returns a learning rate scheduler's state, changed for new parameter groups.

    Its lists have a value for each group. `origins` has, for each new group, the number of the old
    group whose values it gets.
    """

    def moved(key: str, values: list[Any]) -> list[Any]:
        return [values[number] for number in origins] if len(values) > max(origins) else values

    return _with_lists(scheduler, moved)


def with_rates(scheduler: Scheduler, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a scheduler's state in which the learning rates are those of `groups`."""

    def rated(key: str, values: list[Any]) -> list[Any]:
        name = RATES.get(key)
        if name is None or len(values) != len(groups):
            return values
        return [group.get(name, value) for group, value in zip(groups, values, strict=True)]

    return _with_lists(scheduler, rated)


def keeps_rates(scheduler: Scheduler) -> bool:
    """Whether a scheduler's state has the rates from which it computes learning rates.

    If not, the training program sets them. A scheduler with schedulers inside has them only if all
    of these do.
    """
    inside = scheduler.get(INSIDE)
    every = inside if isinstance(inside, list) and inside else [scheduler]
    # ReduceLROnPlateau has only `min_lrs`
    return all(isinstance(e, Mapping) and bool({"base_lrs", "min_lrs"} & e.keys()) for e in every)


def _with_lists(
    scheduler: Scheduler, change: Callable[[str, list[Any]], list[Any]]
) -> dict[str, Any]:
    """Returns a scheduler's state, with changed lists that have a value for each parameter group.

    `change` gets the key and the list, and returns the new list. Schedulers inside this scheduler
    are changed too.
    """
    result = dict(scheduler)
    for key, value in scheduler.items():
        if key in OF_GROUPS and isinstance(value, list) and value:
            result[key] = change(key, value)
        elif key == INSIDE and isinstance(value, list):
            result[key] = [
                _with_lists(each, change) if isinstance(each, Mapping) else each for each in value
            ]
    return result
