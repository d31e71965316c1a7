"""What `verify --save-proof` keeps of a checkpoint, and how another one is compared with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import compare, sources
from ..core.compare import Result
from ..core.dtypes import SIZES
from ..core.facts import StepPlace
from ..core.fragments import Runs
from ..core.inert import from_json, plain_group
from ..core.manifest import (
    Entry,
    Manifest,
    crc_from_json,
    parameters_from_json,
    parameters_to_json,
    sizes_from_json,
    texts_from_json,
)
from ..core.plan import Match, match
from ..core.resources import DEFAULT_COPYING, Begin, Copying
from ..errors import (
    MALFORMED,
    CorruptCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    brief,
    cause,
    listed,
)
from .pairs import only_rounded, selected
from .report import difference, findings
from .values import step_place
from .verify import inferences, needs_weights, nothing_found, with_values

Report = dict[str, Any]
MAX_PROOF = 1 << 29
"""Bytes: 100 to 200 for each of a tensor's and a parameter's lines, as those of a manifest."""


def about(manifest: Manifest) -> Report:
    """What a report states of the checkpoint itself, beside the checksums of its tensors."""
    groups, place = manifest.groups, step_place(manifest)
    return {
        "step": manifest.step,
        "warnings": list(manifest.warnings),
        "held": {
            "parameters": parameters_to_json(manifest.parameters),
            "buffers": list(manifest.buffers),
            "groups": None if groups is None else [plain_group(group) for group in groups],
            "optimizer": manifest.optimizer,
            "step_place": None if place is None else place.to_state(),
        },
    }


def is_proof(path: str) -> bool:
    """Whether a path is a file that `--save-proof` wrote, and not a checkpoint."""
    if not sources.is_file(path):
        return False
    with sources.opened(path) as file:
        head = file.read(256)
    return head.lstrip()[:1] == b"{" and b'"command": "verify"' in head


def verify_proof(
    manifest: Manifest,
    path: str,
    pattern: str | None = None,
    copying: Copying = DEFAULT_COPYING,
    begin: Begin | None = None,
) -> Report:
    """Whether a checkpoint still equals the one that was proven, by the CRC-32 of every tensor.

    Raises CorruptCheckpoint if the file is not a proof, or if it proves a difference.
    """
    proven = _read_proof(path)
    mutual, only_a, only_b = match(manifest, proven)
    comparable = [item for item in mutual if item.how in ("bits", "shapes", "types")]
    matches = selected(comparable, pattern)
    _refuse_rounded(only_rounded(selected(mutual, pattern), manifest, proven), manifest.root, path)
    if pattern is None:
        needs_weights(matches, manifest.root, path)
    alone = [Match(item.a) for item in matches]
    outcome = compare.compare(alone, manifest, manifest, copying, begin=begin)
    report = findings(outcome, manifest, manifest) | inferences(matches, manifest, proven)
    for item, result in zip(matches, outcome.results, strict=True):
        assert item.b is not None
        crc = result.digests[0]
        if item.how != "bits":
            line = difference(Result(item, (None, None), None))
        elif crc != item.b.digest:
            line = {"tensor": item.name, "a_crc32": f"{crc:08x}", "b_crc32": _hex(item.b.digest)}
        else:
            continue
        report["differences"].append(line)
    if pattern is None:
        return with_values(report, manifest, proven, only_a, only_b)
    return {**report, "equal": nothing_found(report)}


def _refuse_rounded(rounded: Mapping[str, Sequence[str]], root: str, path: str) -> None:
    """Raises MissingData if weights would have to be rounded to be compared."""
    for names, narrow, wide in ((rounded["a"], root, path), (rounded["b"], path, root)):
        if names:
            raise MissingData(
                f"{narrow} has {listed(names, 4)} in a narrower type than {wide}: a proof has "
                "checksums alone, which cannot tell whether rounded weights are equal",
                hint="compare the two checkpoints themselves",
            )


def _hex(crc: int | None) -> str | None:
    return None if crc is None else f"{crc:08x}"


def _read_proof(path: str) -> Manifest:
    """The checkpoint that was proven, as its proof describes it: tensors are checksums only."""
    try:
        with sources.opened(path) as file:
            if file.seek(0, 2) > MAX_PROOF:
                raise UnsupportedCheckpoint(f"{path} is larger than any proof that zckpt writes")
            file.seek(0)
            report = json.loads(file.read().decode("utf-8"))
        if report["equal"] is not True:
            raise CorruptCheckpoint(
                f"{path} proves a difference",
                hint="give a file that `zckpt verify --save-proof` wrote when it found nothing",
            )
        description = report["held"]
        entries = {
            name: Entry(
                name,
                _dtype(item["dtype"]),
                sizes_from_json(item["shape"]),
                Runs([]),
                crc_from_json(item["a"]),
            )
            for name, item in report["digests"].items()
            if "a" in item
        }
        groups = description["groups"]
        return Manifest(
            root=path,
            format="proof",
            source=_dictionary(report["versions"]["a"]),
            entries=entries,
            parameters=parameters_from_json(description["parameters"]),
            buffers=texts_from_json(description["buffers"]),
            groups=None
            if groups is None
            else tuple(_dictionary(from_json(group)) for group in groups),
            optimizer=None if (name := description.get("optimizer")) is None else str(name),
            step_place=StepPlace.of_state({"step": description.get("step_place")}),
            states_inferred=False,
        )
    except MALFORMED as error:
        raise CorruptCheckpoint(
            f"{path} is not a proof: {cause(error)}",
            hint="`zckpt verify PATH --save-proof FILE` writes one",
        ) from error


def _dtype(name: Any) -> str:
    if name not in SIZES:
        raise ValueError(f"{brief(name)} is not a type of elements")
    return str(name)


def _dictionary(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise TypeError(f"{brief(value)} is not a JSON object")
    return value
