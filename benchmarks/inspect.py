"""Measures `zckpt inspect` beside `python -c pass`.

python -m benchmarks.inspect SRC --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from .measure import ZCKPT, Cost, Job, interleave, table

TARGET = 0.15  # seconds of CPU, for a few ranks
MANY = 64  # rank files, from which on the CPU of each of them is what counts


def size(source: Path) -> int:
    """The bytes of all files; a file with several links counts once for each of them."""
    return sum(path.stat().st_size for path in source.rglob("*") if path.is_file())


def cpu(costs: list[Cost]) -> float:
    return statistics.median(cost.cpu for cost in costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    source = str(arguments.source.resolve())
    nothing = Job("python -c pass", (sys.executable, "-c", "pass"))
    jobs = [
        Job("zckpt inspect", (*ZCKPT, "inspect", source)),
        Job("zckpt inspect --json", (*ZCKPT, "inspect", source, "--json")),
    ]
    print(f"{source}: {size(arguments.source) / 1e9:.2f} GB")
    costs = interleave([nothing, *jobs], arguments.rounds)
    table(costs)
    files = sum(1 for _ in arguments.source.rglob("*_states.pt"))
    for job in jobs:
        if files >= MANY:
            each = (cpu(costs[job.name]) - cpu(costs[nothing.name])) / files
            print(f"CPU, {job.name}: {1000 * each:.2f} ms for each of {files} files")
            continue
        seconds = cpu(costs[job.name])
        verdict = "met" if seconds <= TARGET else "MISSED"
        print(f"CPU, {job.name}: {seconds:.3f} s   target <= {TARGET} s: {verdict}")


if __name__ == "__main__":
    main()
