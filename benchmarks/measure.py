"""Measures a process: wall time, CPU seconds with its children, memory of the largest of them.

Only runs that follow each other are compared: A B A B ... A ratio is the median over the pairs. On
a shared machine, CPU seconds and ratios tell more than wall times.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
ZCKPT = (sys.executable, "-m", "zckpt")


@dataclass(frozen=True)
class Cost:
    """The cost of one run: seconds, CPU seconds, MiB of its largest process, and bytes moved.

    `moved` are the bytes that the process itself, without children, passed to read and write calls.
    `report` is what a command with `--json` prints.
    """

    wall: float
    cpu: float
    memory: float
    moved: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> float:
        """The seconds in the report: without the start of the interpreter, torch and a launcher."""
        return float(self.report["seconds"])


@dataclass(frozen=True)
class Job:
    """A command, and the directories that it writes, which are removed before each run."""

    name: str
    command: Sequence[str]
    outputs: tuple[Path, ...] = ()


def run(job: Job, before: Callable[[], None] = lambda: None) -> Cost:
    """Runs a job once and returns its cost; raises RuntimeError with its stderr if it fails."""
    for output in job.outputs:
        shutil.rmtree(output, ignore_errors=True)
    os.sync()  # what others left to write is not this job's work
    before()
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        process = subprocess.Popen(
            job.command, stdout=printed, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd=ROOT
        )
        assert process.stderr is not None
        said = process.stderr.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        wall = time.perf_counter() - started
        moved = bytes_moved(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(job.command)} failed: {said.decode()[-2000:]}")
        printed.seek(0)
        report = json.load(printed) if "--json" in job.command else {}
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, moved, report)


def bytes_moved(process: int) -> int:
    """The bytes that an ended process passed to read and write calls; it must not be reaped yet."""
    with open(f"/proc/{process}/io", encoding="ascii") as file:
        facts = dict(line.split(":") for line in file)
    return int(facts["rchar"]) + int(facts["wchar"])


def drop(files: Iterable[Path]) -> None:
    """Removes files from the page cache, after they were synced to disk."""
    os.sync()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def interleave(
    jobs: Sequence[Job], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[Cost]]:
    """Runs every job once per round, A B A B ..., and returns the costs by the job's name.

    A first round is not counted. `before` is called before each counted run.
    """
    costs: dict[str, list[Cost]] = {job.name: [] for job in jobs}
    for number in range(rounds + 1):
        for job in jobs:
            cost = run(job, before if number else lambda: None)
            if number:
                costs[job.name].append(cost)
    for job in jobs:
        for output in job.outputs:
            shutil.rmtree(output, ignore_errors=True)
    return costs


def table(costs: Mapping[str, Sequence[Cost]]) -> None:
    """Prints min / median / max of the costs of every job."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"\nn = {len(next(iter(costs.values())))}, load average {load}; min / median / max")
    print(f"{'':34}{'wall s':>25}{'CPU s':>25}{'peak MiB':>10}")
    for name, runs in costs.items():
        wall, cpu = spread([cost.wall for cost in runs]), spread([cost.cpu for cost in runs])
        print(f"{name:34}{wall:>25}{cpu:>25}{max(cost.memory for cost in runs):>10.0f}")


def spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return " / ".join(f"{value:.3f}" for value in (min(values), middle, max(values)))


def ratio(
    first: Sequence[Cost], second: Sequence[Cost], what: Callable[[Cost], float]
) -> tuple[float, str]:
    """The median of first / second over the pairs of runs, and a text with min, median and max."""
    pairs = [what(one) / what(other) for one, other in zip(first, second, strict=True)]
    return statistics.median(pairs), spread(pairs)
