"""The state that the scheduler of a DeepSpeed run loads.

    the ds_config names          the files get
    a scheduler of DeepSpeed's   the source's state if it is of this class, else a new state that
                                 counts the updates that the source has made
    one of torch's               the source's state
    none                         the source's state, which the program may give to its own scheduler

The state of each DeepSpeed scheduler is only `last_batch_iteration`: the completed updates minus
one, because this counter begins at -1. The schedulers raise if it is missing (0.19.8,
runtime/lr_schedules.py). torch's schedulers accept any dictionary, and would begin anew without
`last_epoch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.inert import nested
from ...core.checkpoint.manifest import Manifest
from ...errors import Notice, warning
from ...training import lightning
from ...training.trainers import program_of
from ...training.trainers_steps import global_step
from ..schedulers import OF_TORCH

OF_DEEPSPEED = frozenset(("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
COUNTER = "last_batch_iteration"
WITHOUT = "load_checkpoint(..., load_lr_scheduler_states=False)"
"""The call of DeepSpeed that loads a checkpoint without a scheduler's state."""


class Decided(Struct, frozen=True):
    """What the files get for the scheduler: its `state`, and notices about it.

    `is_lacking` is true if the source has no state that the scheduler can load, and zckpt cannot
    make one.
    """

    state: Any
    notices: tuple[Notice, ...] = ()
    is_lacking: bool = False


def named_in(config: Mapping[str, Any] | None) -> str | None:
    """The scheduler that a ds_config names; None if it names none."""
    name = nested(config, "scheduler", "type")
    return name if isinstance(name, str) else None


def counter_of(name: str) -> str:
    """The key under which the scheduler `name` keeps its counter of updates."""
    return COUNTER if name in OF_DEEPSPEED else OF_TORCH


def fits(state: Any, name: str) -> bool:
    """Whether the scheduler `name` can continue from a state: it has the scheduler's counter."""
    return isinstance(state, Mapping) and counter_of(name) in state


def decide(source: Manifest, name: str | None) -> Decided:
    """Decides which scheduler state the target's files get, as the table of this module shows.

    `name` is the scheduler in the ds_config, such as "WarmupLR"; None if the ds_config names none.
    """
    state, engine = source.state.get("lr_scheduler"), source.run.engine
    before = named_in(engine.config) if isinstance(engine, FlatBufferEngine) else None
    if name is None:
        return Decided(state, (_unnamed(source),) if state is None and _may_lack(source) else ())
    if state is not None and name == before:  # a program may use another scheduler instead
        return Decided(state)
    is_of_torch = name not in OF_DEEPSPEED
    if fits(state, name) and (is_of_torch or before is None):
        return Decided(state)
    count = None if is_of_torch else updates(source)
    if count is None:
        return Decided(state, (lacking(source, name),), is_lacking=True)
    what_source_has = (
        "no scheduler state"
        if state is None
        else f"the state of {before}"
        if before
        else "the state of another scheduler"
    )
    message = (
        f"the source has {what_source_has}, so the state of the ds_config's {name} is set to "
        f"{count} updates ({COUNTER} = {count - 1}): the next update uses the learning rate of "
        f"the source's groups, and all later updates use the learning rate of {name}"
    )
    notice = warning("value-assumed", message, subject="lr_scheduler")
    return Decided({COUNTER: count - 1}, (notice,))


def updates(source: Manifest) -> int | None:
    """The number of completed updates, without those skipped in fp16; None if nothing states it."""
    every = [each for own in source.rank_manifests for each in own.parameters.values()]
    steps = [int(each.step) for each in every if each.trainable and each.step is not None]
    if steps:
        return max(steps)
    state, counters = source.state.get("lr_scheduler"), source.state.get("counters") or {}
    if isinstance(state, Mapping) and type(counted := state.get(COUNTER)) is int:
        return counted + 1
    if type(counted := counters.get("global_steps")) is int:
        return counted - int(counters.get("skipped_steps") or 0)
    return global_step(source)


def _may_lack(source: Manifest) -> bool:
    """Whether a source without a scheduler's state may lack the state of its run's scheduler."""
    # trainers keep this state in another file; a DeepSpeed run without it had no scheduler
    is_of_trainer = program_of(source.files.siblings) is not None or lightning.is_in(source)
    return not (isinstance(source.run.engine, FlatBufferEngine) or is_of_trainer)


def _unnamed(source: Manifest) -> Notice:
    message = (
        f"{source.root} has no scheduler state: if your program gives DeepSpeed a scheduler, call "
        f"{WITHOUT}, and set the scheduler's step"
    )
    return warning("program-must-set", message, subject="lr_scheduler")


def lacking(source: Manifest, name: str) -> Notice:
    """The warning that the target has no state for the scheduler `name` of the ds_config.

    Its hint names the call that loads the files without a scheduler's state.
    """
    return _lacking(source, counter_of(name), f"the ds_config's {name}", name)


def lacking_of(source: Manifest, run: Manifest) -> Notice | None:
    """A warning if the program's scheduler cannot continue from the source; otherwise None.

    `run` is a checkpoint that the program has saved, with its scheduler's state. The scheduler can
    continue if the source's scheduler state has the same counter (`last_batch_iteration` or
    `last_epoch`).
    """
    theirs, ours = (side.state.get("lr_scheduler") or {} for side in (run, source))
    keys = [key for key in (COUNTER, OF_TORCH) if key in theirs and key not in ours]
    return _lacking(source, keys[0], "the program's scheduler", "lr_scheduler") if keys else None


def _lacking(source: Manifest, key: str, scheduler: str, subject: str) -> Notice:
    state = source.state.get("lr_scheduler")
    lacks = f"no {key} in the state of its scheduler" if state else "no scheduler"
    return warning(
        "program-does-not-fit",
        f"the checkpoint has {lacks}, but {scheduler} needs it",
        subject=subject,
        hint=f"use the scheduler of the checkpoint, or let another one begin anew: {WITHOUT}",
    )
