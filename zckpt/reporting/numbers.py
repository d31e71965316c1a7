"""Two sections of a page: a table of all tensors, and numbers per layer, such as its maximum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.checkpoint.manifest import slot_key
from ..core.passes.description import Report
from ..judging.damaged_source import Found

NUMBERS = ("rms", "min", "max", "mean", "std", "nan", "inf", "zero", "denormal")
"""The statistics in the table of tensors."""


def table(checkpoint: Found, lines: Mapping[str, Report] | None = None) -> Report:
    """Makes the table of all tensors, as a list for each column: `{"name": [...], "dtype": [...]}`.

    `lines` are statistics by the tensor's name; without them, their columns are left out.
    """
    entries = checkpoint.entries
    report: Report = {
        "name": [entry.name for entry in entries],
        "parameter": [entry.parameter for entry in entries],
        "slot": [slot_key(entry.slot) for entry in entries],
        "dtype": [entry.dtype for entry in entries],
        "shape": [list(entry.shape) for entry in entries],
        "bytes": [entry.length for entry in entries],
    }
    if lines is not None:
        statistics = [lines.get(entry.name, {}) for entry in entries]
        report |= {key: [finite(line.get(key)) for line in statistics] for key in NUMBERS}
    return report


def names(checkpoint: Found) -> dict[str, str]:
    """Maps rows of the heat maps to names of layers: `{"0": "h.0"}` for GPT-2's first layer.

    A row that has the same name as its layer is left out.
    """
    pairs = zip(checkpoint.places.rows, checkpoint.places.names, strict=True)
    return {row: name for row, name in pairs if name != row}


def finite(value: Any) -> Any:
    """Returns a finite number unchanged, and None for any other value: JSON has no infinities."""
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    return value if is_number else None


def section(checkpoint: Found, lines: Mapping[str, Report], updates: Mapping[str, float]) -> Report:
    """Makes the section `numbers`: heat maps with a number per layer and kind of parameter.

    There is one for each slot (a kind of tensor, such as `exp_avg`). `lines` are statistics by the
    tensor's name; `updates` are the root mean squares of Adam's next update by parameter.
    """
    places = checkpoint.places
    by_slot: dict[str, list[list[Any]]] = {"param": []}
    stored = {entry.parameter for entry in checkpoint.entries if entry.slot == "param"}
    for number, entry in enumerate(checkpoint.entries):
        slot = entry.slot
        if (
            slot == "state"
            or entry.name not in lines
            # a master stands for its weight only if the weight is not stored
            or (slot == "master" and entry.parameter in stored)
        ):
            continue
        line = lines[entry.name]
        value = _root(line["mean"]) if slot == "exp_avg_sq" else finite(line["rms"])
        cell = [*places.of[entry.parameter], value, number]
        by_slot.setdefault("param" if slot == "master" else slot, []).append(cell)
    titles = {"param": "RMS of weights", "exp_avg_sq": "root of the mean of exp_avg_sq"}
    measures = [
        (slot_key(slot), titles.get(slot, f"RMS of {slot_key(slot)}"), cells)
        for slot, cells in by_slot.items()
    ]
    of_updates = [
        [*places.of[name], finite(rms), checkpoint.numbers.get(f"{name}/exp_avg")]
        for name, rms in updates.items()
    ]
    measures.append(("update", "RMS of Adam's update", of_updates))
    return {
        "rows": list(places.rows),
        "columns": list(places.columns),
        "measures": [
            {"key": key, "title": title, "unit": "", "cells": cells}
            for key, title, cells in measures
            if cells
        ],
    }


def _root(mean: Any) -> float | None:
    mean = finite(mean)
    return math.sqrt(mean) if mean is not None and mean >= 0 else None
