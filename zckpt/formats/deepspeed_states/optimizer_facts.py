"""What do an engine's files say about its optimizer: its name, its step, the counters beside it?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ...core.annotations import Any
from ...core.facts import StepPlace
from ...core.manifest import Parameter, Sighting
from ...core.values import replace
from ...training import steps
from ...training.optimizers import name_of_groups
from .flats import FlatBuffer
from .states import EngineStates, nested, version_numbers

STEPS_OF = "zckpt_optimizer"
"""Beside the optimizer's state: the class that `--optimizer` named, whose place steps have."""


def stated_optimizer(
    ranks: EngineStates,
    buffers: Sequence[FlatBuffer],
    groups: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    """The optimizer's name: as the ds_config states it, else by the keys of its states."""
    stated = nested(ranks.config, "optimizer", "type")
    if isinstance(stated, str):
        return stated
    states: dict[int, set[str]] = {group: set() for group, _ in enumerate(groups or ())}
    for buffer in buffers:
        slots = {slot.name for slot in buffer.slots} - {"master"}
        states.setdefault(buffer.group, set()).update(slots, buffer.scalars)
        for name in buffer.shapes:
            states[buffer.group].update((ranks.first.get("other") or {}).get(name, ()))
    return name_of_groups([*states.values()], groups)


def step_place(ranks: EngineStates, buffers: Sequence[FlatBuffer]) -> StepPlace | None:
    """Where the base optimizer keeps its step, and what its groups state beside that."""
    place = next((buffer.step_place for buffer in buffers if buffer.step_place), None)
    if place is None:
        return None
    place = replace(place, optimizer=_named_optimizer(ranks, place))
    if place.where == "group":
        return replace(place, times=_times(ranks, buffers)) if ranks.partitioned else place
    stale = ranks.groups(0)[0].get("step", ranks.first.get("base_optimizer_state_step"))
    return replace(place, stale=stale)


def _times(ranks: EngineStates, buffers: Sequence[FlatBuffer]) -> int:
    """How often stage 3 counts one update: it calls the optimizer for each sub-group (0.19.8).

    The other groups are empty meanwhile. The FusedAdams of Apex and TransformerEngine, whose groups
    have `bias_correction`, skip empty groups.
    """
    if not all("bias_correction" in group for group in ranks.groups(0)):
        return len(buffers)
    groups = [buffer.group for buffer in buffers]
    return max(map(groups.count, groups))


def _named_optimizer(ranks: EngineStates, place: StepPlace) -> str | None:
    """The optimizer that was named and looks at this place: by `--optimizer`, or by the ds_config.

    What the ds_config names keeps no step in groups (from 0.6.5 on): then the program has made its
    own optimizer, and the engine has ignored the ds_config's.
    """
    if named := ranks.optimizers[0].value.get(STEPS_OF) or ranks.first.get(STEPS_OF):
        return str(named)
    stated = nested(ranks.config, "optimizer", "type")
    is_old = ranks.version is not None and version_numbers(ranks.version) < (0, 6, 5)
    return stated if isinstance(stated, str) and (is_old or place.where == "state") else None


def counters(ranks: EngineStates) -> list[Sighting]:
    """Engine counters and schedulers: never true (skipped fp16 steps, warm starts)."""
    sightings = steps.counter_sightings("engine", ranks.model, ("global_steps", "skipped_steps"))
    scheduler = ranks.model.get("lr_scheduler")
    if isinstance(scheduler, dict):
        keys = (*steps.SCHEDULER_COUNTERS, "last_batch_iteration")
        sightings += steps.counter_sightings("lr_scheduler", scheduler, keys)
    return sightings


def ahead_of_counters(
    ranks: EngineStates, parameters: Mapping[str, Parameter], place: StepPlace | None
) -> list[str]:
    """A warning if the optimizer has counted more updates than the engine.

    The engine may be ahead: of skipped fp16 steps, and of an optimizer that was not loaded. Before
    0.13.2 DeepSpeed began with an update, so that the optimizer is ahead by one.
    """
    step_of = {name: each.step for name, each in parameters.items() if each.step is not None}
    last = max(step_of, key=lambda name: step_of[name], default="")
    model, counted = ranks.models[0], ranks.model.get("global_steps")
    times = 1 if place is None else place.times
    if model is ranks.optimizers[0] or not isinstance(counted, int):
        return []
    if not last or step_of[last] <= (counted + 1) * times:
        return []
    return [
        f"{model.path} counts {counted} steps, but {last} in "
        f"{os.path.basename(ranks.optimizers[0].path)} has step {step_of[last]}: model and "
        "optimizer are of different saves, unless your program has reset the counter"
    ]
