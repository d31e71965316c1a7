"""How the cost of zckpt grows with tensors and ranks: CPU, wall time and peak memory of each size.

    python -m benchmarks.scale WORK --tensors 100 1000 10000 100000 --dp 4
    python -m benchmarks.scale WORK --tensors 20000 --dp 4 16 64 --command convert
    python -m benchmarks.scale WORK --tensors 2000 --dp 1024 --command inspect
    python -m benchmarks.scale WORK --tensors 200 --gb 0.01 0.1 1 10 --command convert

Makes ZeRO-3 checkpoints with three slots, without the engine. All ranks have pieces of all tensors.
Every second tensor is small, as a bias is. A piece is the part of a tensor that a rank has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .measure import ZCKPT, Cost, Job, run, spread

WIDTHS = (32, 2)  # elements of a rank's slice of a weight, and of a bias
SLOTS = ("master", "exp_avg", "exp_avg_sq")
TAG = "global_step1"


def make(root: Path, tensors: int, dp: int, gigabytes: float = 0.0) -> None:
    """A ZeRO-3 checkpoint of `dp` ranks that all have the same tensors; needs torch.

    Its weights are as large as it takes for `gigabytes` of optimizer files, if that is not 0.

    It runs in a process of its own: one that has imported torch would add its memory to the peak of
    every process that it starts.
    """
    import torch

    (root / TAG).mkdir(parents=True)
    (root / "latest").write_text(TAG)
    weight = int(gigabytes * 1e9 / (tensors / 2 * dp * len(SLOTS) * 4)) or WIDTHS[0]
    widths = {
        f"layers.{number // 2}.{('weight', 'bias')[number % 2]}": (weight, WIDTHS[1])[number % 2]
        for number in range(tensors)
    }
    optimizer = optimizer_states(widths, dp)
    states = {
        "zero_pp_rank_{}_mp_rank_00_model_states.pt": model_states(widths, dp),
        "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt": optimizer,
    }
    for name, state in states.items():
        for rank in range(dp):  # no links: the folder in each zip has the name of its file
            if state is optimizer:  # nor equal files: those would be copies
                optimizer["optimizer_state_dict"]["fp32_flat_groups"][0][0] = rank
            torch.save(state, root / TAG / name.format(rank))


def model_states(widths: dict[str, int], dp: int) -> dict[str, Any]:
    """As DeepSpeed 0.19.8 saves them: an empty placeholder for every weight."""
    import torch

    return {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in widths},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: torch.Size([width * dp]) for name, width in widths.items()}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 1,
        "skipped_steps": 0,
        "global_samples": dp,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }


def optimizer_states(widths: dict[str, int], dp: int) -> dict[str, Any]:
    """One flat buffer for each slot, with random numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    master, exp_avg, exp_avg_sq = (
        torch.rand(sum(widths.values()), generator=generator) for _ in SLOTS
    )
    state = {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": dp,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
            "fp32_flat_groups": [master],
        },
        "ds_config": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }


def command(name: str, source: Path, target: Path) -> Job:
    """One of the commands that are measured, as a whole process."""
    words: dict[str, tuple[str, ...]] = {
        "inspect": ("inspect", str(source)),
        "dry-run": ("convert", str(source), str(target), "--dry-run"),
        "convert": ("convert", str(source), str(target), "-q"),
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
    parser.add_argument("--gb", type=float, nargs="+", default=[0.0], help="10^9 bytes in all")
    parser.add_argument("--command", nargs="+", default=["inspect", "dry-run", "convert"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    try:
        for dp, tensors, size in product(arguments.dp, arguments.tensors, arguments.gb):
            source = arguments.work / f"{tensors}x{dp}"
            process = get_context("spawn").Process(target=make, args=(source, tensors, dp, size))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
            measure(source, tensors, dp, arguments)
            shutil.rmtree(source)
    finally:
        shutil.rmtree(arguments.work)


def measure(source: Path, tensors: int, dp: int, arguments: argparse.Namespace) -> None:
    """Runs the commands A B A B ..., after one round that is not counted, and prints their cost."""
    jobs = [command(name, source, arguments.work / "target") for name in arguments.command]
    costs: dict[str, list[Cost]] = {job.name: [] for job in jobs}
    for number in range(arguments.rounds + 1):
        for job in jobs:
            cost = run(job)
            if number:
                costs[job.name].append(cost)
            for output in job.outputs:
                shutil.rmtree(output, ignore_errors=True)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    pieces = tensors * dp * len(SLOTS)
    size = sum(path.stat().st_size for path in source.rglob("*_optim_states.pt")) / 1e9
    about = f"{tensors:,} tensors, dp {dp}, {pieces:,} pieces, {size:.2f} GB"
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


if __name__ == "__main__":
    main()
