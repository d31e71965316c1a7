"""The checkpoints of a run over time: the section `run`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.description import Report, line_of
from ..errors import Notice, counted, problem
from ..resume.runs import Candidate
from .numbers import finite

BROKEN = ("missing", "unreadable", "checksum")
"""The kinds of faults of a checkpoint that is not whole."""


def section(checkpoints: Sequence[Report], shown: Report) -> Report:
    """All checkpoints, the oldest first; the last one is `shown` below."""
    of_layers = (row for line in checkpoints for row in (*line["norms"], *line["updates"]))
    rows = (shown.get("numbers") or {}).get("rows", ())
    return {
        "checkpoints": list(checkpoints),
        "rows": list(dict.fromkeys((*rows, *of_layers))),
        "shown": len(checkpoints) - 1,
    }


def checkpoint(document: Report, name: str) -> Report:
    """What is kept of one checkpoint's document; `reason` is its first fault, `why` a sentence."""
    line = document["line"]
    broken = [each for each in document["faults"] if each["kind"] in BROKEN]
    wrong = [each for each in document["faults"] if each["fault"]]
    reason = {key: wrong[0][key] for key in Notice.__struct_fields__} if wrong else None
    more = f", and {counted(len(wrong) - 1, 'more fault')}" if len(wrong) > 1 else ""
    return {
        "name": name,
        "step": line["step"],
        "bytes": line["bytes"],
        "dp": line["sizes"].get("dp"),
        "whole": not broken,
        "reason": reason,
        "kind": wrong[0]["kind"] if wrong else None,
        "faults": len(wrong),
        "why": reason and reason["message"] + more,
        "norms": of_layers(document, "param"),
        "updates": of_layers(document, "update"),
    }


def of_layers(document: Mapping[str, Any], key: str) -> dict[str, float]:
    """The norm of each layer's weights, or the root mean square of its update."""
    numbers, table = document.get("numbers"), document.get("tensors")
    if not numbers or not table:
        return {}
    sums: dict[str, list[float]] = {}
    for measure in numbers["measures"]:
        for row, _, value, tensor in measure["cells"] if measure["key"] == key else ():
            if value is None or tensor is None:
                continue
            own = sums.setdefault(numbers["rows"][row], [0.0, 0.0])
            elements = math.prod(table["shape"][tensor])
            own[0] += value * value * elements
            own[1] += elements
    roots = {
        row: math.sqrt(squares if key == "param" else squares / elements)
        for row, (squares, elements) in sums.items()
        if elements
    }
    return {row: root for row, root in roots.items() if finite(root) is not None}


def faults_of(checkpoints: Sequence[Report]) -> list[Report]:
    """The first fault of each earlier checkpoint of a run, with that one's name."""
    return [
        {
            **reason,
            "file": reason["file"] and os.path.join(line["name"], reason["file"]),
            "message": f"{line['name']}: {line['why']}",
            "kind": line["kind"],
            "fault": True,
        }
        for line in checkpoints[:-1]
        if (reason := line["reason"]) is not None
    ]


def notes_of(checkpoints: Sequence[Candidate]) -> list[Report]:
    """What is to be known of the places that checkpoints have in the run: no faults."""
    notes = (note for each in checkpoints for note in each.notes)
    return [line_of(note, kind="warning", fault=False) for note in notes]


def missing_checkpoints(run: str, checkpoints: Sequence[Candidate]) -> list[Report]:
    """Checkpoints that the run names, and that are not there."""
    messages = (
        f"{run} names {each.name} as its last checkpoint, which is missing" for each in checkpoints
    )
    lost = [problem("pointer-dangling", message, file=run) for message in messages]
    return [line_of(each, kind="missing", fault=True) for each in lost]
