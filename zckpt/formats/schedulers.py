"""Finds the states of learning rate schedulers outside of the engine's own `lr_scheduler`.

    lr_schedulers       Lightning's list, in the program's own state
    app.lr_scheduler    in the program's own state, such as DCP's application state
    scheduler.pt        a Trainer's file

`training/schedulers.py` handles what such a state keeps for each group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.inert import map_values
from ..core.checkpoint.manifest import Manifest, Sibling
from ..core.passes.layout import Shell
from ..errors import ZckptError
from ..files.torchfile import TorchFile
from ..files.torchshell import Storages, shell
from ..training import lightning
from ..training.trainers import SCHEDULERS

Scheduler = dict[str, Any]
Change = Callable[[Scheduler], Scheduler]
KEYS = ("lr_scheduler", "scheduler", "sched")
"""Keys under which programs keep a scheduler's state in their own state."""
OF_TORCH = "last_epoch"
"""The key of the counter in every scheduler of torch."""
# not Accelerate's scheduler.bin: Accelerate loads that file itself, and its counter is no number of
# updates, because Accelerate steps the scheduler once for each process
OF_TRAINER = SCHEDULERS[0]
"""The Trainer's file with the state of its scheduler."""
LISTED = "lr_schedulers"
"""The key of Lightning's list of schedulers in the program's own state."""
DEPTH = 3
"""How many levels of nested dictionaries are searched in a program's own state."""


def with_programs(manifest: Manifest) -> Manifest:
    """Copies the state of the program's own scheduler to `lr_scheduler`, where engines keep theirs.

    Nothing is changed if the engine has a scheduler, or if the program does not have exactly one.
    Manifests of DeepSpeed and Lightning stay unchanged too.
    """
    # Lightning loads its schedulers from its own list
    is_kept = isinstance(manifest.run.engine, FlatBufferEngine) or lightning.is_in(manifest)
    if is_kept or manifest.state.get("lr_scheduler") is not None:
        return manifest
    schedulers: list[Scheduler] = []
    _with_changed_schedulers(manifest.state.get("client_state"), _collect_in(schedulers))
    of_trainer = (item for item in manifest.files.siblings if item.name == OF_TRAINER)
    schedulers = schedulers or [own for own in map(_state_in, of_trainer) if own is not None]
    if len(schedulers) != 1 or manifest.ranks:
        return manifest
    return replace(manifest, state={**manifest.state, "lr_scheduler": schedulers[0]})


def schedulers_of(manifest: Manifest) -> list[Scheduler]:
    """The states of all learning rate schedulers in a manifest and in its trainer's files.

    A file counts only if its pickle has nothing but plain values: no tensor and no object.
    """
    schedulers: list[Scheduler] = []
    with_schedulers(manifest, _collect_in(schedulers))
    return schedulers


def with_schedulers(manifest: Manifest, change: Change) -> tuple[Manifest, list[str]]:
    """Applies `change` to the state of every scheduler in a manifest and in its trainer's files.

    Returns the new manifest, and the names of files that were left unchanged because their pickles
    have more than plain values.
    """
    state = dict(manifest.state)
    if isinstance(of_engine := state.get("lr_scheduler"), dict):
        state["lr_scheduler"] = change(of_engine)
    if isinstance(client := state.get("client_state"), dict):
        client = _with_changed_schedulers(client, change)
        if isinstance(several := client.get(LISTED), list):
            changed = [change(own) if isinstance(own, dict) else own for own in several]
            client = {**client, LISTED: changed}
        state["client_state"] = client
    siblings, unchanged = [], []
    for item in manifest.files.siblings:
        if item.name in SCHEDULERS:
            if (scheduler := _state_in(item)) is None:
                unchanged.append(item.name)
            elif (value := change(scheduler)) != scheduler:
                item = replace(item, content=value)
        siblings.append(item)
    return manifest.replace(state=state, siblings=tuple(siblings)), unchanged


def changed_files(siblings: Iterable[tuple[str, Sibling]]) -> list[Shell]:
    """Lays out the trainer's files that get new contents.

    `siblings` are pairs: the name in the target, and the file.
    """
    changed = [(name, item.content) for name, item in siblings if item.content is not None]
    return [shell(name, value, Storages()) for name, value in changed]


def _collect_in(states: list[Scheduler]) -> Change:
    def keep(scheduler: Scheduler) -> Scheduler:
        states.append(scheduler)
        return scheduler

    return keep


def _with_changed_schedulers(value: Any, change: Change, depth: int = DEPTH) -> Any:
    """Applies `change` to the states of torch's schedulers within a program's own nested state."""
    if not isinstance(value, dict) or not depth:
        return value

    def inner(item: Any, key: Any) -> Any:
        is_one = key in KEYS and isinstance(item, dict) and OF_TORCH in item and _is_plain(item)
        return change(item) if is_one else _with_changed_schedulers(item, change, depth - 1)

    return map_values(value, inner)


def _state_in(item: Sibling) -> Scheduler | None:
    """The state in a trainer's scheduler file; None if its pickle has tensors or objects."""
    if item.content is not None:
        return dict(item.content)
    try:
        value = TorchFile(item.path).value
    except ZckptError:
        return None
    return value if isinstance(value, dict) and _is_plain(value) else None


def _is_plain(state: dict[str, Any]) -> bool:
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return False
    return True
