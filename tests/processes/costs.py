"""What processes that share one conversion pay for each claim, region and file.

    python -m tests.processes.costs WORK --processes 64

All processes run on this machine, with regions of 1 MiB in place of 256: a small checkpoint then
has as many as one of terabytes. CPU and what waits for the store are the same on many nodes; the
bandwidth of a parallel filesystem is not measured here.

* claim: all processes ask the counter again and again; nothing else is done.
* region: one process converts the same bytes in regions of 1 MiB and in one for each file.
* noted: rank 0 reads the regions that all others have noted, and takes their checksums.
* file: one process converts the same tensors with and without small files beside them.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from msgspec import Struct

import zckpt
from benchmarks import scale
from benchmarks.measure import spread
from zckpt.copying import filling
from zckpt.copying.journal import Journal, Region
from zckpt.core.passes.resources import Copying
from zckpt.processes.sharing import Processes

MIB = 1 << 20
ONE_THREAD = Copying(1, 2 * MIB)
CLAIMS = 200  # of each process
FILES = 1000
APART = 0.02  # seconds; of 64 that meet in one instant, some are let in after torch's 5 s


class Spent(Struct):
    """What one process has spent: seconds, in `noted` those of rank 0 for the regions of others."""

    cpu: float = 0.0
    wall: float = 0.0
    noted: float = 0.0
    regions: int = 0


def forked(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in each of so many processes, by rank; a launcher would have started them.

    Forks: so many processes that import torch would not fit into memory.
    """
    import torch.distributed  # noqa: F401  (once for all)

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    context = get_context("fork")
    results: Any = context.SimpleQueue()

    def child(rank: int) -> None:
        own = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.update({**own, "MASTER_ADDR": "localhost", "MASTER_PORT": port})
        results.put((rank, work(rank)))

    children: list[Any] = [context.Process(target=child, args=(rank,)) for rank in range(size)]
    for each in children:
        each.start()
        time.sleep(APART)
    by_rank = dict(results.get() for _ in children)
    for each in children:
        each.join()
    return [by_rank[rank] for rank in range(size)]


def claims(_: int) -> tuple[float, float]:
    """When a process makes its first claim, and when it has made all."""
    with zckpt.group() as group:
        claim, here = group.counter(), group.counter()
        while here() < group.size:  # each process asks once, and then again and again
            time.sleep(0.01)
        started = time.monotonic()
        for _ in range(CLAIMS):
            claim()
        return started, time.monotonic()


def seconds_of_a_claim(size: int) -> float:
    """Of the store's time: all processes make claims at once."""
    begun, ended = zip(*forked(size, claims), strict=True)
    return (max(ended) - min(begun)) / (size * CLAIMS)


def converting(source: Path, target: Path, region: int = MIB) -> Callable[[int], Spent]:
    """A conversion in regions of so many bytes, in one thread of each process."""

    def convert(_: int) -> Spent:
        filling.REGION, spent, add, others = (
            region,
            Spent(),
            Journal.add,
            Processes.regions_of_others,
        )

        def counted(self: Journal, one: Region) -> None:
            spent.regions += 1
            add(self, one)

        def timed(found: Iterator[Region]) -> Iterator[Region]:
            before = cpu()
            yield from found
            spent.noted = cpu() - before

        def of_others(self: Processes, journal: Journal) -> Iterator[Region] | None:
            found = others(self, journal)
            return None if found is None else timed(found)

        Journal.add, Processes.regions_of_others = counted, of_others  # type: ignore[method-assign]
        before, started = cpu(), time.perf_counter()
        with zckpt.group() as group:
            zckpt.convert(source, target, sharing=group, copying=ONE_THREAD)
        spent.cpu, spent.wall = cpu() - before, time.perf_counter() - started
        return spent

    return convert


def converted(size: int, source: Path, target: Path, region: int) -> list[Spent]:
    """What the processes have spent, by rank; the target is removed."""
    spent: list[Spent] = forked(size, converting(source, target, region))
    shutil.rmtree(target)
    return spent


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK", help="a new directory; it is removed")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--gb", type=float, default=1.0, help="10^9 bytes of the source")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    try:
        measure(arguments)
    finally:
        shutil.rmtree(arguments.work)


def measure(arguments: argparse.Namespace) -> None:
    size, source, target = arguments.processes, arguments.work / "run", arguments.work / "out"
    (made,) = forked(1, lambda _: scale.make(source, 200, 4, arguments.gb))
    assert made is None
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{size} processes, {arguments.gb} GB; n = {arguments.rounds}, load {load}")
    costs: dict[str, list[float]] = {}

    def count(name: str, value: float) -> None:
        costs.setdefault(name, []).append(value)
        print(f"{name:40}{spread(costs[name]):>36}", flush=True)

    for _ in range(arguments.rounds):
        count("claim, us of the store", 1e6 * seconds_of_a_claim(size))
        (small,), (large,) = (converted(1, source, target, each) for each in (MIB, 256 * MIB))
        parts = small.regions - large.regions
        count("region, us of CPU", 1e6 * (small.cpu - large.cpu) / parts)
        count("region, us of wall time", 1e6 * (small.wall - large.wall) / parts)
        (source / "trainer_state.json").write_text('{"global_step": 1}')
        for number in range(FILES):
            (source / f"{number}.json").write_text(f"[{number}]")
        (files,) = converted(1, source, target, 256 * MIB)
        for path in source.glob("*.json"):
            path.unlink()
        count("file, us of CPU", 1e6 * (files.cpu - large.cpu) / FILES)
        count("file, us of wall time", 1e6 * (files.wall - large.wall) / FILES)
        several = converted(size, source, target, MIB)
        others = sum(each.regions for each in several[1:])
        count("region that others note, us of rank 0", 1e6 * several[0].noted / max(1, others))
        count("regions", several[0].regions + others)
        count("regions of a process, least", min(each.regions for each in several))
        count("regions of a process, most", max(each.regions for each in several))
        count("CPU s of one process alone", small.cpu)
        count("CPU s of all", sum(each.cpu for each in several))


if __name__ == "__main__":
    main()
