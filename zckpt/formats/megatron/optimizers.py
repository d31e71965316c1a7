"""The optimizers of the target's run, and their parameter groups.

    --ep 1      {"optimizer": {"param_groups": [...]}, ...}              one optimizer for all
    --ep 2..    {0: {... groups of other parameters}, 1: {... groups of experts}}

Megatron-Core reads the first of these dictionaries if the run's expert-parallel size is 1, else the
second. The tensors are the same in both cases. No file lists the members of a group. A run matches
its groups with saved ones by `wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checkpoint.inert import by_value
from ...core.checkpoint.manifest import Manifest
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
)
from ...training.options import EP, LIKE, Options
from .common_state import READABLE, optimizers_of
from .groups import groups_of, hyper_parameters

SPREAD = "is_expert_parallel"
EXPERTS = ".experts."  # in the names of the parameters of experts
OVERRIDES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Further keys by which Megatron-Core 0.19 matches saved groups with a run's (ParamGroupOverride).

The target needs the values of the run that loads it: `--group-defaults` can set them.
"""
OF_WRAPPER = frozenset(
    (
        *("optimizer", "grad_scaler", "param_state", "param_state_sharding_type"),
        *("fp32_from_fp16_params", "state", "param_groups"),
    )
)
"""Keys of Megatron-Core's optimizers; other keys come from a program."""
Group = dict[str, Any]


def optimizers(source: Manifest, common: Mapping[Any, Any], options: Options) -> dict[Any, Any]:
    """Makes the optimizer state in the target's common state, for the distributed optimizer.

    `common` is the source's common state. Experts that are spread over ranks get a second
    optimizer; without `--ep` there are as many optimizers as in the source.

    Raises MissingData (no groups or no experts), WrongOption (an unknown key in
    `--group-defaults`), InconsistentCheckpoint (several steps, or groups that `--ep 1` cannot join)
    and UnsupportedCheckpoint (the experts' group is unknown).
    """
    step, ep = _step(source), options[EP]
    step_key = {} if step is None else {"step": step}
    groups = [{**hyper_parameters(group), **step_key} for group in groups_of(dict(common))]
    if not groups:
        raise MissingData(
            "groups-missing", "the source has no parameter groups", hint="add --weights-only"
        )
    if options[LIKE] is None:  # with --like, the values are in the groups already
        groups = _with_group_defaults(groups, options)
    spread = [group for group in groups if group.get(SPREAD)]
    dense = [group for group in groups if not group.get(SPREAD)]
    first, *further = optimizers_of(dict(common))
    if ep is not None and ep > 1 and not spread:
        spread = _groups_of_experts(source, groups)
    elif ep == 1 and spread:
        dense, spread = _joined(dense, spread), []
    if not spread:
        return _optimizer(dense, first, first)
    of_experts = further[0] if further else {}
    return {0: _optimizer(dense, first, first), 1: _optimizer(spread, of_experts, first)}


def _optimizer(
    groups: Sequence[Group], saved: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes the state of one optimizer of the target, with the given groups.

    `saved` is this optimizer's state in the source: values that the program added to it are kept.
    The loss scale comes from `first`, the state of the source's first optimizer.
    """
    inner = saved.get("optimizer")
    inner_values = inner if isinstance(inner, Mapping) else {}
    return {
        "optimizer": {"param_groups": list(groups), **extra_states_in(inner_values)},
        **{key: first[key] for key in ("grad_scaler",) if key in first},
        **extra_states_in(saved),
        "param_state_sharding_type": READABLE,
    }


def extra_states_in(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values of an optimizer's state that the user's program added to it."""
    return {key: value for key, value in optimizer.items() if key not in OF_WRAPPER}


def _step(source: Manifest) -> float | int | None:
    """The one step of all parameters; None without a step.

    A step without a fraction is returned as an integer: torch's Adam accepts both. Raises
    InconsistentCheckpoint if parameters have several steps.
    """
    step = source.step
    if step is None and any(parameter.step is not None for parameter in source.parameters.values()):
        raise InconsistentCheckpoint(
            "one-value-needed",
            "Megatron-Core has one step for all parameters, but the source's parameters have "
            "several",
            hint="choose one: --step-policy max|min|N",
        )
    return int(step) if step is not None and step == int(step) else step


def _with_group_defaults(groups: Sequence[Group], options: Options) -> list[Group]:
    """Replaces values in groups by those of `--group-defaults`.

    Raises WrongOption for a key that no group has.
    """
    given = options.defaults(len(groups))
    known_keys = {*OVERRIDES, *(key for group in groups for key in group)} - {"step", SPREAD}
    if extra_states := sorted({key for values in given for key in values} - known_keys):
        raise WrongOption(
            "option-names-nothing",
            f"--group-defaults: no group of the source has {listed(extra_states)}",
            hint=f"the keys of its groups are {listed(sorted(map(str, known_keys)), 99)}",
        )
    return [{**group, **values} for group, values in zip(groups, given, strict=True)]


def _groups_of_experts(source: Manifest, groups: Sequence[Group]) -> list[Group]:
    """Copies the groups that contain experts, for the separate optimizer of the experts.

    Raises MissingData if the source has no experts, and UnsupportedCheckpoint if it is unknown
    which group has them.
    """
    numbers = {
        parameter.group
        for name, parameter in source.parameters.items()
        if EXPERTS in name and parameter.trainable
    }
    if not numbers:
        raise MissingData(
            "option-not-applicable",
            "--ep spreads experts over ranks, but the source has no experts",
            hint="leave --ep out",
        )
    if None in numbers:
        raise UnsupportedCheckpoint(
            "layout-unknown",
            "no file lists the members of the parameter groups, so zckpt does not know in which "
            "group the experts are",
            hint="leave --ep out: the target keeps the source's expert-parallel size",
        )
    return [{**group, SPREAD: True} for number, group in enumerate(groups) if number in numbers]


def _joined(dense: list[Group], spread: Sequence[Group]) -> list[Group]:
    """Joins groups of experts with matching groups of other parameters, for `--ep 1`.

    Groups match if they have equal multipliers. Raises InconsistentCheckpoint if the
    hyper-parameters of matching groups differ.
    """
    joined = list(dense)
    for group in spread:
        plain = {**group, SPREAD: False}
        same = [other for other in joined if _multipliers(other) == _multipliers(plain)]
        if not same:
            joined.append(plain)
        elif not any(by_value(other) == by_value(plain) for other in same):
            own_values, other = by_value(plain), by_value(same[0])
            different = sorted(
                str(k) for k in {*own_values, *other} if own_values.get(k) != other.get(k)
            )
            raise InconsistentCheckpoint(
                "one-value-needed",
                "--ep 1 puts experts and other parameters into one group, but their "
                f"hyper-parameters differ: {', '.join(different)}",
                hint="leave --ep out: the target keeps the source's expert-parallel size",
            )
    return joined


def _multipliers(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of a group by which Megatron-Core 0.16.1 matches it with a saved group.

    NeMo writes `pre_` before two of their keys.
    """
    return (
        group.get("wd_mult", group.get("pre_wd_mult")),
        group.get("lr_mult", group.get("pre_lr_mult")),
        group.get("is_decoupled_lr"),
    )
