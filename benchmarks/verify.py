"""Compares `zckpt verify` with reading the same checkpoints once with zckpt's own reader.

    python -m benchmarks.verify SRC --against DST --rounds 9
    python -m benchmarks.verify --read PATH...            the reading alone, in this process

DST is SRC in another format, as `zckpt convert` makes it. The reading uses the threads and chunks
of `verify`, but no checksum and no comparison: the difference is the cost of the proof. Files are
in the page cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zckpt.api import read
from zckpt.core.passes.pieces import ElementReader, ReadRequest
from zckpt.core.passes.resources import DEFAULT_COPYING, READING_JOBS
from zckpt.core.passes.streaming import batches, chunk_size, stream
from zckpt.core.storage.fileio import Buffer
from zckpt.core.storage.records import RecordChecker

TARGETS = {"pair": 1.6, "alone": 1.3}  # times the wall of the reading


def read_once(paths: list[str]) -> None:
    """Reads every element of all checkpoints, with the default threads and memory of `verify`."""
    manifests = [read(path) for path in paths]
    jobs = READING_JOBS
    dp = max(manifest.dp for manifest in manifests)
    chunk = chunk_size(dp, jobs, DEFAULT_COPYING.memory // 2)

    def start(readers: Sequence[ElementReader]) -> Callable[[list[list[ReadRequest]]], None]:
        (element_reader,) = readers
        view = Buffer(chunk).view
        return lambda batch: element_reader.read(batch[0], view)

    alone = ([entry] for manifest in manifests for entry in manifest.entries.values())
    tasks = batches(alone, chunk)
    stream(tasks, jobs, [RecordChecker(())], chunk, start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="SRC")
    parser.add_argument("--against", type=Path, metavar="DST")
    parser.add_argument("--read", action="store_true", help="read the paths once, and no more")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    paths = [str(path.resolve()) for path in arguments.paths]
    if arguments.read:
        read_once(paths)
        return
    if arguments.against is None or len(paths) != 1:
        parser.error("give one SRC, and --against DST")
    report(paths[0], str(arguments.against.resolve()), arguments.rounds)


def report(source: str, other: str, rounds: int) -> None:
    """Prints what `verify` costs, with and without --against, each beside reading alone."""
    from .measure import ZCKPT, Job, interleave, ratio, table  # the reading has no need of it

    reading = (sys.executable, "-m", "benchmarks.verify", "--read")
    pairs = {
        "pair": (
            Job("zckpt verify SRC --against DST", (*ZCKPT, "verify", source, "--against", other)),
            Job("reading both once", (*reading, source, other)),
        ),
        "alone": (
            Job("zckpt verify SRC", (*ZCKPT, "verify", source)),
            Job("reading SRC once", (*reading, source)),
        ),
    }
    for kind, jobs in pairs.items():
        costs = interleave(jobs, rounds)
        table(costs)
        proof, once = (costs[job.name] for job in jobs)
        wall, text = ratio(proof, once, lambda cost: cost.wall)
        good = "met" if wall <= TARGETS[kind] else "MISSED"
        print(f"wall, {' / '.join(job.name for job in jobs)}")
        print(f"{'':34}{text:>25}   target <= {TARGETS[kind]}: {good}")
        print(f"CPU{'':31}{ratio(proof, once, lambda cost: cost.cpu)[1]:>25}")


if __name__ == "__main__":
    main()
