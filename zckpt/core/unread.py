"""Which states of an optimizer are not read, so that they are only compared with each other?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from .inert import to_json
from .manifest import Entry, Manifest, Unread
from .states import OTHER, PARTITIONS, others_of, partitions_of, tensors_in


def unread(
    key: Any, parameters: Iterable[str], reason: str, value: Any, tensors: Iterable[Entry]
) -> Unread:
    """A state that is compared as it is; `tensors` are those in its inert value."""
    content = json.dumps(to_json(value), sort_keys=True)
    return Unread(str(key), tuple(parameters), reason, content, tuple(tensors))


def as_unread(manifest: Manifest, reason: str) -> Manifest:
    """The manifest whose states that are neither slots nor numbers are listed as not read."""
    others, parts = others_of(manifest), partitions_of(manifest)
    if not others and not parts:
        return manifest
    names: dict[str, dict[str, None]] = {}
    values: dict[str, list[Any]] = {}
    for name, own in others.items():
        for key, value in own.items():
            if value is not None:
                names.setdefault(str(key), {})[name] = None
                values.setdefault(str(key), []).append(value)
    for part in parts:
        for key, value in part["states"].items():
            names.setdefault(str(key), {}).update(dict.fromkeys(part["parameters"]))
            values.setdefault(str(key), []).append(value)
    entries = dict(manifest.entries)
    states = []
    for key, value in values.items():
        tensors = [entries.pop(f"{name}/state", None) for name in tensors_in(value)]
        known = [entry for entry in tensors if entry is not None]
        is_whole = len(known) == len(tensors)  # a stage of a pipeline lacks those of others
        state = unread(key, names[key], reason, value, known)
        states.append(state if is_whole else replace(state, content="", tensors=()))
    optimizer = {
        key: value
        for key, value in manifest.state["optimizer"].items()
        if key not in (OTHER, PARTITIONS)
    }
    gone = manifest.entries.keys() - entries.keys()
    return replace(
        manifest,
        entries=entries,
        replicas=tuple(entry for entry in manifest.replicas if entry.name not in gone),
        state={**manifest.state, "optimizer": optimizer},
        unread=(*manifest.unread, *states),
    )
