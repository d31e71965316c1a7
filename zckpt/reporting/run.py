"""The section `run` of a report: how a run's checkpoints changed over time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.passes.description import Report, line_of
from ..errors import Notice, counted, problem
from ..resume.runs import Candidate
from .numbers import finite

BROKEN = ("missing", "unreadable", "checksum")
"""The kinds of faults that make a checkpoint incomplete or damaged."""


MEASURES = {"norms": "param", "updates": "update", "moments": "exp_avg", "seconds": "exp_avg_sq"}
"""Numbers kept per layer, by measure: the norm for weights, and the RMS for the others."""


def section(checkpoints: Sequence[Report], shown: Report, losses: Sequence[Any] = ()) -> Report:
    """Makes the section `run`: a row per checkpoint, the oldest first, and the losses by step.

    `checkpoints` are the rows, made by the function `checkpoint`, and `shown` is the full document
    of the newest one. `losses` are pairs of a step and a logged loss, also of steps between
    checkpoints.
    """
    of_layers = (row for line in checkpoints for key in MEASURES for row in line[key])
    rows = (shown.get("numbers") or {}).get("rows", ())
    return {
        "checkpoints": list(checkpoints),
        "rows": list(dict.fromkeys((*rows, *of_layers))),
        "shown": len(checkpoints) - 1,
        "losses": list(losses),
    }


def checkpoint(document: Report, name: str) -> Report:
    """Makes the row of one checkpoint in the table of a run, from the checkpoint's document.

    Its key `reason` is the first fault, and `why` the message of this fault, with the number of
    further faults.
    """
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
        **{key: of_layers(document, measure) for key, measure in MEASURES.items()},
        "totals": {key: total(document, measure) for key, measure in MEASURES.items()},
        **{key: document["about"].get(key) for key in STATED},
    }


STATED = ("saved", "loss", "evaluation_loss", "learning_rate", "epoch")


def of_layers(document: Mapping[str, Any], key: str) -> dict[str, float]:
    """One number for each layer: the norm of its weights, or the root mean square of a state.

    `key` is "param" for the norm. For the root mean square it is an optimizer state, such as
    "exp_avg", or "update" for Adam's next update.
    """
    roots = {row: _root(key, sums) for row, sums in _sums(document, key).items()}
    return {row: root for row, root in roots.items() if finite(root) is not None}


def total(document: Mapping[str, Any], key: str) -> float | None:
    """One number for the model: the norm of all weights, or the root mean square of a state.

    `key` is "param" for the norm. For the root mean square it is an optimizer state, such as
    "exp_avg", or "update" for Adam's next update. None if the number is unknown.
    """
    every = [*_sums(document, key).values()]
    sums = [sum(squares for squares, _ in every), sum(elements for _, elements in every)]
    root: float | None = finite(_root(key, sums)) if every else None
    return root


def _root(key: str, sums: Sequence[float]) -> float:
    squares, elements = sums
    return math.sqrt(squares if key == "param" else squares / max(elements, 1))


def _sums(document: Mapping[str, Any], key: str) -> dict[str, list[float]]:
    """For each layer, [sum of squares, number] of the elements of one slot, such as "exp_avg".

    `key` may also be "update", for Adam's next update.
    """
    numbers, table = document.get("numbers") or {}, document.get("tensors") or {}
    sums: dict[str, list[float]] = {}
    for measure in numbers.get("measures", ()):
        for row, _, value, tensor in measure["cells"] if measure["key"] == key else ():
            if value is None or tensor is None:
                continue
            layer_sum = sums.setdefault(numbers["rows"][row], [0.0, 0.0])
            elements = math.prod(table["shape"][tensor])
            layer_sum[0] += value * value * elements
            layer_sum[1] += elements
    return {row: own for row, own in sums.items() if own[1]}


def faults_of(checkpoints: Sequence[Report]) -> list[Report]:
    """The first fault of each earlier checkpoint of a run, with that checkpoint's name."""
    return [
        {
            **reason,
            "file": reason["file"] and os.path.join(line["name"], reason["file"]),
            "message": f"{line['name']}: {line['why']}",
            "kind": line["kind"],
            "fault": True,
            "checkpoint": line["name"],
        }
        for line in checkpoints[:-1]
        if (reason := line["reason"]) is not None
    ]


def notes_of(checkpoints: Sequence[Candidate]) -> list[Report]:
    """Converts the warnings about a run's checkpoints, such as about their order, to report lines.

    These lines are not faults.
    """
    of_others = {id(each): each.name for each in checkpoints[:-1]}
    return [
        line_of(note, kind="warning", fault=False, checkpoint=of_others.get(id(candidate)))
        for candidate in checkpoints
        for note in candidate.notes
    ]


def missing_checkpoints(run: str, checkpoints: Sequence[Candidate]) -> list[Report]:
    """A fault for each checkpoint that is missing, although a file of the run names it as the last.

    Such a file is, for example, `latest`.
    """
    lost = [
        (
            problem(
                "pointer-dangling",
                f"{run} names {candidate.name} as its last checkpoint, which is missing",
                file=run,
            ),
            candidate.name,
        )
        for candidate in checkpoints
    ]
    return [line_of(each, kind="missing", fault=True, checkpoint=name) for each, name in lost]
