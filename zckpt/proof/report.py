"""Turns the results of a comparison into the keys and lines of a report."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.comparison.compare import ComparisonOutcome, Result
from ..core.comparison.difference import Difference
from ..core.comparison.statistics import json_number, magnitudes
from ..core.passes.description import Report, advice, said
from ..core.passes.plan import Match
from ..core.version import __version__
from ..errors import listed, note
from . import damage


def findings(outcome: ComparisonOutcome, a: Manifest, b: Manifest) -> Report:
    """The keys of a report on compared tensors: differences, damage, notices, counts.

    `a` and `b` are the two checkpoints; they are the same object if one was checked without
    another.
    """
    buffers = {*a.buffers, *b.buffers}
    copies = {id(entry) for manifest in (a, b) for entry in manifest.replicas}
    differences, notes, cast = [], [], []
    problems: list[Report] = []
    harmless: list[Report] = []
    for result in outcome.results:
        line = difference(result)
        if line is None:
            continue
        if line.get("count") == 0:
            cast.append(result.match.name)
        elif result.match.a.parameter in buffers and _is_of_one_side(result.match, copies):
            name = result.match.a.parameter
            message = (
                f"the buffer {name} differs between ranks, as statistics that are not "
                "synchronised do: rank 0's values are used"
            )
            notes.append(note("rank-zero-taken", message, subject=name))
        else:
            differences.append(line)
    if cast:
        message = f"stored in different types, but equal by value: {listed(cast)}"
        notes.append(note("form-differs", message, subject=cast[0]))
    for manifest in (a,) if a is b else (a, b):
        for line in _damage(outcome, manifest):
            (harmless if line.get("harmless") else problems).append(line)
    slots = _by_slot(outcome, alone=a is b)
    return {
        "differences": differences,
        "problems": problems,
        "notes": [*said(notes), *harmless],
        "tensors": sum(slots.values()),
        "slots": slots,
        "bytes": outcome.bytes,
        "records": outcome.records.report(),
        "digests": digests(outcome.results, alone=a is b),
        **(advice(a, outcome.records.bare) if a is b else {}),
    }


def _is_of_one_side(match: Match, copies: Collection[int]) -> bool:
    """Whether a pair compares a copy of a tensor with the tensor itself, not two copies.

    `copies` are the `id`s of all replicas (copies that other ranks have stored).
    """
    return match.copy and not (id(match.a) in copies and id(match.b) in copies)


def _damage(outcome: ComparisonOutcome, manifest: Manifest) -> list[Report]:
    """Report lines about the damaged tensors and byte ranges of a checkpoint."""
    problems = [line for result in outcome.results for line in damage.digest(result, manifest)]
    tensors = {line["tensor"] for line in problems}
    files = {record.extent.file for record in manifest.files.records}
    wrong = [item for item in outcome.damage if item.record.extent.file in files]
    contents = damage.contents_of(manifest, (item.record.extent for item in wrong))
    for item in wrong:
        line = damage.meaning(manifest, item, contents[item.record.extent])
        if not tensors.intersection(line["tensors"]):  # else the tensor is listed already
            problems.append(line)
    return problems


def _by_slot(outcome: ComparisonOutcome, alone: bool) -> dict[str, int]:
    """Counts the compared pairs of tensors by slot, such as `{"exp_avg": 12}`.

    If one checkpoint was checked `alone`, it counts the tensors that were read.
    """
    matches = [result.match for result in outcome.results if not result.match.copy]
    compared = [match.compared.key for match in matches]
    if alone:
        compared = [entry.key for match in matches for entry in (match.a, match.b) if entry]
        compared = list(dict.fromkeys(compared))
    return dict(Counter(slot for _, slot in compared))


def difference(result: Result) -> Report | None:
    """A report line about a pair of tensors that differ; else None.

    None also for a tensor that was only read, and not compared with another.
    """
    match, measured = result.match, result.difference
    if match.b is None:
        return None
    line: Report = {"tensor": match.name}
    for side, entry in (("a", match.a), ("b", match.b)):
        if entry.name != match.name:
            line["rounded" if match.how == "rounded" else f"{side}_tensor"] = entry.name
    if match.copy:
        line["copy"] = _file_of(match.a)
    if match.how == "shapes":
        return line | {"a_shape": list(match.a.shape), "b_shape": list(match.b.shape)}
    if match.how in ("values", "types"):
        line |= {"a_dtype": match.a.dtype, "b_dtype": match.b.dtype}
    elif measured is None or not measured.count:
        return None
    if match.how == "types":
        return line
    measured = measured or Difference()
    return line | {
        "elements": match.a.numel,
        "count": measured.count,
        "first": measured.first,
        "a": json_number(measured.a),
        "b": json_number(measured.b),
        "max_abs": "nan" if any(measured.nans) else json_number(measured.max_abs),
        "max_ulp": None if any(measured.nans) else measured.max_ulp,
        **({"ulps": measured.ulps} if any(measured.ulps) else {}),
        **{f"{side}_nan": count for side, count in zip("ab", measured.nans, strict=True) if count},
    }


def changes(measured: Difference, elements: int) -> Report:
    """How much a tensor's elements changed from one checkpoint to the other, for `diff`.

    `rms` is the root mean square of the changes. `relative` is `rms` divided by the root mean
    square of the elements in the first checkpoint. `histogram` counts changes by magnitude.
    """
    rms = math.sqrt(measured.squares / elements) if elements else 0.0
    relative = math.sqrt(measured.squares / measured.aa) if measured.aa > 0 else None
    return {
        "rms": json_number(rms),
        "relative": json_number(relative),
        "histogram": magnitudes(measured.changes),
    }


def _file_of(entry: Entry) -> str | None:
    first = next(iter(entry.fragments), None)
    return None if first is None else os.path.basename(first.extent.file)


def digests(results: Iterable[Result], alone: bool) -> dict[str, Report]:
    """Maps the name of every tensor that was read to a report line with its CRC-32s.

    A CRC-32 is of the bytes in row-major order. Its key is "a" or "b", the checkpoint; a checkpoint
    that was checked `alone` is "a". `b_tensor` is the tensor's name in b, if it differs.
    """
    lines: dict[str, Report] = {}
    for result in results:
        match = result.match
        if match.copy:
            continue
        for side, entry, digest in zip("ab", (match.a, match.b), result.digests, strict=True):
            if entry is None or digest is None:
                continue
            if alone:
                side = "a"
            name = match.a.name if match.how == "bits" and not alone else entry.name
            new = {"dtype": entry.dtype, "shape": list(entry.shape)}
            line = lines.setdefault(name, new)
            line.setdefault(side, f"{digest:08x}")
            if entry.name != name:
                line.setdefault(f"{side}_tensor", entry.name)
    return lines


def versions(a: Manifest, b: Manifest | None) -> Report:
    """The versions of zckpt and of the engines that wrote the checkpoints `a` and `b`."""
    versions_of_a = {"zckpt": __version__, "a": _engine(a)}
    return versions_of_a if b is None else {**versions_of_a, "b": _engine(b)}


def _engine(manifest: Manifest) -> Report:
    origin = manifest.run.origin
    return {
        "format": origin.format,
        "version": origin.version,
        "zero_stage": origin.zero_stage,
        "dp": origin.dp,
        "tag": origin.tag,
    }
