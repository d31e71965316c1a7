"""Finds the group of each parameter, and the step of the optimizer.

No file lists the members of a group. Megatron-Core makes groups by rule: biases and 1-d tensors get
`wd_mult` 0, and experts that are spread over ranks get `is_expert_parallel`. Two options of
Megatron-LM change the rule, and the arguments state them: norms of q and k may be decayed
(--apply-wd-to-qk-layernorm), and embedding and output layer may have another learning rate
(--decoupled-lr). If the rule does not lead to exactly one group for every parameter, the manifest
has no groups; they are kept in its state only.

The step is in the groups (Transformer Engine, Apex, and torch's Adam under the distributed
optimizer), or is one value for all states (torch's Adam without it).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.checkpoint.agreement import Step, agree
from ...core.checkpoint.facts import StepPlace
from ...core.checkpoint.manifest import Sighting
from ...core.grouping import by_key
from ...errors import CorruptCheckpoint
from ...files.torchfile import TorchFile
from ...training import steps
from .common_state import optimizers_of
from .names import EMBEDDING, OUTPUT

FileStep = tuple[str, Any]
"""A file's path, and the step that the file states: a `Scalar`, a Python number, or None."""


def groups_of(common: dict[Any, Any]) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, with the experts' groups last.

    `common` is the state that all ranks share. Raises CorruptCheckpoint if an optimizer's groups
    are not a list of dictionaries.
    """
    states = (state.get("optimizer", state) for state in optimizers_of(common))
    return [group for state in states for group in groups_in(state, "the optimizer", [])]


def groups_in(state: Any, where: str, usual: Any = None) -> list[dict[str, Any]]:
    """The parameter groups in an optimizer's state dict: the list under `param_groups`.

    `usual` is returned if the key is missing. `where` names the state in messages. Raises
    CorruptCheckpoint if the groups are not a list of dictionaries.
    """
    listed = state.get("param_groups", usual) if isinstance(state, dict) else None
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise CorruptCheckpoint(
            "file-damaged", f"{where}: param_groups are not a list of dictionaries"
        )
    return listed


def members(
    groups: list[dict[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    args: Mapping[str, Any],
) -> dict[str, int] | None:
    """Maps each parameter to the number of its group by Megatron-Core's rule (see the module).

    `args` are the run's arguments, which may change the rule. None if not exactly one group fits
    each parameter.
    """
    spread = any(group.get("is_expert_parallel") for group in groups)
    alike = by_key(
        ((bool(group.get("is_expert_parallel")), bool(decay_multiplier(group))), number)
        for number, group in enumerate(groups)
    )
    result = {}
    for name, shape in shapes.items():
        is_expert = spread and ".experts." in name
        fitting = alike.get((is_expert, _is_decayed(name, shape, args)), [])
        if len(fitting) > 1 and args.get("decoupled_lr") is not None:
            decoupled = name in (EMBEDDING, OUTPUT)
            fitting = [each for each in fitting if _is_decoupled(groups[each], args) == decoupled]
        if len(fitting) != 1:
            return None
        result[name] = fitting[0]
    return result


def _is_decayed(name: str, shape: tuple[int, ...], args: Mapping[str, Any]) -> bool:
    of_heads = "q_layernorm." in name or "k_layernorm." in name
    if of_heads and args.get("apply_wd_to_qk_layernorm"):
        return True
    return not (name.endswith(".bias") or len(shape) == 1)


def _is_decoupled(group: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    """Whether a group has the learning rate of --decoupled-lr.

    Since 0.16 only the group's `max_lr` shows it: it equals the value of this option.
    """
    if group.get("is_decoupled_lr"):
        return True
    return group.get("default_config") is False and group.get("max_lr") == args["decoupled_lr"]


def decay_multiplier(group: Mapping[str, Any]) -> Any:
    """The multiplier of a group's weight decay; NeMo writes `pre_` before its key."""
    return group.get("wd_mult", group.get("pre_wd_mult", 1.0))


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group, without the list of its parameters and the step."""
    return {key: value for key, value in group.items() if key not in ("params", "step")}


def agreed_step(folder: str, steps_of_files: Iterable[FileStep], policy: str | None) -> Step | None:
    """The one step that all files state, as Megatron-Core has one step for all parameters.

    None if no file states it. If the files differ, `policy` (the value of --step-policy: "max",
    "min" or a number) chooses a step; otherwise InconsistentCheckpoint is raised. `folder` is the
    checkpoint's directory.
    """
    places = [
        (os.path.relpath(file, folder), step)
        for file, number in steps_of_files
        if (step := steps.step_of(number)) is not None
    ]
    return agree([*dict.fromkeys(places)], policy)


def stated_step(
    common: dict[Any, Any], file: TorchFile, policy: str | None
) -> tuple[Step | None, StepPlace | None, list[Sighting]]:
    """Finds the number of completed updates in the common state.

    Returns the number, the place where files store it, and all places that state a step. If steps
    differ, `policy` (--step-policy: "max", "min" or a number) chooses one; otherwise
    InconsistentCheckpoint is raised.
    """
    in_groups = steps.StatedSteps("group")
    in_states = steps.StatedSteps("state")
    for number, group in enumerate(groups_of(common)):
        in_groups.add(f"group {number}", file.number(group.get("step")))
    for number, state in enumerate(optimizers_of(common)):
        inner = state.get("optimizer", state)
        states = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(states, dict):
            where = f"common_step of optimizer {number}"
            in_states.add(where, file.number(states.get("common_step")))
    believed_steps = steps.believed(in_states, in_groups)
    sightings = [Sighting(where, step, True) for where, step in believed_steps.steps.items()]
    sightings += steps.counter_sightings("common state", common, ["iteration"])
    scheduler = common.get("opt_param_scheduler")
    if isinstance(scheduler, dict):  # it counts samples
        sightings += steps.counter_sightings("opt_param_scheduler", scheduler, ["num_steps"])
    step = agree(list(believed_steps.steps.items()), policy)
    return step, believed_steps.place(), sightings
