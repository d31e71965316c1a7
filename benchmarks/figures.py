"""The measured figures that README, pages and pictures show: figures.json, and what writes it.

`python -m benchmarks WORK --record` replaces the rows that it measures. Rows of other scripts are
entered by hand, of a measurement that `log/` has.
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

    `values` has a goal's median, least and most over rounds, or the median alone. Memory is the
    peak of the largest process in MiB; `rival` is that of the other program.
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
    """By name and source."""
    rows = [Figure(**row) for row in json.loads(FILE.read_text())]
    return {(row.name, row.source): row for row in rows}


def record(figures: Sequence[Figure]) -> None:
    """Replaces the rows of the same names and sources."""
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
    """A row of today, on this machine."""
    rounded = {goal: [float(f"{value:.2f}") for value in ratios] for goal, ratios in values.items()}
    today, here = date.today().isoformat(), machine()
    memory, rival = round(memory), None if rival is None else round(rival)
    return Figure(name, source, rounded, memory, rival, rounds, today, here, command)


def machine() -> str:
    """In neutral words: cores and memory."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}"
