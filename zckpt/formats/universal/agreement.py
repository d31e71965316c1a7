"""Checks that the values in manifest.json do not contradict each other.

A checksum shows that bytes changed. It does not show contradictions that were written by an older
zckpt, or by a program that edits the file. For example, a parameter that is missing in one of the
manifest's lists would be lost silently in every target.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.weights import WEIGHTS, is_optimizers
from ...core.storage.checksum import crc32
from ...errors import brief, listed


def checksum(document: Mapping[str, Any]) -> str:
    """The CRC-32 of a manifest's contents, without its key `crc32`, as eight hex digits.

    It is computed from the JSON with sorted keys, without spaces, in ASCII. So every program can
    compute it from the parsed document.
    """
    return f"{crc32(canonical(document)):08x}"


def canonical(document: Mapping[str, Any]) -> bytes:
    """The contents of a manifest as the bytes from which its CRC-32 is computed."""
    rest = {key: value for key, value in document.items() if key != "crc32"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")


def contradictions(manifest: Manifest, step: Any) -> Iterator[str]:
    """Yields a sentence for each contradiction within the manifest.

    `step` is the step that manifest.json states for the checkpoint.
    """
    parameters, buffers = manifest.parameters, {*manifest.buffers}
    entries = [entry for entry in manifest.entries.values() if entry.slot != "state"]
    pairs = [(entry, parameters.get(entry.parameter)) for entry in entries]
    weights = {entry.parameter for entry in entries if entry.slot in WEIGHTS}
    aliases = Counter(alias for parameter in parameters.values() for alias in parameter.aliases)
    twice = {alias for alias, count in aliases.items() if alias in parameters or count > 1}
    wrong = [
        name
        for name, parameter in parameters.items()
        if isinstance(parameter.step, bool)
        or not isinstance(parameter.step, (int, float, type(None)))
        or not isinstance(parameter.trainable, bool)
    ]
    has_groups = manifest.groups is not None
    groupless = [
        name
        for name, parameter in parameters.items()
        if has_groups and parameter.trainable and parameter.group is None
    ]
    claims: dict[str, Iterable[str]] = {
        "it has tensors that belong to no parameter or buffer": (
            entry.name
            for entry, parameter in pairs
            if parameter is None and not (entry.parameter in buffers and entry.slot == "param")
        ),
        "tensors have a different shape than their parameters": (
            entry.name for entry, own in pairs if own is not None and entry.shape != own.shape
        ),
        "it lacks the weights of": (
            name for name in (*parameters, *buffers) if name not in weights
        ),
        "a parameter and a buffer have the same name": sorted(buffers & parameters.keys()),
        "second names of tied weights belong to several weights": sorted(twice),
        "frozen parameters have optimizer states": (
            entry.name
            for entry, parameter in pairs
            if parameter and not parameter.trainable and is_optimizers(entry.slot)
        ),
        "steps are not numbers, or `trainable` is not true or false": wrong,
        "trainable parameters are in no group": groupless,
    }
    for sentence, names in claims.items():
        if named := list(names):
            yield f"{sentence}: {listed(named, 4)}"
    if step != manifest.step:
        steps = {item.step for item in parameters.values() if item.step is not None}
        of_each = listed(sorted(steps), 4) if steps else "none"
        yield f"its step is {brief(step)}, but the steps of its parameters are {of_each}"
