"""Compares forwards of GPT-2 that stream weights from files with forwards of the loaded model.

    python -m benchmarks.checkpoints DIR --stage 3 --dp 4 --size 124M
    zckpt reshard DIR RESHARDED --dp 8 && zckpt convert DIR UNIVERSAL
    python -m benchmarks.stream DIR RESHARDED UNIVERSAL --threads 1
    python -m benchmarks.stream DIR --cold      drops the files from the page cache before each read

One process, in turn: the loaded model's forward, reading, the first and the second forward of a new
`probe.stream` block. The model is fp32, so its weights are the masters. `reading` is what zckpt's
own code takes, on one thread, to read the bytes of every weight once into one buffer that was used
before. So the limit has no CRC-32s and no new memory, both of which the first forward needs.
Outputs must be equal bit for bit. The time to read the manifest and to enter
and leave the block is not counted. The target is for the ratio of a forward's wall time to the
larger one of the loaded model's forward and reading, in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zckpt import api, probe
from zckpt.core.checkpoint.entries import Entry, Key
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.core.passes import loading
from zckpt.core.passes.pieces import ReadRequest
from zckpt.core.passes.streaming import reading
from zckpt.core.storage.fileio import Buffer
from zckpt.core.storage.records import RecordChecker
from zckpt.probe.streaming import SCRATCH, sources

from .checkpoints import SIZES, VOCABULARY
from .measure import drop, spread

TARGET = 1.2  # times the larger one of the loaded model's forward and reading
MODELS = [size for size in SIZES if size != "many"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--size", choices=MODELS, default=MODELS[0], help="of the checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, arguments.tokens))
    cache = "cold" if arguments.cold else "warm"
    print(f"{arguments.tokens} tokens, {torch.get_num_threads()} threads of torch, cache {cache}")
    for source in arguments.sources:
        times = measure(source, arguments.size, tokens, arguments.rounds, arguments.cold)
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"\n{source}: n = {arguments.rounds}, load average {load}; min / median / max")
        report(times)


def measure(
    source: Path, size: str, tokens: torch.Tensor, rounds: int, cold: bool
) -> dict[str, list[tuple[float, float]]]:
    """Returns, by way, the wall and CPU seconds of each round; CPU is that of all threads."""
    manifest = api.read(source)
    with torch.device("meta"):
        model = SIZES[size]()
    entries = sources(model, manifest)
    loaded = SIZES[size]()
    weights = {
        name: loading.as_torch(entry, manifest.files.records) for name, entry in entries.items()
    }
    loaded.load_state_dict(weights)
    del weights
    files = {record.extent.file for record in manifest.files.records}
    needed = {entry.key: entry for entry in entries.values()}
    buffer = Buffer(max(4 * entry.numel for entry in needed.values())).view
    times: dict[str, list[tuple[float, float]]] = {}

    def timed(way: str, work: Callable[[], Any]) -> Any:
        if cold and way in ("reading", "first forward"):
            drop(map(Path, files))
        started, used = time.perf_counter(), time.process_time()
        result = work()
        cost = time.perf_counter() - started, time.process_time() - used
        times.setdefault(way, []).append(cost)
        return result

    with torch.no_grad():
        for _ in range(rounds + 1):
            expected = timed("loaded forward", lambda: loaded(tokens))
            timed("reading", lambda: read(manifest, needed, buffer))
            with probe.stream(model, manifest):
                for way in ("first forward", "second forward"):
                    output = timed(way, lambda: model(tokens))
                    if not torch.equal(output, expected):
                        raise RuntimeError(f"{source}: another output than the loaded model's")
    return {way: costs[1:] for way, costs in times.items()}  # the first round warms up


def read(manifest: Manifest, entries: Mapping[Key, Entry], buffer: memoryview) -> None:
    checker = RecordChecker([], fingerprints=manifest.files.fingerprints)
    with reading([checker], SCRATCH) as (element_reader,):
        for entry in entries.values():
            element_reader.read([ReadRequest(entry, 0, entry.numel, 0, check=False)], buffer)


def report(times: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    print(f"{'':16}{'wall s':>25}{'CPU s':>25}")
    for way, costs in times.items():
        wall, cpu = (spread(seconds) for seconds in zip(*costs, strict=True))
        print(f"{way:16}{wall:>25}{cpu:>25}")
    pairs = zip(times["loaded forward"], times["reading"], strict=True)
    bounds = [max(forward[0], read_once[0]) for forward, read_once in pairs]
    for way in ("first forward", "second forward"):
        ratios = [cost[0] / bound for cost, bound in zip(times[way], bounds, strict=True)]
        good = "met" if statistics.median(ratios) <= TARGET else "MISSED"
        print(f"{way} / larger one of both: {spread(ratios)}; target <= {TARGET}: {good}")


if __name__ == "__main__":
    main()
