"""Helpers for measuring several processes together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from zckpt.proof.allgather.world import World


def together(world: World) -> None:
    """Waits until all processes and the GPU have come here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()


def head(world: World, threads: int, rounds: int) -> None:
    """Prints the device, the numbers of processes, threads and rounds, and the machine's load."""
    load_average = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    backend = f", {dist.get_backend()}" if world.size > 1 else ""
    print(f"{name}, {world.size} processes{backend}, {threads} threads each")
    print(f"n = {rounds}, load average {load_average}; min / median / max")
