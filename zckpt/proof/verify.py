"""What is proven of a checkpoint: that it does not contradict itself, and that it equals another.

Alone, everything that the files say twice must agree: CRC-32 of records and tensors, copies on
several ranks, a module's weight and the master it was rounded from. Against another checkpoint of
any format, what both hold must be equal, bit for bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from .. import __version__
from ..core import compare
from ..core.compare import ComparisonOutcome, Result
from ..core.difference import Difference
from ..core.dtypes import FLOATS
from ..core.fragments import Runs
from ..core.inert import from_json, plain_group
from ..core.manifest import Entry, Manifest, parameters_from_json, parameters_to_json
from ..core.plan import WIDE, Match, match
from ..errors import CorruptCheckpoint, MissingData, WrongOption, listed
from . import damage, values

Report = dict[str, Any]
WEIGHTS = {"param", "master"}
FINDINGS = ("differences", "problems", "steps", "scalars", "groups", "unproven")
STATES_NO_INFERENCE = ("onnxruntime", "proof")
"""Formats whose files cannot say that a name was inferred."""


def verify_alone(manifest: Manifest, pattern: str | None = None, **moving: Any) -> Report:
    """Whether a checkpoint contradicts itself: the part of a report that says so.

    `moving` are the jobs, memory and progress of `compare.compare`.
    """
    matches = chosen(own_matches(manifest), pattern)
    outcome = compare.compare(matches, manifest, manifest, everything=pattern is None, **moving)
    problems = [{"message": line} for line in damage.uncovered(manifest)]
    told = findings(outcome, manifest, manifest)
    return {
        **told,
        "equal": not (problems or told["problems"] or told["differences"]),
        "problems": problems + told["problems"],
        "notes": told["notes"] + damage.not_zero(outcome, manifest),
        "inferred": {"a": list(manifest.inferred)},
        "versions": versions(manifest, None),
    }


def verify_against(a: Manifest, b: Manifest, pattern: str | None = None, **moving: Any) -> Report:
    """Whether two checkpoints hold the same: the part of a report that says so.

    Raises MissingData where they share no weights, so that nothing would be proven.
    """
    matches, only_a, only_b = mutual_matches(a, b)
    matches = chosen(matches, pattern)
    if pattern is None:
        needs_weights(matches, a.root, b.root)
    outcome = compare.compare(matches, a, b, **moving)
    told = findings(outcome, a, b)
    told["notes"] += damage.other_padding(a, b, outcome)
    told |= inferences(matches, a, b)
    return (
        with_values(told, a, b, only_a, only_b)
        if pattern is None
        else {**told, "equal": nothing_found(told)}
    )


def inferences(matches: Iterable[Match], a: Manifest, b: Manifest) -> Report:
    """Inferred names of both sides, and what equal tensors do not prove because of them.

    An optimizer's state that stands under a wrong name in both checkpoints is equal in both.
    """
    kept = {item.a.parameter for item in matches if item.a.slot not in (*WEIGHTS, "state")}
    theirs = set(a.inferred if b.format in STATES_NO_INFERENCE else b.inferred)
    shared = [name for name in a.inferred if name in kept and name in theirs]
    unproven = {
        "message": f"the names of {listed(shared, 4)} are inferred in both checkpoints: their "
        "optimizer states are equal whether or not the names are right",
        "hint": "name the optimizer's parameters with --param-names FILE",
        "parameters": shared,
    }
    return {
        "inferred": {"a": list(a.inferred), "b": list(b.inferred)},
        "unproven": [unproven] if shared else [],
    }


def diff(a: Manifest, b: Manifest, pattern: str | None = None, **moving: Any) -> Report:
    """Everything in which two checkpoints differ, tensors in the order of the model."""
    matches, only_a, only_b = mutual_matches(a, b)
    matches = chosen([item for item in matches if not item.copy], pattern)
    outcome = compare.compare(matches, a, b, measure="first", **moving)
    moving["begin"] = None  # the bar is through
    unequal = [result.match for result in outcome.results if result.difference]
    looked_at = compare.compare(unequal, a, b, measure="all", **moving).results
    by_match = {id(result.match): result for result in looked_at}
    outcome.results = [by_match.get(id(result.match), result) for result in outcome.results]
    told = findings(outcome, a, b) | inferences(matches, a, b)
    lines = []
    for result in outcome.results:
        found = result.difference
        line = difference(result) or {"tensor": result.match.name, "count": 0}
        if found is not None and result.match.is_read:
            line |= {"elements": result.match.a.numel, "cosine": found.cosine}
        lines.append(line)
    differing = [line for line in lines if line.get("count") != 0 or "a_dtype" in line]
    worst = max(differing, key=lambda line: float(line.get("max_abs") or 0.0), default=None)
    made = {
        **with_values({**told, "problems": []}, a, b, only_a, only_b),
        "problems": told["problems"],
        "differences": differing,
        "first": differing[0]["tensor"] if differing else None,
        "worst": worst["tensor"] if worst else None,
        "states": values.states(a, b),
    }
    if pattern is not None:  # the tensors alone
        kept = (
            *("differences", "problems", "first", "worst", "tensors", "bytes", "digests"),
            *("inferred", "unproven"),
        )
        made = {key: made[key] for key in kept} | {"results": lines}
    found_something = not nothing_found(made) or any(
        made.get(key) for key in ("states", "only_a", "only_b")
    )
    return {**made, "equal": not found_something}


def needs_weights(matches: Iterable[Match], a: str, b: str) -> None:
    """Raises MissingData unless weights are compared: anything else proves nothing."""
    if not any(item.a.slot in WEIGHTS and item.a.numel for item in matches):
        raise MissingData(
            f"{a} and {b} share no weights, so nothing can be compared",
            hint="see `zckpt inspect PATH --tensors '*'` for the names of each",
        )


def with_values(
    told: Report, a: Manifest, b: Manifest, only_a: Sequence[str], only_b: Sequence[str]
) -> Report:
    """Adds what two checkpoints say that is no tensor, and what only one of them holds."""
    lost = [
        {"message": f"{other.root} lacks {name}, which {here.root} holds", "tensor": name}
        for only, here, other in ((only_a, a, b), (only_b, b, a))
        for name in missing(only, here, other)
    ]
    made = {
        **told,
        "problems": told["problems"] + lost,
        "steps": values.steps(a, b),
        "scalars": values.scalars(a, b),
        "groups": values.groups(a, b) + values.trainable(a, b) + values.forms(a, b),
        "only_a": list(only_a),
        "only_b": list(only_b),
        "versions": versions(a, b),
    }
    return {**made, "equal": nothing_found(made)}


def nothing_found(report: Report) -> bool:
    """Whether nothing was found."""
    return not any(report.get(key) for key in FINDINGS)


def findings(outcome: ComparisonOutcome, a: Manifest, b: Manifest) -> Report:
    """Differences of tensors, damage of files, and what of both is harmless."""
    buffers = {*a.buffers, *b.buffers}
    differences, problems, notes, cast = [], [], [], []
    for result in outcome.results:
        line = difference(result)
        if line is None:
            continue
        if line.get("count") == 0:
            cast.append(result.match.name)
            continue
        if result.match.copy and result.match.a.parameter in buffers:
            notes.append(
                f"the buffer {result.match.a.parameter} differs between ranks, as statistics that "
                "are not synchronised do: rank 0's is taken"
            )
        else:
            differences.append(line)
    if cast:
        notes.append(f"of another type, and equal by value: {listed(cast)}")
    for manifest in (a,) if a is b else (a, b):
        damaged = [line for result in outcome.results for line in damage.digest(result, manifest)]
        problems += damaged
        names = {line["tensor"] for line in damaged}
        files = {record.extent.file for record in manifest.records}
        wrong = [found for found in outcome.damage if found.record.extent.file in files]
        held = damage.holders(manifest, (found.record.extent for found in wrong))
        for found in wrong:
            about = damage.meaning(manifest, found, held[found.record.extent])
            if about["harmless"]:
                notes.append(about["message"])
            elif not names.intersection(about["tensors"]):  # else it is told already
                problems.append(about)
    return {
        "differences": differences,
        "problems": problems,
        "notes": list(dict.fromkeys(notes)),
        "tensors": _count(outcome, alone=a is b),
        "bytes": outcome.bytes,
        "records": {"checked": outcome.checked, "unchecked": outcome.unchecked},
        "digests": digests(outcome.results),
    }


def _count(outcome: ComparisonOutcome, alone: bool) -> int:
    """Tensors that were read, or pairs that were compared."""
    matches = [result.match for result in outcome.results if not result.match.copy]
    if alone:
        return len({id(held) for item in matches for held in (item.a, item.b) if held})
    return len(matches)


def is_proof(path: str) -> bool:
    """Whether a file is what `--save-proof` wrote, and not a checkpoint."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(256)
    return head.lstrip()[:1] == b"{" and b'"command": "verify"' in head


def verify_proof(
    manifest: Manifest, path: str, pattern: str | None = None, **moving: Any
) -> Report:
    """Whether a checkpoint still is what a proof was made of: by the CRC-32 of every tensor.

    Raises CorruptCheckpoint for a file that is no proof, or one that proved a difference.
    """
    stated = _read_proof(path)
    matches, only_a, only_b = match(manifest, stated)
    matches = chosen([item for item in matches if item.how in ("bits", "shapes", "types")], pattern)
    if pattern is None:
        needs_weights(matches, manifest.root, path)
    outcome = compare.compare([Match(item.a) for item in matches], manifest, manifest, **moving)
    told = findings(outcome, manifest, manifest) | inferences(matches, manifest, stated)
    for item, result in zip(matches, outcome.results, strict=True):
        assert item.b is not None
        crc = result.digests[0]
        if item.how != "bits":
            line = difference(Result(item, (None, None), None))
        elif crc != item.b.digest:
            line = {"tensor": item.name, "a_crc32": f"{crc:08x}", "b_crc32": _hex(item.b.digest)}
        else:
            continue
        told["differences"].append(line)
    if pattern is None:
        return with_values(told, manifest, stated, only_a, only_b)
    return {**told, "equal": nothing_found(told)}


def _hex(crc: int | None) -> str | None:
    return None if crc is None else f"{crc:08x}"


def _read_proof(path: str) -> Manifest:
    """What a proof says of the checkpoint that it was made of; its tensors are checksums alone."""
    try:
        with open(path, encoding="utf-8") as file:
            made = json.load(file)
        if made["equal"] is not True:
            raise CorruptCheckpoint(f"{path} proves a difference", hint="take a proof of equality")
        held = made["held"]
        entries = {
            name: Entry(name, item["dtype"], tuple(item["shape"]), Runs([]), int(item["a"], 16))
            for name, item in made["digests"].items()
            if "a" in item
        }
        groups = held["groups"]
        return Manifest(
            root=path,
            format="proof",
            source=made["versions"]["a"],
            entries=entries,
            parameters=parameters_from_json(held["parameters"]),
            buffers=tuple(held["buffers"]),
            groups=None if groups is None else tuple(map(from_json, groups)),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} is no proof: {error!r}") from error


def described(manifest: Manifest) -> Report:
    """What a proof has to say of a checkpoint beside the checksums of its tensors."""
    return {
        "parameters": parameters_to_json(manifest.parameters),
        "buffers": list(manifest.buffers),
        "groups": None
        if manifest.groups is None
        else [plain_group(group) for group in manifest.groups],
    }


# -- what is compared with what


def own_matches(manifest: Manifest) -> list[Match]:
    """Every tensor once: with the master that it was rounded from, or alone; then its copies."""
    entries = manifest.entries
    weights = {
        entry.parameter: entry
        for entry in entries.values()
        if entry.slot == "param" and entry.dtype in FLOATS
    }
    found = []
    for entry in entries.values():
        if entry.slot == "master" and entry.parameter in weights:
            weight = weights[entry.parameter]
            if weight.shape == entry.shape and (entry.dtype in (*WIDE, weight.dtype)):
                how = "bits" if weight.dtype == entry.dtype else "rounded"
                found.append(Match(entry, weight, how))
    paired = {id(held) for item in found for held in (item.a, item.b)}
    found += [Match(entry) for entry in entries.values() if id(entry) not in paired]
    return found + copies(manifest, entries)


def copies(manifest: Manifest, entries: Mapping[str, Entry]) -> list[Match]:
    """Further copies of tensors on other ranks; random states and the like are each rank's own."""
    return [
        Match(copy, entries[copy.name], copy=True)
        for copy in manifest.replicas
        if copy.slot != "state" and copy.name in entries
    ]


def mutual_matches(a: Manifest, b: Manifest) -> tuple[list[Match], list[str], list[str]]:
    """What both hold, further copies included; names of what only `a` or only `b` holds."""
    found, only_a, only_b = match(a, b)
    theirs = {item.a.name: item.b for item in found if item.b is not None and item.how == "bits"}
    ours = {item.b.name: item.a for item in found if item.b is not None and item.how == "bits"}
    found += copies(a, {name: entry for name, entry in theirs.items() if entry is not None})
    found += [replace(item, a=item.b, b=item.a) for item in copies(b, ours) if item.b is not None]
    return found, only_a, only_b


def chosen(matches: Iterable[Match], pattern: str | None) -> list[Match]:
    """Those whose name matches the glob; raises WrongOption where none does."""
    found = [item for item in matches if pattern is None or fnmatchcase(item.name, pattern)]
    if pattern is not None and not found:
        raise WrongOption(
            f"no tensor matches {pattern!r}", hint="names are parameter/slot, as '*/exp_avg'"
        )
    return found


def missing(only: Sequence[str], here: Manifest, other: Manifest) -> list[str]:
    """Of what one side lacks, that which it holds for others: single tensors were lost.

    A weight is one whether its module or its optimizer holds it; formats that keep only what is
    trained are not blamed for the rest.
    """
    slots = {entry.slot for entry in other.entries.values()} - {"state"}
    lost = []
    for name in only:
        parameter, _, slot = name.rpartition("/")
        held = here.parameters.get(parameter)
        weight = slot in WEIGHTS and held is not None and held.trainable
        if slot in slots or (weight and slots & WEIGHTS):
            lost.append(name)
    return lost


# -- what came of it


def difference(result: Result) -> Report | None:
    """A line of `differences`; None where nothing differs."""
    item, found = result.match, result.difference
    if item.b is None:
        return None
    about: Report = {"tensor": item.name}
    for side, entry in (("a", item.a), ("b", item.b)):
        if entry.name != item.name:
            about["rounded" if item.how == "rounded" else f"{side}_tensor"] = entry.name
    if item.copy:
        about["copy"] = _file_of(item.a)
    if item.how == "shapes":
        return about | {"a_shape": list(item.a.shape), "b_shape": list(item.b.shape)}
    if item.how in ("values", "types"):
        about |= {"a_dtype": item.a.dtype, "b_dtype": item.b.dtype}
    elif found is None or not found.count:
        return None
    if item.how == "types":
        return about
    found = found or Difference()
    return about | {
        "elements": item.a.numel,
        "count": found.count,
        "first": found.first,
        "a": number(found.a),
        "b": number(found.b),
        "max_abs": number(found.max_abs),
        "max_ulp": found.max_ulp,
    }


def _file_of(entry: Entry) -> str | None:
    """The name of the file that an entry begins in."""
    first = next(iter(entry.fragments), None)
    return None if first is None else os.path.basename(first.extent.file)


def number(value: float | int | None) -> float | int | str | None:
    """As JSON can hold it: "nan", "inf" and "-inf" are text."""
    if value is None or math.isfinite(value):
        return value
    return str(float(value))


def digests(results: Iterable[Result]) -> dict[str, Report]:
    """CRC-32 of the row-major bytes of every tensor that was read, of both sides."""
    found: dict[str, Report] = {}
    for result in results:
        item = result.match
        if item.copy:
            continue
        for side, entry, digest in zip("ab", (item.a, item.b), result.digests, strict=True):
            if entry is not None and digest is not None:
                about = {"dtype": entry.dtype, "shape": list(entry.shape)}
                found.setdefault(entry.name, about).setdefault(side, f"{digest:08x}")
    return found


def versions(a: Manifest, b: Manifest | None) -> Report:
    """Of zckpt, and of the engines that wrote both sides."""
    told = {"zckpt": __version__, "a": _engine(a)}
    return told if b is None else {**told, "b": _engine(b)}


def _engine(manifest: Manifest) -> Report:
    source = manifest.source
    return {key: source.get(key) for key in ("format", "version", "zero_stage", "dp", "tag")}
