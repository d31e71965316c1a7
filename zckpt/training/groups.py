"""Parameter groups as the target's optimizer has them, where the source's optimizer has others.

    DeepSpeed       drops groups without a trainable parameter (0.19.8)
    the Trainer     makes two, of decayed weights and of the others, and one may be empty (5.23)

A scheduler's state has an item for each group: it changes with them, in the trainer's own file too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.manifest import Manifest, Sibling
from ..core.staging import Shell
from ..errors import ZckptError
from ..files.torchfile import TorchFile
from ..files.torchshell import Storages, shell
from .trainers import SCHEDULERS, TRANSFORMERS, program_of

# names of weights that the Trainer does not decay (transformers 5.23)
NOT_DECAYED = re.compile(r".*(?:bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.))", re.IGNORECASE)


def without_empty_groups(manifest: Manifest) -> tuple[Manifest, list[Shell]]:
    """The groups that DeepSpeed keeps: those with a trainable parameter (0.19.8).

    The Trainer's second group is empty under LoRA: no adapter's weight is left undecayed.
    """
    groups = manifest.groups
    if groups is None:
        return manifest, []
    used = {held.group or 0 for held in manifest.parameters.values() if held.trainable}
    kept = [place for place in range(len(groups)) if place in used]
    if len(kept) in (0, len(groups)):
        return manifest, []
    numbers = {place: number for number, place in enumerate(kept)}
    members = {
        name: numbers[held.group or 0]
        for name, held in manifest.parameters.items()
        if held.trainable
    }
    return _regrouped(manifest, tuple(groups[place] for place in kept), members, kept)


def with_trainers_groups(manifest: Manifest) -> tuple[Manifest, list[Shell]]:
    """The two groups of a Trainer's optimizer, where DeepSpeed had one alone.

    transformers makes one of decayed weights and one of the others (5.23). DeepSpeed drops the
    second where it is empty, and makes one of all where the ds_config has the optimizer.
    """
    groups = manifest.groups
    engine = (manifest.state.get("engine") or {}).get("name")
    of_trainer = program_of(manifest.siblings) == TRANSFORMERS
    if not of_trainer or engine != "deepspeed" or groups is None or len(groups) != 1:
        return manifest, []
    (group,) = groups
    members = {
        name: int(bool(NOT_DECAYED.match(name)))
        for name, held in manifest.parameters.items()
        if held.trainable
    }
    second = group if any(members.values()) else {**group, "weight_decay": 0.0}
    warning = (
        "the source has one parameter group, transformers' Trainer makes two: the second is "
        + ("of biases and norms" if any(members.values()) else "empty")
    )
    manifest = replace(manifest, warnings=(*manifest.warnings, warning))
    return _regrouped(manifest, (group, second), members, [0, 0])


def _regrouped(
    manifest: Manifest,
    groups: tuple[dict[str, Any], ...],
    members: dict[str, int],
    origins: Sequence[int],
) -> tuple[Manifest, list[Shell]]:
    """The manifest with other groups, made of those at `origins`, and schedulers that fit them."""
    count = len(manifest.groups or ())
    state = dict(manifest.state)
    if isinstance(state.get("lr_scheduler"), dict):
        state["lr_scheduler"] = _rescheduled(state["lr_scheduler"], count, origins)
    shells = []
    for item in manifest.siblings:
        if item.name in SCHEDULERS and (made := _scheduler_of(item)) is not None:
            value = _rescheduled(made, count, origins)
            shells.append(shell(item.name, value, Storages()))
    parameters = {
        name: replace(held, group=members.get(name, held.group))
        for name, held in manifest.parameters.items()
    }
    order = sorted(parameters, key=lambda name: members.get(name, len(groups)))
    return replace(
        manifest,
        groups=groups,
        parameters={name: parameters[name] for name in order},
        state=state,
    ), shells


def _rescheduled(scheduler: dict[str, Any], count: int, origins: Sequence[int]) -> dict[str, Any]:
    """A torch scheduler's state for other groups: its lists have an item per group."""
    return {
        key: [value[place] for place in origins]
        if isinstance(value, list) and len(value) == count
        else value
        for key, value in scheduler.items()
    }


def _scheduler_of(item: Sibling) -> dict[str, Any] | None:
    """The state in a trainer's scheduler file; None where it is more than plain values."""
    try:
        value = TorchFile(item.path).value
    except (ZckptError, OSError):
        return None
    plain = isinstance(value, dict) and all(map(_is_plain, value.values()))
    return value if plain else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
