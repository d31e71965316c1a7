"""`zckpt verify --gather` against gathering every parameter by itself, and against reading alone.

    python -m benchmarks.gather SRC --against DST --rounds 7
    torchrun --nproc-per-node 4 -m benchmarks.gather SRC --against DST

SRC is a DeepSpeed run directory, DST the same in another format. Everything is timed within one
process (or one per rank), after imports and one uncounted round. Warm; GB are those of both sides.

* each parameter: as engines did it before they gathered flat buffers. Every process loads its
  fragment, all_gather brings a list of them, which is concatenated and compared with a tensor that
  was loaded whole. Of the processes one compares each tensor, in turns.
* reading: the same files into small buffers (pinned, where there is a GPU), with the same threads,
  and from there to the device. The limit: what is read once cannot be gathered faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zckpt import api, formats
from zckpt.cli.parameters import Size
from zckpt.core.dtypes import SIZES, TORCH_NAMES
from zckpt.core.fileio import Reader, files_per_thread
from zckpt.core.fragments import Extent
from zckpt.core.manifest import Entry, Manifest
from zckpt.core.partition import Member, Partitioned, Whole
from zckpt.core.pieces import Gatherer, Ledger, Wanted
from zckpt.core.threads import share
from zckpt.proof.allgather.readers import READ
from zckpt.proof.allgather.world import World, join_world

from .measure import spread

LIMIT = 0.70  # of the throughput of reading
TIMES = 1.5  # faster than each parameter by itself, from two processes on


@dataclass(frozen=True)
class Setting:
    """What is measured: two checkpoints, by whom, and with what means."""

    source: Manifest
    other: Manifest
    world: World
    jobs: int
    memory: int


# -- zckpt


def verify(setting: Setting) -> int:
    """Gathers and compares by zckpt; gives the bytes of both sides."""
    report = api.verify(
        setting.source.root,
        setting.other.root,
        gather=True,
        device=setting.world.device.type,
        jobs=setting.jobs,
        memory=setting.memory,
    )
    if not report["equal"]:
        raise RuntimeError("SRC and DST differ: see `zckpt verify SRC --against DST --gather`")
    return int(report["bytes"])


# -- each parameter by itself


def each_parameter(setting: Setting) -> int:
    """Loads, gathers and compares one tensor after the other; gives the bytes of both sides."""
    world, entries = setting.world, setting.other.entries
    gatherer = Gatherer(Reader(), Ledger(()), READ)
    passed = place = 0
    for part in formats.named(setting.source.format).partitions(setting.source.root):
        for member in [part] if isinstance(part, Whole) else part.members:
            place += 1
            entry = entries.get(member.name)
            if entry is None or (entry.dtype, entry.shape) != (part.dtype, member.shape):
                continue
            passed += 2 * entry.length
            mine = place % world.size == world.rank
            if isinstance(part, Partitioned):
                found = gathered(gatherer, part, member, world)
            elif mine:
                found = load_whole(gatherer, part)
            if mine and not torch.equal(
                found.to(world.device).view(member.shape).view(bits(entry.dtype)),
                load_entry(gatherer, entry).to(world.device).view(bits(entry.dtype)),
            ):
                raise RuntimeError(f"{member.name} differs")
    gatherer.reader.close()
    return passed


def gathered(gatherer: Gatherer, part: Partitioned, member: Member, world: World) -> torch.Tensor:
    """A tensor of which every process loads the fragments of some ranks."""
    ranks = len(part.ranks)
    each = -(-ranks // world.size)
    pieces = list(fragments(part, member))
    shares = [pieces[first : first + each] for first in range(0, each * world.size, each)]
    lengths = [sum(piece.length for piece in listed) // SIZES[part.dtype] for listed in shares]
    own = load(gatherer, shares[world.rank], part.dtype).to(world.transport)
    if world.size == 1:
        whole = own
    elif len(set(lengths)) == 1:
        listed = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(listed, own)
        whole = torch.cat(listed)
    else:  # what NCCL's all_gather makes of fragments of several lengths; gloo's refuses them
        listed = [
            own if rank == world.rank else own.new_empty(length)
            for rank, length in enumerate(lengths)
        ]
        for rank, fragment in enumerate(listed):
            if len(fragment):
                dist.broadcast(fragment, rank)
        whole = torch.cat(listed)
    return whole.narrow(0, 0, member.numel)


def fragments(part: Partitioned, member: Member) -> Iterator[Extent]:
    """A tensor's bytes in every rank's part, padding included; some may be empty."""
    size, base = SIZES[part.dtype], 0
    for rank, extent in enumerate(part.ranks):
        start, stop = member.first - base, member.first - base + member.numel
        if part.interleaved:
            start, stop = member.first, member.first + -(-member.numel // len(part.ranks))
        else:
            base += part.length(rank)
        start, stop = (min(max(place, 0), part.length(rank)) for place in (start, stop))
        yield extent.part(start * size, stop * size)


def load(gatherer: Gatherer, pieces: Sequence[Extent], dtype: str) -> torch.Tensor:
    """Pieces of files as one flat tensor."""
    loaded = torch.empty(sum(piece.length for piece in pieces), dtype=torch.uint8)
    here = 0
    for piece in pieces:
        gatherer.reader.read(piece, memory(loaded)[here : here + piece.length])
        here += piece.length
    return loaded.view(getattr(torch, TORCH_NAMES[dtype]))


def load_whole(gatherer: Gatherer, part: Whole) -> torch.Tensor:
    flat = load(gatherer, [part.extent], part.dtype)
    if part.strides is None:
        return flat
    return flat.as_strided(part.shape, part.strides).contiguous()


def load_entry(gatherer: Gatherer, entry: Entry) -> torch.Tensor:
    """The other side's tensor, whole."""
    loaded = torch.empty(entry.length, dtype=torch.uint8)
    gatherer.gather([Wanted(entry, 0, entry.numel, 0)], memory(loaded))
    return loaded.view(getattr(torch, TORCH_NAMES[entry.dtype])).view(entry.shape)


def bits(dtype: str) -> torch.dtype:
    """NaNs are equal where their bits are."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[dtype]]


def memory(tensor: torch.Tensor) -> memoryview:
    held: Any = tensor.numpy()
    return memoryview(held)


# -- the limit


def read_only(setting: Setting) -> int:
    """Reads all files of both sides, and moves them to the device; gives the bytes of all."""
    world = setting.world
    wholes = [
        Extent(file, 0, os.path.getsize(file))
        for file in (*setting.source.files, *setting.other.files)
    ]
    pieces = [
        whole.part(start, min(start + READ, whole.length))
        for whole in wholes
        for start in range(0, whole.length, READ)
    ]
    share(iter(pieces[world.rank :: world.size]), setting.jobs, lambda: mover(setting))
    return sum(whole.length for whole in wholes)


@contextmanager
def mover(setting: Setting) -> Iterator[Callable[[Extent], None]]:
    """One thread's buffers: while one is moved to the device, the other is read into."""
    device = setting.world.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # each thread has its own
    reader = Reader(files_per_thread(setting.jobs))
    stream: Any = torch.cuda.Stream() if cuda else None
    slots = [
        (
            torch.empty(READ, dtype=torch.uint8, pin_memory=cuda),
            torch.empty(READ, dtype=torch.uint8, device=device) if cuda else None,
            torch.cuda.Event() if cuda else None,
        )
        for _ in range(2 if cuda else 1)
    ]

    def carry_out(extent: Extent) -> None:
        host, near, moved = slots[0]
        slots.append(slots.pop(0))
        if moved is not None:
            moved.synchronize()
        reader.read(extent, memory(host)[: extent.length])
        if near is not None:
            with torch.cuda.stream(stream):
                near[: extent.length].copy_(host[: extent.length], non_blocking=True)
                moved.record()

    try:
        yield carry_out
        if cuda:
            stream.synchronize()
    finally:
        reader.close()


# -- the whole


def timed(work: Callable[[Setting], int], setting: Setting) -> float:
    """GB/s of all processes together, from when the first may start until the last is done."""
    together(setting.world)
    started = time.perf_counter()
    size = work(setting)
    together(setting.world)
    return size / (time.perf_counter() - started) / 1e9


def together(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()


def report(setting: Setting, speeds: dict[str, list[float]]) -> None:
    """Throughputs, and what they are to each other in the same round."""
    world = setting.world
    load_average = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    backend = f", {dist.get_backend()}" if world.size > 1 else ""
    rounds = len(speeds["gather"])
    print(f"{name}, {world.size} processes{backend}, {setting.jobs} threads each")
    print(f"n = {rounds}, load average {load_average}; min / median / max")
    names = {
        "gather": "verify --gather",
        "each": "each parameter",
        "read": "reading and moving",
    }
    for key, held in speeds.items():
        print(f"{names[key]:24}{spread(held):>25} GB/s")
    for key, least in (("read", LIMIT), ("each", TIMES if world.size > 1 else None)):
        ratios = [a / b for a, b in zip(speeds["gather"], speeds[key], strict=True)]
        good = least is not None and statistics.median(ratios) >= least
        aim = f"   target >= {least}: {'met' if good else 'MISSED'}" if least else ""
        print(f"gather / {names[key]:24}{spread(ratios)}{aim}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--against", type=Path, metavar="DST", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--memory", type=Size(), default=256 << 20, metavar="SIZE")
    parser.add_argument("--jobs", type=int, default=4, help="threads of each process")
    arguments = parser.parse_args()
    world = join_world(arguments.device)
    try:
        source, other = api.read(arguments.source.resolve()), api.read(arguments.against.resolve())
        setting = Setting(source, other, world, arguments.jobs, arguments.memory)
        works = {"gather": verify, "each": each_parameter, "read": read_only}
        speeds: dict[str, list[float]] = {key: [] for key in works}
        for number in range(arguments.rounds + 1):
            for key, work in works.items():
                speed = timed(work, setting)
                if number:
                    speeds[key].append(speed)
        if not world.rank:
            report(setting, speeds)
    finally:
        world.close()


if __name__ == "__main__":
    main()
