"""All figures of zckpt beside those of `cp` and of what engines convert with, as one table.

    python -m benchmarks WORK                   makes the checkpoints that WORK lacks; hours
    python -m benchmarks WORK --only convert    the rows whose name begins so
    python -m benchmarks WORK --memory cold     hot, cold or short: see memory.py

Each ratio is the median of interleaved pairs of whole processes, with its range. Everything is
hashed and synced on both sides; outputs are removed between runs. Sources are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import convert, memory
from .measure import ENVIRONMENT, ROOT, ZCKPT, Cost, Job, drop, interleave

Figure = Callable[[Cost], float]


@dataclass(frozen=True)
class Goal:
    """What is compared: the rival's cost over ours if `faster`, else ours over the rival's."""

    name: str
    of: Figure
    target: float
    stretch: float
    faster: bool = False

    def ratios(self, ours: Sequence[Cost], theirs: Sequence[Cost]) -> list[float]:
        pairs = zip(ours, theirs, strict=True)
        return [
            self.of(b) / self.of(a) if self.faster else self.of(a) / self.of(b) for a, b in pairs
        ]

    def verdict(self, value: float) -> str:
        met = [value >= aim if self.faster else value <= aim for aim in (self.target, self.stretch)]
        return "stretch" if met[1] else "met" if met[0] else "MISSED"


@dataclass(frozen=True)
class Row:
    """One comparison: its name, the checkpoint in WORK, the jobs, what is compared."""

    name: str
    source: str
    jobs: Callable[[Path, Path], tuple[Job, Job]]
    goals: tuple[Goal, ...]
    rounds: int = 5
    is_cold: bool = False  # the source is dropped from the page cache before each run


def wall(cost: Cost) -> float:
    return cost.wall


def cpu(cost: Cost) -> float:
    return cost.cpu


def peak(cost: Cost) -> float:
    return cost.memory


def moved(cost: Cost) -> float:
    return cost.moved


def converted(against: str, dp: int | None, source: Path, work: Path) -> tuple[Job, Job]:
    return convert.jobs(source, work, against, dp)


def resharded(stage: int, dp: int, source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt reshard` to a stage and a size, and `cp` of the optimizer files."""
    job, copying = convert.jobs(source, work, "cp", dp)
    return Job(
        f"to ZeRO-{stage} dp {dp}", (*job.command, "--stage", str(stage)), job.outputs
    ), copying


def inspected(source: Path, _work: Path) -> tuple[Job, Job]:
    nothing = Job("python -c pass", (sys.executable, "-c", "pass"))
    return Job("zckpt inspect", (*ZCKPT, "inspect", str(source))), nothing


def verified(source: Path, _work: Path) -> tuple[Job, Job]:
    reading = (sys.executable, "-m", "benchmarks.verify", "--read", str(source))
    return Job("zckpt verify", (*ZCKPT, "verify", str(source))), Job("reading once", reading)


def tenfold(source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt convert` of a checkpoint, and of one with a tenth of its bytes."""
    jobs = [
        Job(
            f"convert {path.name}",
            (*ZCKPT, "convert", str(path), str(work / "out")),
            (work / "out",),
        )
        for path in (source, made(source.parent, "z3-12M"))
    ]
    return jobs[0], jobs[1]


def copied_once(source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt convert`, and a program that reads and writes every byte once."""
    ours, theirs = work / "zckpt", work / "copies"
    files = sorted(map(str, source.rglob("*.pt")))
    script = 'mkdir "$1" && cd "$1" && shift && cat "$@" > all'
    copy = Job("cat", ("sh", "-c", script, "sh", str(theirs), *files), (theirs,))
    return Job("zckpt convert", (*ZCKPT, "convert", str(source), str(ours)), (ours,)), copy


CP = (Goal("wall", wall, 0.8, 0.65), Goal("CPU", cpu, 0.8, 0.5))
UNIVERSAL = (Goal("times faster", wall, 15, 25, True), Goal("times less CPU", cpu, 30, 45, True))
EXPORT = (
    Goal("times faster", wall, 12, 15, True),
    Goal("times less CPU", cpu, 10, 13, True),
    Goal("times less memory", peak, 20, 45, True),
)
CHECKPOINTS = {
    "z3": ("3", "4", "124M"),
    "z2": ("2", "4", "124M"),
    "z3-12M": ("3", "4", "12M"),
    "z3-355M": ("3", "4", "355M"),
    "z2-355M": ("2", "4", "355M"),
    "many": ("3", "16", "many"),
}
"""What benchmarks.checkpoints makes: stage, dp, size."""


def rows() -> Iterator[Row]:
    for name in ("z3", "z2", "z3-355M", "z2-355M"):
        yield Row("convert / cp + sync", name, partial(converted, "cp", None), CP)
    for stage in (1, 2, 3):
        for dp in (3, 8, 64):
            jobs = partial(resharded, stage, dp)
            name = f"reshard to ZeRO-{stage}, dp {dp} / cp + sync"
            yield Row(name, "z3", jobs, (Goal("wall", wall, 0.95, 0.8),))
    for name in ("z3", "z2"):
        jobs = partial(converted, "universal", None)
        yield Row("ds_to_universal / convert", name, jobs, UNIVERSAL)
    many = (Goal("times faster", wall, 50, 100, True),)
    yield Row("ds_to_universal / convert", "many", partial(converted, "universal", None), many)
    yield Row("zero_to_fp32 / fp32 export", "z3", partial(converted, "fp32", None), EXPORT)
    whole = (Goal("times faster", wall, 8, 12, True),)
    yield Row("dcp_to_torch_save / --to gathered", "dcp", partial(converted, "torch", None), whole)
    memories = (Goal("peak memory", peak, 1.1, 1.02),)
    yield Row("convert, 10 times the bytes / one", "z3", tenfold, memories, 3)
    bytes_moved = (Goal("bytes moved", moved, 1.02, 1.005),)
    yield Row("convert / reading and writing once", "z3", copied_once, bytes_moved, 3)
    from_disk = (Goal("wall", wall, 0.9, 0.65),)
    jobs = partial(converted, "cp", None)
    yield Row("convert, cold source / cp + sync", "z3", jobs, from_disk, is_cold=True)
    yield Row("inspect / python -c pass", "z3", inspected, (Goal("CPU", cpu, 4, 3),), 15)
    for name in ("z3", "z2"):
        yield Row("verify / reading once", name, verified, (Goal("wall", wall, 1.3, 1.1),), 9)


def made(work: Path, name: str) -> Path:
    """A checkpoint in WORK; makes it first if it is missing."""
    path = work / name
    if not path.exists():
        if name == "dcp":
            command = [
                *ZCKPT,
                "convert",
                str(made(work, "z3")),
                str(path),
                "--to",
                "dcp",
                "--dp",
                "4",
            ]
        else:
            stage, dp, size = CHECKPOINTS[name]
            command = [sys.executable, "-m", "benchmarks.checkpoints", str(path)]
            command += ["--stage", stage, "--dp", dp, "--size", size]
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL)
    return path


def measured(row: Row, work: Path, before: Callable[[], None], rounds: int | None) -> Iterator[str]:
    """The lines of one row."""
    source, outputs = made(work, row.source), work / "outputs"
    outputs.mkdir(exist_ok=True)
    jobs = row.jobs(source, outputs)

    def prepare() -> None:
        if row.is_cold:
            drop(path for path in source.rglob("*") if path.is_file())
        before()

    costs = interleave(jobs, rounds or row.rounds, prepare)
    ours, theirs = (costs[job.name] for job in jobs)
    memory_used = max(cost.memory for cost in ours)
    for goal in row.goals:
        ratios = goal.ratios(ours, theirs)
        middle = statistics.median(ratios)
        yield (
            f"{row.name:42} {row.source:8} {goal.name:17} {middle:6.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})".ljust(94)
            + f" {goal.target:g} / {goal.stretch:g} {goal.verdict(middle):8} n {len(ratios)}, "
            f"load {os.getloadavg()[0]:.1f}, {memory_used:.0f} MiB"
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
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in rows() if row.name.startswith(arguments.only)]
    if arguments.source:
        chosen = [row for row in chosen if row.source == arguments.source]
    for row in chosen:
        made(work, row.source)
    print(f"{'':42} {'':8} {'':17} median (range)".ljust(94), "target / stretch")
    state = memory.state(arguments.memory) if arguments.memory else nullcontext(lambda: None)
    with state as before:
        for row in chosen:
            for line in measured(row, work, before, arguments.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
