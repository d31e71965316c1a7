"""Measures zckpt, `cp` and the engines' converters, and prints all figures as one table.

    python -m benchmarks WORK                   makes the checkpoints that WORK lacks; hours
    python -m benchmarks WORK --only convert    only rows whose name begins with "convert"
    python -m benchmarks WORK --memory cold     hot, cold or short: see memory.py
    python -m benchmarks WORK --record          puts what it measures into figures.json

Each figure is the median over rounds of whole processes, A B A B ..., with its range. The
times of all programs include syncing their files to disk; outputs are removed between runs. Sources
are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from . import figures, memory
from .measure import drop, interleave
from .rows import ROWS, Row, made


def measured(
    row: Row, work: Path, before: Callable[[], None], rounds: int | None, state: str | None
) -> figures.Figure:
    """Measures one row of the table, prints a line for each of its figures, and returns them."""
    source, outputs = made(work, row.source), work / "outputs"
    outputs.mkdir(exist_ok=True)
    jobs = row.jobs(source, outputs)

    def prepare() -> None:
        if row.is_cold:
            drop(path for path in source.rglob("*") if path.is_file())
        before()

    costs = [*interleave(jobs, rounds or row.rounds, prepare).values()]
    ours, *rival = (max(cost.memory for cost in runs) for runs in costs)
    values: dict[str, list[float]] = {}
    for goal in row.goals:
        ratios = goal.values(*costs)
        middle = statistics.median(ratios)
        values[goal.name] = [middle, min(ratios), max(ratios)]
        print(
            f"{row.name:42} {row.source:8} {goal.name:18} {middle:6.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})".ljust(94)
            + f" {goal.target:g} / {goal.stretch:g} {goal.verdict(middle):8} n {len(ratios)}, "
            f"load {os.getloadavg()[0]:.1f}, {ours:.0f} MiB",
            flush=True,
        )
    command = f"python -m benchmarks WORK --only='{row.name}' --source {row.source}"
    command += f" --memory {state}" if state else ""
    return figures.measured(
        row.name, row.source, values, ours, rival[0] if rival else None, len(costs[0]), command
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK", help="a directory for checkpoints")
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--source", metavar="NAME", help="the rows of one checkpoint, such as z2")
    parser.add_argument("--memory", choices=memory.STATES, help="default: as the machine is")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--record", action="store_true", help="write figures.json")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in ROWS if row.name.startswith(arguments.only)]
    if arguments.source:
        chosen = [row for row in chosen if row.source == arguments.source]
    for row in chosen:
        made(work, row.source)
    print(f"{'':42} {'':8} {'':18} median (range)".ljust(94), "target / stretch")
    state = memory.state(arguments.memory) if arguments.memory else nullcontext(lambda: None)
    with state as before:
        for row in chosen:
            figure = measured(row, work, before, arguments.rounds, arguments.memory)
            if arguments.record:
                figures.record([figure])


if __name__ == "__main__":
    main()
