"""Compares several processes that share a conversion with one process of as many threads.

    python -m benchmarks.launches SRC --processes 2 --rounds 5

Outputs go into SRC's own filesystem; sources are in the page cache. All use N threads in total:

* one process: `zckpt convert -j N`.
* parts: N processes with `--part K/N -j 1`, started together. They need no torch, and each of them
  reads the source's metadata.
* torchrun: `torchrun --nproc-per-node N -m zckpt convert -j 1`. The seconds in its report are
  compared: torchrun and its processes import torch, whatever the size of a checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import ZCKPT, Cost, Job, interleave, ratio, table

MOST = 1.0  # of one process's seconds


def jobs(source: Path, work: Path, processes: int, more: Sequence[str]) -> list[Job]:
    """The three commands, in the order in which they are compared."""
    out = work / "out"
    words = ["convert", str(source), str(out), "--json", *more]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    parts = [
        shlex.join([*ZCKPT, *words, "-j", "1", "--part", f"{number}/{processes}"])
        for number in range(1, processes + 1)
    ]
    waiting = " ".join(f"wait $P{number} || exit 1;" for number in range(processes))
    starting = " ".join(f"{part} & P{number}=$!;" for number, part in enumerate(parts))
    return [
        Job("one process", (*ZCKPT, *words, "-j", str(processes)), (out,)),
        Job("parts", ("sh", "-c", f"{starting} {waiting}"), (out,)),
        Job("torchrun", (*torchrun, "-m", "zckpt", *words, "-j", "1"), (out,)),
    ]


def report(costs: dict[str, list[Cost]]) -> None:
    """Prints ratios over the rounds: of whole processes, and of the seconds in the reports."""
    one, parts, launched = costs.values()
    for name, other in (("parts", parts), ("torchrun", launched)):
        print(f"wall, {name} / one process{'':12}{ratio(other, one, lambda cost: cost.wall)[1]}")
        print(f"CPU,  {name} / one process{'':12}{ratio(other, one, lambda cost: cost.cpu)[1]}")
    middle, text = ratio(launched, one, lambda cost: cost.own)
    verdict = "met" if middle <= MOST else "MISSED"
    print(f"by the reports, torchrun / one process  {text}   target <= {MOST}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for outputs; default beside SRC")
    parser.add_argument("more", nargs="*", help="options of `zckpt convert`, after --")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    work = (arguments.work or source.with_name(f"{source.name}.work")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    costs = interleave(jobs(source, work, arguments.processes, arguments.more), arguments.rounds)
    table(costs)
    report(costs)
    work.rmdir()


if __name__ == "__main__":
    main()
