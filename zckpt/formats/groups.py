"""Adapts a source's parameter groups to the groups that the target's optimizer expects.

    DeepSpeed       drops groups without a trainable parameter (0.19.8)
    the Trainer     makes two: with weight decay, and without; one may be empty (5.23)

A scheduler's state has one item per group, so it changes with the groups. This includes the
trainer's own scheduler file, and Lightning's list.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint import optimizer_states, states
from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import WrongOption, listed, warning
from ..training import schedulers
from ..training.options import BUFFERS, FROZEN, OPTIMIZER, Options
from ..training.steps import torch_place
from ..training.trainers import TRANSFORMERS, program_of
from .format import Beginning
from .schedulers import with_programs, with_schedulers

# names that the Trainer excludes from weight decay (transformers 5.23)
NOT_DECAYED = re.compile(r".*(?:bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.))", re.IGNORECASE)


def of_trained(manifest: Manifest, options: Options) -> Manifest:
    """Reduces the parameter groups to the parameters that DeepSpeed trains.

    Parameters that match --frozen or --buffers leave the groups; groups without a trainable
    parameter are dropped. Raises WrongOption for a pattern that matches nothing, and for a --frozen
    pattern that matches a trained parameter.
    """
    if manifest.ranks:  # the run has dropped empty groups
        return manifest
    manifest = with_programs(manifest)  # DeepSpeed keeps a scheduler's state in `lr_scheduler`
    manifest = _with_buffers(manifest, options[BUFFERS])
    if not options[FROZEN]:
        return without_empty_groups(manifest)
    untouched = states.untouched(manifest)
    hint = f"--frozen is for parameters that were never updated: {listed(untouched, 4) or 'none'}"
    frozen: set[str] = set()
    for pattern in options[FROZEN]:
        names = fnmatch.filter(manifest.parameters, pattern)
        if trained := sorted({*names} - {*untouched}):
            raise WrongOption(
                "option-invalid", f"--frozen {pattern} names {trained[0]}, which was trained", hint
            )
        if not names:
            raise WrongOption(
                "option-names-nothing",
                f"--frozen {pattern} names no parameter of {manifest.root}",
                hint,
            )
        frozen.update(names)
    regrouped = without_empty_groups(states.with_frozen(manifest, frozen))
    if len(regrouped.groups or ()) < len(manifest.groups or ()):
        message = (
            "a group has only frozen parameters: give DeepSpeed an optimizer without that group"
        )
        without_group = warning("program-must-set", message, subject="param_groups")
        regrouped = regrouped.replace(warnings=(*regrouped.notices.warnings, without_group))
    return regrouped


def _with_buffers(manifest: Manifest, patterns: Sequence[str]) -> Manifest:
    """Turns frozen parameters that match `patterns` into buffers.

    Raises WrongOption for a pattern that matches no frozen parameter and no buffer.
    """
    frozen = [name for name, each in manifest.parameters.items() if not each.trainable]
    buffers: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(frozen, pattern)
        if not names and not fnmatch.filter(manifest.buffers, pattern):
            raise WrongOption(
                "option-names-nothing",
                f"--buffers {pattern} names no tensor of {manifest.root} that may be a buffer",
                hint=f"these may be: {listed(frozen, 4) or 'none here'}",
            )
        buffers.update(names)
    parameters = {name: each for name, each in manifest.parameters.items() if name not in buffers}
    order = (*manifest.buffers, *(name for name in frozen if name in buffers))
    return replace(manifest, parameters=parameters, buffers=order)


def without_empty_groups(manifest: Manifest) -> Manifest:
    """Removes groups without a trainable parameter, as DeepSpeed does (0.19.8).

    With LoRA, for example, the Trainer's second group (without weight decay) is empty, because all
    of an adapter's weights are in the first.
    """
    groups = manifest.groups
    if groups is None:
        return manifest
    parameters = manifest.parameters.items()
    used = {parameter.group or 0 for _, parameter in parameters if parameter.trainable}
    kept = [number for number in range(len(groups)) if number in used]
    if len(kept) in (0, len(groups)):
        return manifest
    renumbered = {old: new for new, old in enumerate(kept)}
    members = {
        name: renumbered[parameter.group or 0]
        for name, parameter in parameters
        if parameter.trainable
    }
    return regrouped(manifest, tuple(groups[number] for number in kept), members, kept)


def with_trainers_groups(manifest: Manifest, _options: Options) -> Manifest:
    """Restores the two groups of a Trainer's optimizer, if DeepSpeed stored only one.

    transformers makes one group of weights with weight decay, and one of all other weights (5.23).
    DeepSpeed drops the second group if it is empty. If the ds_config defines the optimizer, all
    weights are in one group.
    """
    groups = manifest.groups
    of_trainer = program_of(manifest.files.siblings) == TRANSFORMERS
    drops_empty = isinstance(manifest.run.engine, FlatBufferEngine)
    if not of_trainer or not drops_empty or groups is None or len(groups) != 1:
        return manifest
    (group,) = groups
    members = {
        name: int(bool(NOT_DECAYED.match(name)))
        for name, parameter in manifest.parameters.items()
        if parameter.trainable
    }
    second = group if any(members.values()) else {**group, "weight_decay": 0.0}
    message = "the source has one parameter group, but the Trainer makes two: the second " + (
        "has biases and norms" if any(members.values()) else "is empty"
    )
    second_group = warning("value-assumed", message, subject="param_groups")
    manifest = manifest.replace(warnings=(*manifest.notices.warnings, second_group))
    return regrouped(manifest, (group, second), members, [0, 0])


def in_torch(manifest: Manifest, options: Options) -> Beginning:
    """Chooses the initial optimizer state of parameters that were never updated.

    This is for targets that a torch program loads. The result is "group" (zeros at the group's
    step) if the optimizer keeps one step per group, as Apex's FusedAdam does. Otherwise it is
    "zeros" (zeros at step 0).
    """
    # torch's state dict helpers require a state of each parameter (2.13)
    return "group" if torch_place(manifest, options[OPTIMIZER]).where == "group" else "zeros"


def regrouped(
    manifest: Manifest,
    groups: tuple[dict[str, Any], ...],
    members: Mapping[str, int],
    origins: Sequence[int],
) -> Manifest:
    """Replaces a manifest's groups; `members` maps each parameter to the number of its new group.

    `origins[i]` is the number of the old group from which new group i was copied. Two other things
    are copied with a group: Prodigy's estimate of the learning rate, and items of schedulers'
    lists.
    """
    parameters = {
        name: replace(parameter, group=members.get(name, parameter.group))
        for name, parameter in manifest.parameters.items()
    }
    estimates = manifest.states.by_rank(len(manifest.groups or ()))
    states = manifest.states.without_form("estimate")
    if estimates:
        states += optimizer_states.estimates([estimates[number] for number in origins])
    order = sorted(parameters, key=lambda name: members.get(name, len(groups)))
    rescheduled, _ = with_schedulers(manifest, lambda own: schedulers.for_groups(own, origins))
    return replace(
        rescheduled,
        groups=groups,
        parameters={name: parameters[name] for name in order},
        states=states,
    )
