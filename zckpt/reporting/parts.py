"""The documents of other commands: the sections that `inspect`, `stats`, `verify`, ... can fill.

Each is made from the command's report, and from the manifest of its checkpoint. No tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

from ..core.description import VERSION, Report, line_of, said
from ..core.difference import ULPS, Difference
from ..core.layers import Places, places_of
from ..core.manifest import Manifest, key_of, name_of
from ..core.records import RecordCounts
from ..core.version import __version__
from ..errors import counted, note
from ..errors import problem as found_wrong
from . import against, faults, line, masters, numbers, owners, steps
from .faults import KIND_OF
from .lost import Found, what_is_there

ITSELF = "what the same files state in other places"


def begun(found: Found, command: str) -> Report:
    """What every document has."""
    return {
        "zckpt": VERSION,
        "command": command,
        "path": found.root,
        "version": __version__,
        "line": line.section(found),
    }


def metadata_sections(found: Found) -> Report:
    """The sections for which no tensor is read."""
    manifest = found.manifest
    assert manifest is not None
    entries = [*manifest.entries.values()]
    return {
        "tensors": numbers.table(entries),
        "map": owners.section(found, places_in(manifest), entries, ()),
        "steps": steps.section(found),
    }


def places_in(manifest: Manifest) -> Places:
    """Layers and kinds of all tensors."""
    return places_of(entry.parameter for entry in manifest.entries.values())


def of_inspect(manifest: Manifest) -> Report:
    found = Found(manifest.root, manifest)
    lines = faults.section(found, faults.warnings(manifest))
    return begun(found, "inspect") | metadata_sections(found) | {"faults": lines}


def of_stats(report: Report, source: Mapping[str, Any]) -> Report:
    """The numbers of tensors, and what is wrong with them."""
    with what_is_there(report["path"], source) as found:
        assert found.manifest is not None  # its tensors were read
        lines = {each["tensor"]: each for each in report["tensors"]}
        entries = [*found.manifest.entries.values()]
        places = places_in(found.manifest)
        about = begun(found, "stats")
        about["line"]["checked"] = checked(report["records"], report["problems"])
        return about | {
            "tensors": numbers.table(entries, lines),
            "numbers": numbers.section(entries, places, lines, {}),
            "faults": faults.section(found, [*report["problems"], *faults.denormal(lines.items())]),
        }


def of_verify(report: Report, source: Mapping[str, Any]) -> Report:
    """Masters against weights, what was compared, and what is wrong."""
    with what_is_there(report["path"], source) as found:
        shown = {(line["code"], line["file"]) for line in found.faults}
        problems = [
            _as_fault(each)
            for each in report["problems"]
            if (each["code"], each["file"]) not in shown
        ]
        document = begun(found, "verify")
        manifest = found.manifest
        if manifest is None or "digests" not in report:
            return document | {"faults": faults.section(found, problems)}
        document["line"]["checked"] = checked(report["records"], problems)
        entries = [*manifest.entries.values()]
        places = places_in(manifest)
        table = {"tensors": numbers.table(entries)}
        if report["against"] is None:
            distances = _distances(report)
            known = {entry.name: number for number, entry in enumerate(entries)}
            stale = masters.faults(found, distances, {})
            document |= {"masters": masters.section(distances, places, known)}
            problems += [*stale]
        else:
            problems += [_as_fault(each, "impossible") for each in _contents(report)]
        section = against.section(report, report["against"], None, entries, places)
        if report["against"] is None:
            section |= {"path": ITSELF, "layers": [], "histogram": None, "histograms": []}
        return document | table | {"against": section, "faults": faults.section(found, problems)}


def of_diff(report: Report, source: Mapping[str, Any]) -> Report:
    """The changes from `a` to `b`."""
    with what_is_there(report["a"], source) as found:
        assert found.manifest is not None
        entries = [*found.manifest.entries.values()]
        places = places_in(found.manifest)
        problems = [_as_fault(each) for each in report["problems"]]
        about = begun(found, "diff")
        if "records" in report:
            about["line"]["checked"] = checked(report["records"], problems)
        return about | {
            "tensors": numbers.table(entries),
            "against": against.section(report, report["b"], None, entries, places)
            | {"equal": report["equal"]},
            "faults": faults.section(found, problems),
        }


def of_probes(report: Report) -> Report:
    """Two recorded runs: in which place they first differ, and what both do not have."""
    big, first = report["big"], report["first"]
    result = f"{report['differing']:,} of {report['records']:,} records differ"
    differences = [
        {
            "what": f"{what}: step {event['step']}, {event['kind']} of {event['key']}",
            "a": event["what"],
            "b": event["meaning"],
        }
        for what, event in (("first big difference", big), ("first difference", first))
        if event
    ]
    alone = [
        note("not-compared", f"only {report[side]} has {name}", subject=name)
        for side in "ab"
        for name in report[f"only_{side}"]
    ]
    name = os.path.basename(os.path.abspath(report["a"]))
    about = {
        "engine": "recorded run",
        "name": name,
        "steps": f"steps {report['steps'][0]} to {report['steps'][-1]}",
    }
    return {
        "zckpt": VERSION,
        "command": "probe-diff",
        "path": report["a"],
        "version": __version__,
        "line": line.EMPTY | about,
        "against": {
            **dict.fromkeys(("step", "histogram", "first", "worst")),
            "path": report["b"],
            "equal": not first,
            "layers": [],
            "histograms": [],
            "proof": [
                {"what": f"{report['records']:,} records", "by": "distance", "result": result}
            ],
            "not_compared": [*said(alone), *report["unmerged"]],
            "differences": differences,
        },
        "faults": [],
    }


def checked(records: Mapping[str, int], problems: list[Report]) -> str:
    """What the checksums have shown, from the counts of a report."""
    counts = RecordCounts(records["checked"], records["unchecked"], records["without_checksum"])
    return line.checked(counts, sum(each.get("kind") == "checksum" for each in problems))


def _as_fault(problem: Report, kind: str = "") -> Report:
    """A problem of `verify` or `diff` as a fault: damage says what is stated and what was found."""
    usual = "checksum" if "stated" in problem else KIND_OF.get(problem["code"], "impossible")
    names = problem.get("tensors") or [problem.get("tensor")]
    return problem | {"kind": kind or usual, "fault": True, "tensor": names[0]}


def _contents(report: Report) -> list[Report]:
    """Differences of tensors from the checkpoint that it should equal."""
    return [
        line_of(
            found_wrong(
                "tensor-differs",
                f"{each['tensor']} differs in {counted(each['count'], 'element')}",
                subject=each["tensor"],
            ),
            tensor=each["tensor"],
        )
        for each in report["differences"]
        if each.get("count")
    ]


def _distances(report: Report) -> dict[str, masters.Distance]:
    """How far weights are from their masters: of those that `verify` has read."""
    differing = {each["tensor"]: each for each in report["differences"] if "copy" not in each}
    digests = report["digests"]
    distances = {}
    for name, each in digests.items():
        parameter, slot = key_of(name)
        weight = name_of((parameter, "param"))
        if slot != "master" or weight not in digests:
            continue
        own = differing.get(weight) or differing.get(name, {})
        difference = Difference(count=own.get("count", 0), first=own.get("first"))
        difference.max_ulp, difference.ulps = own.get("max_ulp"), own.get("ulps", [0] * len(ULPS))
        distances[name] = prod(each["shape"]), difference
    return distances
