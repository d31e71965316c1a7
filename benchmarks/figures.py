"""Reads and writes figures.json: the measured figures that README, pages and pictures show.

`python -m benchmarks WORK --record` replaces the rows that it measures. Figures of other scripts
are entered by hand, from a measurement whose output is in `log/`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "figures.json"


class Figure(NamedTuple):
    """One row: what was measured with which checkpoint, when, where, and by which command.

    `values` has, by goal, the median, minimum and maximum over the rounds, or the median alone.
    `memory` is the peak of zckpt's largest process in MiB, `rival` that of the other program.
    """

    name: str
    source: str
    values: dict[str, list[float]]
    memory: float | None
    rival: float | None
    rounds: int | None
    date: str
    machine: str
    command: str


def read() -> dict[tuple[str, str], Figure]:
    """Reads all rows, by name and source."""
    rows = [Figure(**row) for row in json.loads(FILE.read_text())]
    return {(row.name, row.source): row for row in rows}


def record(figures: Sequence[Figure]) -> None:
    """Writes `figures` to figures.json, in place of the rows of the same names and sources."""
    rows = read() | {(row.name, row.source): row for row in figures}
    lines = ",\n".join(json.dumps(row._asdict()) for row in rows.values())
    FILE.write_text(f"[\n{lines}\n]\n")


def measured(
    name: str,
    source: str,
    values: dict[str, list[float]],
    memory: float,
    rival: float | None,
    rounds: int,
    command: str,
) -> Figure:
    """Returns a row with today's date and this machine, and rounded values."""
    rounded = {goal: [float(f"{value:.2f}") for value in ratios] for goal, ratios in values.items()}
    today, here = date.today().isoformat(), machine()
    memory, rival = round(memory), None if rival is None else round(rival)
    return Figure(name, source, rounded, memory, rival, rounds, today, here, command)


def machine() -> str:
    """Describes this machine by cores, memory and system, without a name."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}"
