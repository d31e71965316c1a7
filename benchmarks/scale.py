"""Measures how the cost of zckpt grows with tensors and ranks: CPU, wall time and peak memory.

    python -m benchmarks.scale WORK --tensors 100 1000 10000 100000 --dp 4
    python -m benchmarks.scale WORK --tensors 20000 --dp 4 16 64 --command convert
    python -m benchmarks.scale WORK --tensors 2000 --dp 1024 --command inspect
    python -m benchmarks.scale WORK --tensors 200 --gb 0.01 0.1 1 10 --command convert
    python -m benchmarks.scale WORK --format dcp --tensors 800 5600 --dp 8 64 --command inspect
    python -m benchmarks.scale WORK --format zero3 --tensors 45000 --dp 32 128 --command inspect
    python -m benchmarks.scale WORK --format zero1 --tensors 800 --dp 64 1024 --command inspect
    python -m benchmarks.scale WORK --format grid --tensors 240 --grid 4x4x4 8x8x8 --command inspect
    python -m benchmarks.scale WORK --tensors 100 --dp 4 --checkpoints 1 30 300 --command list

Makes ZeRO-3 checkpoints with three slots, without the engine. All ranks have pieces of all tensors.
Every second tensor is small, as a bias is. A piece is the part of a tensor that a rank has. The
other formats have holes for tensors: `dcp` are directories of torch.distributed.checkpoint, `zero1`
and `zero3` DeepSpeed's, and `grid` its pipelines of tensor ranks at ZeRO-1. Beside them torch is
measured without its imports: its reader of `.metadata`, or torch.load of the smallest file
(`mmap=True`), which it can map.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from . import dcp, grid, zero
from .measure import ZCKPT, Cost, Job, run, spread

WIDTHS = (32, 2)  # elements of a rank's slice of a weight, and of a bias
SLOTS = ("master", "exp_avg", "exp_avg_sq")
TAG = "global_step100"
FORMATS = ("deepspeed", "dcp", "zero1", "zero3", "grid")


def make(root: Path, tensors: int, dp: int, gigabytes: float = 0.0) -> None:
    """Writes a ZeRO-3 checkpoint of `dp` ranks that all have pieces of the same tensors.

    `gigabytes` is the size of all its optimizer files. If it is 0, a rank has 32 elements of each
    weight.

    Needs torch, so it must run in a process of its own: every process that it started would begin
    with its peak memory, to which torch adds.
    """
    import torch

    (root / TAG).mkdir(parents=True)
    (root / "latest").write_text(TAG)
    weight = int(gigabytes * 1e9 / (tensors / 2 * dp * len(SLOTS) * 4)) or WIDTHS[0]
    widths = {
        f"layers.{number // 2}.{('weight', 'bias')[number % 2]}": (weight, WIDTHS[1])[number % 2]
        for number in range(tensors)
    }
    shapes = {name: (width * dp,) for name, width in widths.items()}
    optimizer = optimizer_states(widths, dp)
    states = {
        "zero_pp_rank_{}_mp_rank_00_model_states.pt": zero.model(shapes, dp, 3, is_cut=True),
        "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt": optimizer,
    }
    for name, state in states.items():
        for rank in range(dp):  # no links: the folder in each zip has the name of its file
            if state is optimizer:  # nor equal files: those would be copies
                optimizer["optimizer_state_dict"]["fp32_flat_groups"][0][0] = rank
            torch.save(state, root / TAG / name.format(rank))


def optimizer_states(widths: dict[str, int], dp: int) -> dict[str, Any]:
    """The content of a rank's optimizer file: one flat buffer of random numbers for each slot."""
    import torch

    generator = torch.Generator().manual_seed(0)
    master, exp_avg, exp_avg_sq = (
        torch.rand(sum(widths.values()), generator=generator) for _ in SLOTS
    )
    state = {"step": torch.tensor(100.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return zero.flat(dp, master, state)


def command(name: str, source: Path, target: Path) -> Job:
    """Returns the job for one of the measured commands."""
    words: dict[str, tuple[str, ...]] = {
        "inspect": ("inspect", str(source)),
        "dry-run": ("convert", str(source), str(target), "--dry-run"),
        "convert": ("convert", str(source), str(target), "-q"),
        "list": ("list", str(source)),
        "reshard": ("reshard", str(source), str(target), "--dp", "8", "-q"),
    }
    return Job(name, (*ZCKPT, *words[name]), (target,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK", help="a new directory; it is removed")
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--dp", type=int, nargs="+", default=[4])
    parser.add_argument("--grid", type=grid_of, nargs="+", default=[(2, 2, 2)], metavar="PPxTPxDP")
    parser.add_argument("--format", choices=FORMATS, default="deepspeed")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.0], help="10^9 bytes in all")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[1], help="in one run")
    parser.add_argument("--command", nargs="+", default=["inspect", "dry-run", "convert"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    try:
        format = arguments.format
        grids = arguments.grid if format == "grid" else [(1, 1, dp) for dp in arguments.dp]
        sizes = (grids, arguments.tensors, arguments.gb, arguments.checkpoints)
        for (pp, tp, dp), tensors, size, checkpoints in product(*sizes):
            source = arguments.work / f"{tensors}x{pp}x{tp}x{dp}"
            making = (make, (source, tensors, dp, size))
            if format == "dcp":
                making = (dcp.make, (source, tensors, dp))
            elif format == "grid":
                making = (grid.make, (source, tensors, pp, tp, dp))
            elif format != "deepspeed":
                making = (zero.make, (source, tensors, dp, int(format[-1])))
            process = get_context("spawn").Process(target=making[0], args=making[1])
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
            for number in range(1, checkpoints):
                shutil.copytree(source / TAG, source / f"global_step{number + 1}")
            measure(source, tensors, (pp, tp, dp), arguments)
            shutil.rmtree(source)
    finally:
        shutil.rmtree(arguments.work)


def grid_of(text: str) -> tuple[int, int, int]:
    """The sizes pp, tp and dp in a text such as 8x8x8."""
    pp, tp, dp = map(int, text.split("x"))
    return pp, tp, dp


def measure(
    source: Path, tensors: int, sizes: tuple[int, int, int], arguments: argparse.Namespace
) -> None:
    """Runs the commands A B A B ..., and prints their costs; the first round is not counted.

    `sizes` are pp, tp and dp.
    """
    jobs = [command(name, source, arguments.work / "target") for name in arguments.command]
    by_torch = {"deepspeed": None, "dcp": "benchmarks.dcp"}
    torch_reads = by_torch.get(arguments.format, "benchmarks.zero")
    if torch_reads:
        jobs.append(Job("torch", (sys.executable, "-m", torch_reads, str(source), "--json")))
    costs: dict[str, list[Cost]] = {job.name: [] for job in jobs}
    for number in range(arguments.rounds + 1):
        for job in jobs:
            cost = run(job)
            if number:
                costs[job.name].append(cost)
            for output in job.outputs:
                shutil.rmtree(output, ignore_errors=True)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    pieces = tensors * sizes[-1] * len(SLOTS)
    torch_alone = costs.pop("torch", [])
    if arguments.format == "dcp":
        pieces = torch_alone[0].report["items"]
    elif arguments.format == "grid":
        pieces = grid.pieces_of(tensors, *sizes) * len(SLOTS)
    names = "*.distcp" if arguments.format == "dcp" else "*_optim_states.pt"
    size = sum(path.stat().st_size for path in source.rglob(names)) / 1e9
    axes = zip(("pp", "tp", "dp"), sizes, strict=True)
    ranks = ", ".join(f"{axis} {n}" for axis, n in axes if n > 1 or axis == "dp")
    about = f"{tensors:,} tensors, {ranks}, {pieces:,} pieces, {size:.2f} GB"
    print(f"\n{about}; n = {arguments.rounds}, load {load}")
    print(f"{'':10}{'CPU s':>25}{'wall s':>25}{'peak MiB':>10}{'us/tensor':>11}{'Mpieces/s':>11}")
    for name, runs in costs.items():
        cpu = [cost.cpu for cost in runs]
        middle = statistics.median(cpu)
        print(
            f"{name:10}{spread(cpu):>25}{spread([cost.wall for cost in runs]):>25}"
            f"{max(cost.memory for cost in runs):>10.0f}"
            f"{1e6 * middle / tensors:>11.1f}{pieces / middle / 1e6:>11.2f}",
            flush=True,
        )
    if torch_alone:
        cpu = [cost.report["seconds"] for cost in torch_alone]
        memory = max(cost.report["mib"] for cost in torch_alone)
        print(f"{'torch':10}{spread(cpu):>25}{'its reading alone':>25}{memory:>10.0f}")


if __name__ == "__main__":
    main()
