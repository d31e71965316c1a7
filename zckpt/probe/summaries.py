"""Writes a recorded run as text files, one for each step, which can be compared line by line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import TargetExists, short
from .runs import Run, TensorRecord


def summarise(directory: str, named: Sequence[tuple[str, Run]]) -> None:
    """Writes a folder for each run, with one text file for each step.

    `named` are pairs of a folder's name and a run. Lines are in the order of the first run. Raises
    TargetExists if the directory exists.
    """
    if os.path.lexists(directory):
        raise TargetExists(
            "target-exists", f"{directory} exists already", hint="name a new directory"
        )
    order: dict[tuple[int, Any], None] = {}
    for _, run in named:
        for rank, records in run.ranks.items():
            order |= dict.fromkeys((rank, record.place) for record in records)
    for name, run in named:
        records_by_place = {
            (rank, record.place): record
            for rank, records in run.ranks.items()
            for record in records
        }
        folder = os.path.join(directory, name)
        os.makedirs(folder)
        for step in run.steps:
            path = os.path.join(folder, f"step_{step:08d}.txt")
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                for rank, place in order:
                    if place[0] == step:
                        file.write(_text(rank, place, records_by_place.get((rank, place))))


def _text(rank: int, place: tuple[int, str, str, str], record: TensorRecord | None) -> str:
    step, batch, kind, key = place
    head = f"{kind} {key}  rank {rank} step {step} batch {batch}\n"
    if record is None:
        return f"{head}  not recorded\n\n"
    lines = [f"  {record.dtype} {list(record.shape)}"]
    for keys in (("min", "max", "mean", "std", "norm"), ("nan", "inf", "negative", "zero")):
        values = [f"{key} {short(record.numbers[key])}" for key in keys if key in record.numbers]
        lines += [f"  {'  '.join(values)}"] if values else []
    if "crc32" in record.numbers:
        lines.append(f"  crc32 {record.numbers['crc32']}")
    samples = record.numbers.get("samples", ())
    for start in range(0, len(samples), 8):
        lines.append("  " + " ".join(f"{short(value):>13}" for value in samples[start : start + 8]))
    return "\n".join([head.rstrip("\n"), *lines, "", ""])
