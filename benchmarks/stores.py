"""Compares a checkpoint in a store with the store's own library, and with a local folder.

    python -m benchmarks.stores WORK                 makes a ZeRO-3 checkpoint in WORK; a minute
    python -m benchmarks.stores WORK --source SRC    another checkpoint, a folder below WORK

The store is a server of S3 on this machine (range_server.py). It counts requests and bytes itself.
"Bytes needed" are the bytes that the same command reads from the folder. `download` fetches all
objects by obstore, each as a stream into a file that is synced, with as many threads as zckpt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from .measure import ENVIRONMENT, ROOT, ZCKPT, Cost, Job, interleave, run, table

BYTES, THROUGHPUT, MEMORY = 1.05, 0.9, 1.25  # targets: at most, at least, at most
AT_ONCE = 16
READ = """
import sys, zckpt
from zckpt.core.storage import fileio, sources
total = 0
def counted(read):
    def call(*words):
        global total
        got = read(*words)
        total += got if isinstance(got, int) else len(got)
        return got
    return call
fileio.read_into = counted(fileio.read_into)
sources.pread = counted(sources.pread)
zckpt.convert(sys.argv[1], sys.argv[2])
print(total)
"""


def make(path: Path, elements: int) -> None:
    """Writes a ZeRO-3 checkpoint of 4 ranks with AdamW; its model has about `elements` elements."""
    import torch

    from zckpt import api

    torch.manual_seed(0)
    width = 1024
    model = torch.nn.ModuleList(
        torch.nn.Linear(width, width) for _ in range(max(1, elements // width**2))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    one = path.with_name("made.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, one)
    names = [name for name, _ in model.named_parameters()]
    api.convert(one, path, to="deepspeed", dp=4, stage=3, param_names=names)
    one.unlink()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves a folder from a process of its own; yields the server's address."""
    command = [sys.executable, "-m", "benchmarks.range_server", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def counts(address: str) -> tuple[int, int]:
    """The number of requests for objects since the last call, and the bytes of the answers."""
    with urllib.request.urlopen(f"{address}/counts") as answer:
        document = json.load(answer)
    return document["requests"], document["bytes"]


def needed(source: Path, target: Path) -> int:
    """The bytes that a conversion reads from the folder itself."""
    job = Job("needed", (sys.executable, "-c", READ, str(source), str(target)), (target,))
    ended = subprocess.run(job.command, capture_output=True, text=True, check=True, cwd=ROOT)
    run(Job("removed", ("true",), job.outputs))
    return int(ended.stdout)


def download(url: str, target: Path) -> None:
    """Fetches all objects below a URL, by obstore alone."""
    import obstore
    from obstore.store import S3Store

    bucket, _, key = url.removeprefix("s3://").partition("/")
    store = S3Store(bucket, client_options={"allow_http": True, "timeout": "1h"})

    def fetch(path: str) -> None:
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "xb") as file:
            for chunk in obstore.get(store, path).stream(min_chunk_size=8 << 20):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    with ThreadPoolExecutor(AT_ONCE) as pool:
        paths = [each["path"] for batch in obstore.list(store, key) for each in batch]
        [*_] = pool.map(fetch, paths)


def verdict(name: str, value: float, target: float, more: bool = False) -> None:
    is_met = value >= target if more else value <= target
    sign = ">=" if more else "<="
    print(f"{name}: {value:.3f}   target {sign} {target}: {'met' if is_met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--source", metavar="SRC")
    parser.add_argument("--elements", type=int, default=100 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--download", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.download:
        return download(arguments.download[0], Path(arguments.download[1]))
    work = arguments.work.resolve()
    (work / "served").mkdir(parents=True, exist_ok=True)
    source = work / (arguments.source or f"served/z3-{arguments.elements}")
    if not source.exists():  # a process of its own: its memory would be that of all it starts
        process = get_context("spawn").Process(target=make, args=(source, arguments.elements))
        process.start()
        process.join()
    measured(source, work, arguments.rounds)
    return None


def measured(source: Path, work: Path, rounds: int) -> None:
    """Measures one checkpoint and prints all figures."""
    files = [each for each in source.rglob("*") if each.is_file()]
    print(
        f"{source}: {len(files)} files, {sum(each.stat().st_size for each in files) / 1e9:.2f} GB"
    )
    with serving(source.parent) as address:
        url = f"s3://bucket/{source.name}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        ENVIRONMENT.update({**keys, "AWS_ENDPOINT_URL": address})
        run(Job("inspect", (*ZCKPT, "inspect", url)))
        requests, size = counts(address)
        print(
            f"inspect: {requests / len(files):.2f} requests and {size / len(files) / 1024:.0f} KiB "
            "for each file"
        )
        target = work / "converted"
        run(Job("convert", (*ZCKPT, "convert", url, str(target)), (target,)))
        requests, size = counts(address)
        print(f"convert: {requests} requests, {size:,} bytes")
        run(Job("removed", ("true",), (target,)))
        verdict("convert, bytes requested / needed", size / needed(source, target), BYTES)
        script = (sys.executable, "-m", "benchmarks.stores", str(work), "--download")
        jobs = [
            Job("convert s3 -> local", (*ZCKPT, "convert", url, str(target)), (target,)),
            Job("download", (*script, url, str(work / "fetched")), (work / "fetched",)),
            Job("convert local -> local", (*ZCKPT, "convert", str(source), str(target)), (target,)),
        ]
        costs = interleave(jobs, rounds)
    table(costs)
    ours, theirs, local = costs.values()
    verdict("convert, throughput of download's", ratio(theirs, ours, "wall"), THROUGHPUT, True)
    verdict("convert, memory of local files'", ratio(ours, local, "memory"), MEMORY)


def ratio(above: list[Cost], below: list[Cost], figure: str) -> float:
    """The median ratio of a figure over the pairs of runs."""
    return statistics.median(
        getattr(a, figure) / getattr(b, figure) for a, b in zip(above, below, strict=True)
    )


if __name__ == "__main__":
    main()
