"""Compares `zckpt verify --gather` with gathering each parameter alone, and with only reading.

    python -m benchmarks.gather SRC --against DST --rounds 7
    torchrun --nproc-per-node 4 -m benchmarks.gather SRC --against DST
    torchrun --nproc-per-node 4 -m benchmarks.gather --layer 9834560 --dtype fp16

SRC is a DeepSpeed run directory, DST the same in another format. Everything is timed within one
process (or one per rank), after imports and one uncounted round. Files are in the page cache; GB
count the bytes of both checkpoints.

* each parameter: as engines did it before they gathered flat buffers. Every process loads its
  fragment of a parameter; all_gather returns a list of all fragments, which are concatenated and
  compared with the tensor of DST. The processes take turns to load and compare it.
* reading: the same files into small buffers (pinned, where there is a GPU), with the same threads,
  and from there to the device. With NCCL this is the limit: nothing is gathered faster than it is
  read.
* bare all-gathers: zckpt's all-gather of as many bytes as ranks share, from memory to memory, in
  buffers of the same size. gloo sends them through TCP: with N processes a byte is sent and
  received N - 1 times, by the processors that also read. With gloo the limit is therefore to read
  and then to gather; its time is the sum of both.

CPU seconds are the sum over all processes. On a busy machine they say more than wall time.

--layer measures how one layer's weights are gathered: see benchmarks/layer.py.
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
from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.checkpoint.entries import Entry, name_of
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.core.passes.pieces import ElementReader, ReadRequest
from zckpt.core.passes.streaming import share
from zckpt.core.ranks.partition import FlatMember, Partition, Partitioned, Whole
from zckpt.core.storage.fileio import Reader, files_per_thread
from zckpt.core.storage.fragments import Extent
from zckpt.core.storage.records import RecordChecker
from zckpt.proof.allgather.buffers import all_gather
from zckpt.proof.allgather.gathering import GLOO
from zckpt.proof.allgather.readers import READ
from zckpt.proof.allgather.world import World, join_world

from . import layer
from .measure import spread
from .processes import head, together

LIMIT = 0.70  # of the limit: of reading with NCCL and alone, of reading and gathering with gloo
TIMES = 1.5  # faster than each parameter by itself, from two processes on


@dataclass(frozen=True)
class Setting:
    """What is measured: two checkpoints, the processes, and the threads and memory of each."""

    source: Manifest
    other: Manifest
    world: World
    jobs: int
    memory: int


# -- zckpt


def verify(setting: Setting) -> int:
    """Runs `zckpt verify --gather`, and returns the bytes of both checkpoints."""
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


def _partitions(source: Manifest) -> Sequence[Partition]:
    partitions = formats.named(source.format).functions.partitions
    assert partitions is not None
    return partitions(source.root, None)


def each_parameter(setting: Setting) -> int:
    """Gathers and compares tensors one by one, and returns the bytes of both checkpoints."""
    world, entries = setting.world, setting.other.entries
    gatherer = ElementReader(Reader(), RecordChecker(()), READ)
    passed = place = 0
    for part in _partitions(setting.source):
        for member in [part] if isinstance(part, Whole) else part.members:
            place += 1
            entry = entries.get(member.key)
            if entry is None or (entry.dtype, entry.shape) != (part.dtype, member.shape):
                continue
            passed += 2 * entry.length
            mine = place % world.size == world.rank
            if isinstance(part, Partitioned):
                tensor = gathered(gatherer, part, member, world)
            elif mine:
                tensor = load_whole(gatherer, part)
            if mine and not torch.equal(
                tensor.to(world.device).view(member.shape).view(bits(entry.dtype)),
                load_entry(gatherer, entry).to(world.device).view(bits(entry.dtype)),
            ):
                raise RuntimeError(f"{name_of(member.key)} differs")
    gatherer.reader.close()
    return passed


def gathered(
    gatherer: ElementReader, part: Partitioned, member: FlatMember, world: World
) -> torch.Tensor:
    """Gathers one tensor: a process loads the fragments of some ranks, and receives the rest."""
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


def fragments(part: Partitioned, member: FlatMember) -> Iterator[Extent]:
    """Yields where each rank's partition has bytes of a tensor, with padding; may be empty."""
    size, base = SIZES[part.dtype], 0
    for rank, extent in enumerate(part.ranks):
        start, stop = member.first - base, member.first - base + member.numel
        if part.interleaved:
            start, stop = member.first, member.first + -(-member.numel // len(part.ranks))
        else:
            base += part.length(rank)
        start, stop = (min(max(place, 0), part.length(rank)) for place in (start, stop))
        yield extent.part(start * size, stop * size)


def load(gatherer: ElementReader, pieces: Sequence[Extent], dtype: str) -> torch.Tensor:
    """Reads pieces of files into one flat tensor."""
    loaded = torch.empty(sum(piece.length for piece in pieces), dtype=torch.uint8)
    offset = 0
    for piece in pieces:
        gatherer.reader.read(piece, memory(loaded)[offset : offset + piece.length])
        offset += piece.length
    return loaded.view(getattr(torch, TORCH_NAMES[dtype]))


def load_whole(gatherer: ElementReader, part: Whole) -> torch.Tensor:
    flat = load(gatherer, [part.extent], part.dtype)
    if part.strides is None:
        return flat
    return flat.as_strided(part.shape, part.strides).contiguous()


def load_entry(gatherer: ElementReader, entry: Entry) -> torch.Tensor:
    """Reads the whole tensor of an entry."""
    loaded = torch.empty(entry.length, dtype=torch.uint8)
    gatherer.read([ReadRequest(entry, 0, entry.numel, 0)], memory(loaded))
    return loaded.view(getattr(torch, TORCH_NAMES[entry.dtype])).view(entry.shape)


def bits(dtype: str) -> torch.dtype:
    """The integer type of the same size, which compares bits: NaNs with the same bits are equal."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[dtype]]


def memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


# -- the limit


def read_only(setting: Setting) -> int:
    """Reads all files of both checkpoints, moves them to the device, and returns their bytes."""
    world = setting.world
    wholes = [
        Extent(file, 0, os.path.getsize(file))
        for file in (*setting.source.files.paths, *setting.other.files.paths)
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
    """Yields a thread's function that reads an extent of a file, and copies it to the device.

    With a GPU there are two buffers: while one is copied, the other is read into.
    """
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


def bare(setting: Setting) -> int:
    """All-gathers as many bytes as the ranks share, and returns their number."""
    world = setting.world
    parts = _partitions(setting.source)
    shared = [part for part in parts if isinstance(part, Partitioned)]
    total = sum(part.extent(rank).length for part in shared for rank in range(len(part.ranks)))
    room = GLOO // world.size * world.size
    whole = torch.empty(room, dtype=torch.uint8, device=world.transport)
    for start in range(0, total, room):
        length = -(-min(room, total - start) // world.size)
        rows = whole[: length * world.size]
        all_gather(world, rows, rows[world.rank * length : (world.rank + 1) * length])
    return total


# -- the whole


@dataclass(frozen=True)
class Pass:
    """The bytes, seconds and CPU seconds of all processes in one measurement."""

    bytes: int
    seconds: float
    cpu: float

    @property
    def speed(self) -> float:
        """Throughput in GB/s."""
        return self.bytes / self.seconds / 1e9


def timed(work: Callable[[Setting], int], setting: Setting) -> Pass:
    """Measures `work` in all processes, which begin together, until the last one has ended."""
    together(setting.world)
    started, cpu = time.perf_counter(), time.process_time()
    size = work(setting)
    together(setting.world)
    seconds = time.perf_counter() - started
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    used = used.to(setting.world.transport)
    if setting.world.size > 1:
        dist.all_reduce(used)
    return Pass(size, seconds, used.item())


NAMES = {
    "gather": "verify --gather",
    "each": "each parameter",
    "read": "reading and moving",
    "bare": "bare all-gathers",
    "limit": "reading, then gathering",
}


def limit_of(gather: Pass, read: Pass, bare: Pass) -> Pass:
    """The cost of reading what `gather` reads, and then gathering what ranks share."""
    share = gather.bytes / read.bytes
    seconds, cpu = read.seconds * share + bare.seconds, read.cpu * share + bare.cpu
    return Pass(gather.bytes, seconds, cpu)


def report(setting: Setting, passes: dict[str, list[Pass]]) -> None:
    """Prints throughputs, and the ratios of those in the same round."""
    head(setting.world, setting.jobs, len(passes["gather"]))
    over_gloo = "bare" in passes
    if over_gloo:
        rounds = zip(passes["gather"], passes["read"], passes["bare"], strict=True)
        passes["limit"] = [limit_of(*one) for one in rounds]
    for key, listed in passes.items():
        speeds, cpu = spread([one.speed for one in listed]), spread([one.cpu for one in listed])
        print(f"{NAMES[key]:24}{speeds:>25} GB/s{cpu:>25} CPU s")
    several = setting.world.size > 1
    aims = {"limit" if over_gloo else "read": LIMIT, "each": TIMES if several else None}
    for key in [key for key in passes if key not in ("gather", "bare")]:
        least = aims.get(key)
        pairs = list(zip(passes["gather"], passes[key], strict=True))
        ratios = [one.speed / other.speed for one, other in pairs]
        cpu = spread([other.cpu / other.bytes / one.cpu * one.bytes for one, other in pairs])
        good = least is not None and statistics.median(ratios) >= least
        aim = f"   target >= {least}: {'met' if good else 'MISSED'}" if least else ""
        print(f"gather / {NAMES[key]:24}{spread(ratios)}   by CPU {cpu}{aim}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC", nargs="?")
    parser.add_argument("--against", type=Path, metavar="DST")
    parser.add_argument("--layer", type=int, metavar="ELEMENTS", help="of one layer, without SRC")
    parser.add_argument("--dtype", choices=layer.DTYPES, default="fp16", help="with --layer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--memory", type=int, default=256 << 20, metavar="BYTES")
    parser.add_argument("--jobs", type=int, default=4, help="threads of each process")
    arguments = parser.parse_args()
    if bool(arguments.source and arguments.against) == bool(arguments.layer):
        parser.error("give SRC and --against DST, or --layer ELEMENTS")
    world = join_world(arguments.device)
    try:
        if arguments.layer:
            layer.measure(arguments.layer, arguments.dtype, arguments.rounds, world)
        else:
            measure_checkpoints(arguments, world)
    finally:
        world.close()


def measure_checkpoints(arguments: argparse.Namespace, world: World) -> None:
    source, other = api.read(arguments.source.resolve()), api.read(arguments.against.resolve())
    setting = Setting(source, other, world, arguments.jobs, arguments.memory)
    works = {"gather": verify, "each": each_parameter, "read": read_only}
    if world.size > 1 and world.transport.type == "cpu":
        works["bare"] = bare
    passes: dict[str, list[Pass]] = {key: [] for key in works}
    for number in range(arguments.rounds + 1):
        for key, work in works.items():
            one = timed(work, setting)
            if number:
                passes[key].append(one)
    if not world.rank:
        report(setting, passes)


if __name__ == "__main__":
    main()
