"""What is compared with what, and how good zckpt should be: the rows of the table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from . import convert, nodes, scale
from .measure import ENVIRONMENT, ROOT, ZCKPT, Cost, Job

Value = Callable[..., float]
"""Of the costs of one round, in the order of a row's jobs."""


@dataclass(frozen=True)
class Goal:
    """One figure of a row, and its target; `more` says that a larger one is better."""

    name: str
    of: Value
    target: float
    stretch: float
    more: bool = False

    def values(self, *costs: Sequence[Cost]) -> list[float]:
        """The figure of each round, of the costs of each job."""
        return [self.of(*each) for each in zip(*costs, strict=True)]

    def verdict(self, value: float) -> str:
        met = [value >= aim if self.more else value <= aim for aim in (self.target, self.stretch)]
        return "stretch" if met[1] else "met" if met[0] else "MISSED"


@dataclass(frozen=True)
class Row:
    """One comparison: its name, the checkpoint in WORK, the jobs (zckpt's first), the goals."""

    name: str
    source: str
    jobs: Callable[[Path, Path], Sequence[Job]]
    goals: tuple[Goal, ...]
    rounds: int = 5
    is_cold: bool = False  # the source is dropped from the page cache before each run


# -- figures


def wall(ours: Cost, theirs: Cost) -> float:
    return ours.wall / theirs.wall


def cpu(ours: Cost, theirs: Cost) -> float:
    return ours.cpu / theirs.cpu


def peak(ours: Cost, theirs: Cost) -> float:
    return ours.memory / theirs.memory


def moved(ours: Cost, theirs: Cost) -> float:
    return ours.moved / theirs.moved


def times(figure: Value) -> Value:
    """The rival's cost over ours."""
    return lambda ours, theirs: figure(theirs, ours)


def own_cpu(ours: Cost) -> float:
    """CPU seconds."""
    return ours.cpu


def pieces(ours: Cost) -> float:
    """Millions of pieces in a CPU second."""
    tensors, dp = MADE["pieces"]
    return tensors * dp * len(scale.SLOTS) / ours.cpu / 1e6


def without_start(ours: Cost, one: Cost, start: Cost) -> float:
    """The wall time of a launch, without what the launcher itself takes, over that of one process.

    A launcher imports torch, whatever the size of the checkpoint.
    """
    return (ours.wall - start.wall) / one.wall


def with_start(ours: Cost, one: Cost, _start: Cost) -> float:
    return ours.wall / one.wall


# -- jobs


def converted(against: str, dp: int | None, source: Path, work: Path) -> tuple[Job, Job]:
    return convert.jobs(source, work, against, dp)


def resharded(stage: int, dp: int, source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt reshard` to a stage and a size, and `cp` of the source's files."""
    job, copying = convert.jobs(source, work, "cp", dp)
    return Job(
        f"to ZeRO-{stage} dp {dp}", (*job.command, "--stage", str(stage)), job.outputs
    ), copying


def inspected(source: Path, _work: Path) -> tuple[Job, Job]:
    nothing = Job("python -c pass", (sys.executable, "-c", "pass"))
    return Job("zckpt inspect", (*ZCKPT, "inspect", str(source))), nothing


def inspected_alone(source: Path, _work: Path) -> tuple[Job]:
    return (Job("zckpt inspect", (*ZCKPT, "inspect", str(source))),)


def converted_alone(source: Path, work: Path) -> tuple[Job]:
    return (convert_job(source, work),)


def convert_job(source: Path, work: Path) -> Job:
    target = work / "zckpt"
    return Job(f"convert {source.name}", (*ZCKPT, "convert", str(source), str(target)), (target,))


def verified(source: Path, _work: Path) -> tuple[Job, Job]:
    """`zckpt verify`, and zckpt's own reading of all tensors, without any checksum."""
    reading = (sys.executable, "-m", "benchmarks.verify", "--read", str(source))
    return Job("zckpt verify", (*ZCKPT, "verify", str(source))), Job("reading once", reading)


def verified_beside_cat(source: Path, _work: Path) -> tuple[Job, Job]:
    """`zckpt verify`, and `cat` of all files into /dev/null."""
    files = sorted(map(str, source.rglob("*.pt")))
    cat = ("sh", "-c", 'cat "$@" > /dev/null', "sh", *files)
    return Job("zckpt verify", (*ZCKPT, "verify", str(source))), Job("cat", cat)


def tenfold(source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt convert` of a checkpoint, and of one with a tenth of its bytes."""
    return convert_job(source, work), convert_job(made(source.parent, "z3-12M"), work)


def copied_once(source: Path, work: Path) -> tuple[Job, Job]:
    """`zckpt convert`, and a program that reads and writes every byte once."""
    theirs = work / "copies"
    files = sorted(map(str, source.rglob("*.pt")))
    script = 'mkdir "$1" && cd "$1" && shift && cat "$@" > all'
    copy = Job("cat", ("sh", "-c", script, "sh", str(theirs), *files), (theirs,))
    return convert_job(source, work), copy


def launched(source: Path, work: Path) -> tuple[Job, Job, Job]:
    """torchrun with two processes; one process with two threads; torchrun with nothing to do."""
    one, _, together, start = nodes.jobs(source, work, 2, ())
    return together, one, start


# -- checkpoints

ENGINE_MADE = {
    "z3": ("3", "4", "124M"),
    "z2": ("2", "4", "124M"),
    "z3-12M": ("3", "4", "12M"),
    "z3-355M": ("3", "4", "355M"),
    "z2-355M": ("2", "4", "355M"),
    "many": ("3", "16", "many"),
}
"""What benchmarks.checkpoints makes with DeepSpeed: stage, dp, size."""
MADE = {"pieces": (20_000, 64), "wide": (2_000, 1024)}
"""What benchmarks.scale makes: tensors and ranks."""


def made(work: Path, name: str) -> Path:
    """A checkpoint in WORK; makes it first if it is missing."""
    path = work / name
    if path.exists():
        return path
    if name in MADE:
        process = get_context("spawn").Process(target=scale.make, args=(path, *MADE[name]))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
        return path
    if name == "dcp":
        source = str(made(work, "z3"))
        command = [*ZCKPT, "convert", source, str(path), "--to", "dcp", "--dp", "4"]
    else:
        stage, dp, size = ENGINE_MADE[name]
        command = [sys.executable, "-m", "benchmarks.checkpoints", str(path)]
        command += ["--stage", stage, "--dp", dp, "--size", size]
    subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL)
    return path


# -- rows

CP = (Goal("wall", wall, 0.8, 0.65), Goal("CPU", cpu, 0.8, 0.5))
UNIVERSAL = (
    Goal("times faster", times(wall), 15, 25, True),
    Goal("times less CPU", times(cpu), 30, 45, True),
)
EXPORT = (
    Goal("times faster", times(wall), 12, 15, True),
    Goal("times less CPU", times(cpu), 10, 13, True),
    Goal("times less memory", times(peak), 20, 45, True),
)
LAUNCH = (
    Goal("wall without start", without_start, 1.15, 1.0),
    Goal("wall with start", with_start, 1.15, 1.0),
)


def rows() -> Iterator[Row]:
    for name in ("z3", "z2", "z3-355M", "z2-355M"):
        yield Row("convert / cp + sync", name, partial(converted, "cp", None), CP)
    # the same stage, and another one: from stage 3 that writes 17 % more bytes than `cp` copies
    for name, stage in (("z2", 1), ("z2", 2), ("z3", 3), ("z3", 1), ("z3", 2), ("z2", 3)):
        for dp in (3, 8, 64):
            jobs = partial(resharded, stage, dp)
            title = f"reshard to ZeRO-{stage}, dp {dp} / cp + sync"
            yield Row(title, name, jobs, (Goal("wall", wall, 0.95, 0.8),))
    for name in ("z3", "z2"):
        ds = partial(converted, "universal", None)
        yield Row("ds_to_universal / convert", name, ds, UNIVERSAL)
    many = (Goal("times faster", times(wall), 50, 100, True),)
    yield Row("ds_to_universal / convert", "many", partial(converted, "universal", None), many)
    yield Row("zero_to_fp32 / fp32 export", "z3", partial(converted, "fp32", None), EXPORT)
    whole = (Goal("times faster", times(wall), 8, 12, True),)
    yield Row("dcp_to_torch_save / --to gathered", "dcp", partial(converted, "torch", None), whole)
    memories = (Goal("peak memory", peak, 1.1, 1.02),)
    yield Row("convert, 10 times the bytes / one", "z3", tenfold, memories, 3)
    speed = (Goal("M pieces / CPU s", pieces, 2, 4, True),)
    yield Row("convert, 20,000 tensors x dp 64", "pieces", converted_alone, speed, 3)
    bytes_moved = (Goal("bytes moved", moved, 1.02, 1.005),)
    yield Row("convert / reading and writing once", "z3", copied_once, bytes_moved, 3)
    cold = (Goal("wall", wall, 0.9, 0.65),)
    on_disk = partial(converted, "cp", None)
    yield Row("convert, cold source / cp + sync", "z3", on_disk, cold, is_cold=True)
    for name in ("z3-355M", "z3"):
        yield Row("inspect / python -c pass", name, inspected, (Goal("CPU", cpu, 4, 3),), 15)
    seconds = (Goal("CPU s", own_cpu, 4, 1),)
    yield Row("inspect, 2,000 tensors x dp 1024", "wide", inspected_alone, seconds, 3)
    for name in ("z3", "z2", "z3-355M", "z2-355M"):
        goals = (Goal("wall", wall, 1.3, 1.1),)
        yield Row("verify / reading once", name, verified, goals, 9)
        yield Row("verify / cat", name, verified_beside_cat, goals, 9)
    for name in ("z3", "z3-355M"):
        yield Row("torchrun, 2 processes / 1 with 2 threads", name, launched, LAUNCH)


ROWS = tuple(rows())
