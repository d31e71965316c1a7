"""The optimizer of a target without ZeRO (stage 0), which the model file keeps.

Its form is that of the class which the target's engine puts around the optimizer: see whole.py.
With experts there is a file for each ep rank instead: see moe/ep_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from ....core.layout import Shell
from ....core.manifest import slot_key
from ....core.states import among, beside
from ....files.torchshell import Storages, shell
from ...deepspeed_states.hyper import FLAT
from ...deepspeed_states.model_files import model_files
from ...deepspeed_states.optimizer_values import (
    clipping,
    group_step,
    numbers,
    own_statements,
    whole_scaling,
)
from ...deepspeed_states.reports import usual_norm
from ...deepspeed_states.states import FLAT_MASTERS, WHOLE_MASTERS
from ...deepspeed_states.target import DeepSpeedTarget, TargetBuffer
from .whole import FROZEN


def model_shells(target: DeepSpeedTarget) -> Iterator[Shell]:
    """The model file, and with experts the optimizers of all ep ranks."""
    if not target.experts:
        yield from model_files(target, True, optimizer)
        return
    yield from model_files(target, True)
    for rank in range(max(target.experts.sizes)):
        own = target.expert_ranks.in_layers(target.experts, rank)
        named = partial(target.experts.named_in, of_layer=own)
        value = {"optimizer": optimizer(target, storages := Storages(), named)}
        name = f"expp_rank_{rank}_{target.mp_rank}_optim_states.pt"
        yield shell(f"{target.tag}/{name}", value, storages)


def optimizer(
    target: DeepSpeedTarget, storages: Storages, named: Callable[[str], str] = str
) -> dict[str, Any]:
    """The value of `optimizer`; `named` gives the name in the whole model of rank 0's names."""
    groups = _members(target)
    base, frozen = _base(target, groups, storages, named)
    own = {**own_statements(target), **({FROZEN: frozen} if frozen else {})}
    if target.wrapper is None:
        return {**base, **own}
    masters = [
        [_tensor(target, buffer, buffer.master, storages) for buffer in group if buffer]
        for group in groups
    ]
    if target.wrapper != FLAT:
        return {
            **whole_scaling(target),
            "optimizer_state_dict": base,
            WHOLE_MASTERS: masters,
            **own,
        }
    return {
        **(whole_scaling(target) if target.engine.dtype == "F16" else {}),
        "optimizer_state_dict": base,
        FLAT_MASTERS: [flat for (flat,) in masters],
        "clip_grad": usual_norm(target),
        **clipping(target),
        **own,
    }


def _members(target: DeepSpeedTarget) -> list[list[TargetBuffer | None]]:
    """By group, what the optimizer has a number for; None for a frozen parameter."""
    groups: list[list[TargetBuffer | None]] = [[] for _ in target.groups]
    for buffer in target.buffers:
        groups[buffer.group].append(buffer)
    if not target.lists_frozen:
        return groups
    remaining = [iter(group) for group in groups]
    return [
        [None if name is None else next(own) for name in names]
        for names, own in zip(target.listed_names(), remaining, strict=True)
    ]


def _base(
    target: DeepSpeedTarget,
    groups: list[list[TargetBuffer | None]],
    storages: Storages,
    named: Callable[[str], str],
) -> tuple[dict[str, Any], list[int]]:
    """The base optimizer's state_dict, and the numbers of frozen parameters."""
    numbered = count()
    states: dict[Any, Any] = {}
    param_groups, frozen = [], []
    for hyper, group in zip(target.groups, groups, strict=True):
        own = [next(numbered) for _ in group]
        for number, buffer in zip(own, group, strict=True):
            if buffer is None:
                frozen.append(number)
            elif state := _state(target, buffer, storages, named):
                states[number] = state
        stepped = group_step(target, filter(None, group), storages)
        param_groups.append(target.thawed(hyper, storages) | stepped | {"params": own})
    states |= among(target.source)
    return {**beside(target.source), "state": states, "param_groups": param_groups}, frozen


def _state(
    target: DeepSpeedTarget,
    buffer: TargetBuffer,
    storages: Storages,
    named: Callable[[str], str],
) -> dict[str, Any]:
    """The state of one number."""
    return {
        **numbers(target, buffer, storages),
        **{
            slot_key(slot): _tensor(target, buffer, dtype, storages)
            for slot, dtype in buffer.slots.items()
        },
        **target.thawed(target.others.get(named(buffer.names[0])) or {}, storages),
    }


def _tensor(target: DeepSpeedTarget, buffer: TargetBuffer, dtype: str, storages: Storages) -> Any:
    """A tensor like the master: flat, or of the parameter's shape."""
    if target.wrapper == FLAT:
        return storages.tensor(dtype, (buffer.starts[-1],))
    return storages.tensor(dtype, target.trainable[buffer.names[0]].shape)
