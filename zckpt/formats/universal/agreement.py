"""Do the parts of manifest.json agree with each other?

A checksum shows that bytes changed. It does not show that a program which edits the file, or an
older zckpt, wrote parts that contradict each other. A parameter that one part lacks would be lost
in every target without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.checksum import crc32
from ...core.manifest import Manifest
from ...core.weights import WEIGHTS, is_optimizers
from ...errors import brief, listed


def checksum(document: Mapping[str, Any]) -> str:
    """The CRC-32 of a manifest without its own key `crc32`: eight hex digits.

    It is that of the JSON with sorted keys, without spaces, in ASCII, so that every program can
    compute it from the parsed document.
    """
    rest = {key: value for key, value in document.items() if key != "crc32"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{crc32(text.encode('ascii')):08x}"


def contradictions(manifest: Manifest, step: Any) -> Iterator[str]:
    """Sentences about parts of the manifest, which states a `step`, that contradict each other."""
    parameters, buffers = manifest.parameters, {*manifest.buffers}
    entries = [entry for entry in manifest.entries.values() if entry.slot != "state"]
    strangers = [
        entry.name
        for entry in entries
        if entry.parameter not in parameters
        and not (entry.parameter in buffers and entry.slot == "param")
    ]
    if strangers:
        yield f"it has tensors of no parameter and no buffer: {listed(strangers, 4)}"
    shapes = [
        entry.name
        for entry in entries
        if entry.parameter in parameters and entry.shape != parameters[entry.parameter].shape
    ]
    if shapes:
        yield f"tensors have other shapes than their parameters: {listed(shapes, 4)}"
    weights = {entry.parameter for entry in entries if entry.slot in WEIGHTS}
    if empty := [name for name in (*parameters, *buffers) if name not in weights]:
        yield f"it has no weights of {listed(empty, 4)}"
    if both := sorted(buffers & parameters.keys()):
        yield f"{listed(both, 4)}: a parameter and a buffer"
    aliases = [alias for parameter in parameters.values() for alias in parameter.aliases]
    twice = {alias for alias in aliases if alias in parameters or aliases.count(alias) > 1}
    if twice:
        yield f"second names of tied weights are names of others too: {listed(sorted(twice), 4)}"
    frozen = [
        entry.name
        for entry in entries
        if is_optimizers(entry.slot)
        and entry.parameter in parameters
        and not parameters[entry.parameter].trainable
    ]
    if frozen:
        yield f"frozen parameters have states of an optimizer: {listed(frozen, 4)}"
    wrong = [
        name
        for name, parameter in parameters.items()
        if isinstance(parameter.step, bool)
        or not isinstance(parameter.step, (int, float, type(None)))
        or not isinstance(parameter.trainable, bool)
    ]
    if wrong:
        yield f"steps are not numbers, or `trainable` is not true or false: {listed(wrong, 4)}"
    if manifest.groups is not None:
        groupless = [
            name for name, item in parameters.items() if item.trainable and item.group is None
        ]
        if groupless:
            yield f"trainable parameters are in no group: {listed(groupless, 4)}"
    if step != manifest.step:
        steps = {item.step for item in parameters.values() if item.step is not None}
        of_each = listed(sorted(steps), 4) if steps else "none"
        yield f"its step is {brief(step)}, and the steps of its parameters are {of_each}"
