"""Measures the time to the first step on another number of ranks, for several ways to resume.

    python -m benchmarks.checkpoints /big/z3 --stage 3 --dp 4 --size 124M
    python -m benchmarks.resume /big/z3 /big/work --dp 2 --rounds 5

Each round starts a DeepSpeed training for each way. Its engine is ready before the clock starts.
The step is left out for a large model (`--size 1B`):

    no copy      zckpt.deepspeed.load_checkpoint, a step
    names        zckpt.auto_resume with copy=False and verify="files", load_checkpoint, a step
    engine       load_checkpoint of a checkpoint of this size, a step: the lower limit
    auto         zckpt.auto_resume, load_checkpoint, a step
    again        the same, with the copy that an earlier start has written
    by hand      `zckpt reshard`, load_checkpoint, a step
    universal    ds_to_universal, load_checkpoint with load_universal, a step
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .measure import ENVIRONMENT, ROOT, ZCKPT, Cost, Job, interleave, ratio, spread

WAYS = ("no copy", "names", "engine", "auto", "again", "by hand", "universal")


@dataclass(frozen=True)
class Setting:
    """One start of a training: the way to resume, the source, the output folder, and the sizes."""

    way: str
    source: Path
    work: Path
    dp: int
    stage: int
    size: str


def measure(number: int, store: Path, setting: Setting) -> None:
    """Resumes in one rank and runs a step; rank 0 writes the seconds until both have ended."""
    import torch

    from tests.engines import rank

    from .checkpoints import LARGE, TOKENS, VOCABULARY, engine_of

    rank.join(number, setting.dp, store)
    is_universal = setting.way == "universal"
    engine = engine_of(setting.size, setting.stage, checkpoint={"load_universal": is_universal})
    if setting.way == "engine":
        found(setting, number)
    torch.distributed.barrier()
    started = time.monotonic()
    if setting.way == "no copy":
        import zckpt.deepspeed

        path, tag = str(setting.source), None
        loaded, _ = zckpt.deepspeed.load_checkpoint(engine, path)
    else:
        path, tag = found(setting, number)
        loaded, _ = engine.load_checkpoint(path, tag=tag)
    assert loaded is not None, f"nothing was loaded from {path}"
    torch.distributed.barrier()
    ready = time.monotonic()
    seconds = {"seconds": ready - started}
    if setting.size not in LARGE:  # a step of a large model takes minutes on a CPU
        engine.backward(engine(torch.randint(VOCABULARY, (1, TOKENS))))
        engine.step()
        torch.distributed.barrier()
        seconds["with_step"] = time.monotonic() - started
    if number == 0:
        (setting.work / "seconds").write_text(json.dumps(seconds))


def found(setting: Setting, number: int) -> tuple[str, str | None]:
    """Returns the directory and the tag to load; first writes them, if this way to resume does."""
    import torch

    from zckpt.resume.auto import auto_resume

    source, work = setting.source, setting.work
    if setting.way in ("auto", "again", "names"):
        words: dict[str, Any] = {"scratch": work / "auto", "tell": lambda lines: None}
        if setting.way == "names":
            words |= {"copy": False, "verify": "files"}
        path = auto_resume(source, **words)
        assert path is not None
        return path.report["load_dir"], path.tag
    tag = (source / "latest").read_text().strip()
    if setting.way in ("by hand", "engine"):
        command: list[str] = [*ZCKPT, "reshard", str(source), str(work / "hand")]
        command += ["--dp", str(setting.dp), "--quiet", "--single"]
        result: tuple[str, str | None] = (str(work / "hand"), tag)
    else:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(source / tag), "--inject_missing_state"]
        command += ["--output_folder", str(work / "universal" / "out")]
        result = (str(work / "universal"), "out")
    if number == 0 and not Path(result[0]).exists():
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL)
    torch.distributed.barrier()
    return result


def start(setting: Setting) -> None:
    """Starts the training once, and prints the seconds as a JSON document."""
    from tests.engines import rank, zygote

    from .checkpoints import TIMEOUT

    rank.prepare()
    setting.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (Path(meeting) / "store", setting)
        failure = zygote.run(measure, setting.dp, arguments, setting.work / "ranks.log", TIMEOUT)
    if failure is not None:
        sys.exit(f"{failure}; see {setting.work / 'ranks.log'}")
    print((setting.work / "seconds").read_text())


def jobs(
    source: Path, work: Path, dp: int, stage: int, size: str, ways: Sequence[str]
) -> list[Job]:
    """Returns a job for each way; "again" and "engine" keep what they wrote in the first round."""
    result = []
    for way in ways:
        folder = work / way.replace(" ", "-")
        command: list[Any] = [sys.executable, "-m", "benchmarks.resume", source, folder]
        command += ["--dp", dp, "--stage", stage, "--size", size, "--way", way, "--json"]
        outputs = () if way in ("again", "engine") else (folder,)
        result.append(Job(way, [str(word) for word in command], outputs))
    return result


def report_of(seconds: str, cost: Cost) -> float:
    """One of the times that a start has printed."""
    return float(cost.report[seconds])


def report(costs: dict[str, list[Cost]]) -> None:
    print("load average " + ", ".join(f"{one:.1f}" for one in os.getloadavg()))
    for seconds, until in (("seconds", "the first step"), ("with_step", "the end of this step")):
        measured = {
            way: runs for way, runs in costs.items() if all(seconds in cost.report for cost in runs)
        }
        if measured:
            print(f"from the call to {until}:")
        for way, runs in measured.items():
            words = [f"{spread([cost.report[seconds] for cost in runs])} s"]
            for other in ("engine", "auto"):
                if other in measured and other != way:
                    of_report = partial(report_of, seconds)
                    times = ratio(runs, measured[other], of_report)[1]
                    words.append(f"{times} times that of {other}")
            print(f"    {way:12} " + ", ".join(words))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--size", default="124M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--way", choices=WAYS, help="a start of this one alone")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    source, work = words.source.resolve(), words.work.resolve()
    if words.way:
        start(Setting(words.way, source, work, words.dp, words.stage, words.size))
        return
    try:
        report(
            interleave(
                jobs(source, work, words.dp, words.stage, words.size, words.ways), words.rounds
            )
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    from benchmarks import resume  # so that forks name this module

    resume.main()
