"""The rows of the table: what is compared with what, and the targets for zckpt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from . import convert, launches, resume, scale
from .measure import ENVIRONMENT, ROOT, ZCKPT, Cost, Job

Value = Callable[..., float]
"""A function of one round's costs, which are in the order of the row's jobs."""


@dataclass(frozen=True)
class Goal:
    """One figure of a row, and its targets; with `more`, larger figures are better."""

    name: str
    of: Value
    target: float
    stretch: float
    more: bool = False

    def values(self, *costs: Sequence[Cost]) -> list[float]:
        """The figure of each round; `costs` are those of each job."""
        return [self.of(*each) for each in zip(*costs, strict=True)]

    def verdict(self, value: float) -> str:
        met = [value >= aim if self.more else value <= aim for aim in (self.target, self.stretch)]
        return "stretch" if met[1] else "met" if met[0] else "MISSED"


@dataclass(frozen=True)
class Row:
    """One comparison: its name, the checkpoint in WORK, the jobs (zckpt's first), and the goals."""

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
    """Returns the inverse of a ratio: the cost of the other program divided by zckpt's."""
    return lambda ours, theirs: figure(theirs, ours)


def own_cpu(ours: Cost) -> float:
    """The CPU seconds of zckpt."""
    return ours.cpu


def pieces(ours: Cost) -> float:
    """Millions of pieces (parts of tensors on one rank) per CPU second."""
    tensors, dp = MADE["pieces"]
    return tensors * dp * len(scale.SLOTS) / ours.cpu / 1e6


def own(ours: Cost, theirs: Cost) -> float:
    """The ratio of the seconds in both reports."""
    return ours.own / theirs.own


# -- jobs


def converted(against: str, dp: int | None, source: Path, work: Path) -> tuple[Job, Job]:
    return convert.jobs(source, work, against, dp)


def resharded(stage: int, dp: int, source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt reshard` to a stage and a size, and `cp` of the source's files."""
    job, copying = convert.jobs(source, work, "cp", dp)
    return Job(
        f"to ZeRO-{stage} dp {dp}", (*job.command, "--stage", str(stage)), job.outputs
    ), copying


def inspected(source: Path, _work: Path) -> tuple[Job]:
    return (Job("zckpt inspect", (*ZCKPT, "inspect", str(source))),)


def version(_source: Path, _work: Path) -> tuple[Job]:
    return (Job("zckpt --version", (*ZCKPT, "--version")),)


def to_dcp(source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt convert --to dcp`, and `cp` of the files that it writes."""
    target, kept = work / "zckpt", made(source.parent, "dcp")
    command = (*ZCKPT, "convert", str(source), str(target), "--to", "dcp", "--dp", "4")
    copying = convert.copying("cp + sync", sorted(kept.glob("*.distcp")), work / "cp")
    return Job("convert --to dcp", command, (target,)), copying


def converted_alone(source: Path, work: Path) -> tuple[Job]:
    return (convert_job(source, work),)


def convert_job(source: Path, work: Path) -> Job:
    target = work / "zckpt"
    return Job(f"convert {source.name}", (*ZCKPT, "convert", str(source), str(target)), (target,))


def verified(source: Path, _work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt verify`, and zckpt's own reading of all tensors without any checksum."""
    reading = (sys.executable, "-m", "benchmarks.verify", "--read", str(source))
    return Job("zckpt verify", (*ZCKPT, "verify", str(source))), Job("reading once", reading)


def verified_beside_cat(source: Path, _work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt verify`, and `cat` of all files into /dev/null."""
    files = sorted(map(str, source.rglob("*.pt")))
    cat = ("sh", "-c", 'cat "$@" > /dev/null', "sh", *files)
    return Job("zckpt verify", (*ZCKPT, "verify", str(source))), Job("cat", cat)


def tenfold(source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt convert` of a checkpoint, and of one with a tenth of its bytes."""
    return convert_job(source, work), convert_job(made(source.parent, "z3-12M"), work)


def copied_once(source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: `zckpt convert`, and `cat`, which reads and writes every byte once."""
    theirs = work / "copies"
    files = sorted(map(str, source.rglob("*.pt")))
    script = 'mkdir "$1" && cd "$1" && shift && cat "$@" > all'
    copy = Job("cat", ("sh", "-c", script, "sh", str(theirs), *files), (theirs,))
    return convert_job(source, work), copy


def launched(processes: int, source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: torchrun with several processes, and one process with as many threads."""
    one, _, together = launches.jobs(source, work, processes, ())
    return together, one


def resumed(way: str, source: Path, work: Path) -> tuple[Job, Job]:
    """Jobs: a training that resumes at another size by auto_resume, and by another way."""
    by_way = {job.name: job for job in resume.jobs(source, work, 2, int(source.name[1]), "124M")}
    return by_way["auto"], by_way[way]


# -- checkpoints

ENGINE_MADE = {
    "z3": ("3", "4", "124M"),
    "z2": ("2", "4", "124M"),
    "z3-12M": ("3", "4", "12M"),
    "z3-355M": ("3", "4", "355M"),
    "z2-355M": ("2", "4", "355M"),
    "many": ("3", "16", "many"),
}
"""The checkpoints that benchmarks.checkpoints makes with DeepSpeed: stage, dp, size."""
MADE = {"pieces": (20_000, 64), "wide": (2_000, 1024)}
"""The checkpoints that benchmarks.scale makes: numbers of tensors and of ranks."""


def made(work: Path, name: str) -> Path:
    """Returns the path of a checkpoint in WORK; makes the checkpoint first if it is missing."""
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

CP = (Goal("wall", wall, 0.85, 0.65), Goal("CPU", cpu, 1.3, 0.5))
UNIVERSAL = (
    Goal("times faster", times(wall), 15, 25, True),
    Goal("times less CPU", times(cpu), 30, 45, True),
)
EXPORT = (
    Goal("times faster", times(wall), 12, 15, True),
    Goal("times less CPU", times(cpu), 10, 13, True),
    Goal("times less memory", times(peak), 20, 45, True),
)
RESUMED = {"by hand": (1.0, 1.2), "universal": (5.0, 10.0)}
LAUNCH = (Goal("seconds of reports", own, 1.0, 0.9),)


def rows() -> Iterator[Row]:
    for name in ("z3", "z2", "z3-355M", "z2-355M"):
        yield Row("convert / cp + sync", name, partial(converted, "cp", None), CP)
    # the same stage, and another one: from stage 3 that writes 17 % more bytes than `cp` copies
    for name, stage in (("z2", 1), ("z2", 2), ("z3", 3), ("z3", 1), ("z3", 2), ("z2", 3)):
        for dp in (3, 8, 64):
            jobs = partial(resharded, stage, dp)
            title = f"reshard to ZeRO-{stage}, dp {dp} / cp + sync"
            yield Row(title, name, jobs, CP)
    dcp = (Goal("wall", wall, 0.9, 0.75), Goal("CPU", cpu, 1.3, 0.5))
    yield Row("convert --to dcp / cp + sync", "z3", to_dcp, dcp)
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
    on_disk = partial(converted, "cp", None)
    yield Row("convert, cold source / cp + sync", "z3", on_disk, CP, is_cold=True)
    yield Row("--version", "z3", version, (Goal("CPU s", own_cpu, 0.12, 0.06),), 15)
    yield Row("inspect", "z3", inspected, (Goal("CPU s", own_cpu, 0.15, 0.08),), 15)
    seconds = (Goal("CPU s", own_cpu, 4, 1),)
    yield Row("inspect, 2,000 tensors x dp 1024", "wide", inspected, seconds, 3)
    for name in ("z3", "z2", "z3-355M", "z2-355M"):
        # of ZeRO-2, masters are compared with the 16-bit weights
        goals = (Goal("wall", wall, 1.3 if name.startswith("z3") else 2.0, 1.1),)
        yield Row("verify / reading once", name, verified, goals, 9)
        yield Row("verify / cat", name, verified_beside_cat, goals, 9)
    for way, aims in RESUMED.items():
        goals = (Goal("times faster", times(own), *aims, True),)
        for name in ("z3", "z2"):
            yield Row(f"first step, {way} / auto_resume", name, partial(resumed, way), goals)
    for processes in (2, 3):
        title = f"torchrun, {processes} processes / 1 with {processes} threads"
        yield Row(title, "z3", partial(launched, processes), LAUNCH)


ROWS = tuple(rows())
