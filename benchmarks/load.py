"""Compares loading into FSDP2 by zckpt.dcp.StorageReader with loading torch's own checkpoint.

    python -m benchmarks.checkpoints DIR --stage 3 --dp 4 --size 124M
    python -m benchmarks.load DIR WORK --ranks 2

Both fill the same state dict, in turn, from the page cache. Memory is the increase while loading.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.engines import zygote
from zckpt.core.storage.fileio import Reader
from zckpt.dcp import StorageReader

from .checkpoints import TIMEOUT, Transformer, groups


@dataclass(frozen=True)
class Setting:
    """What is loaded, where files go, on how many ranks, and how often."""

    source: Path
    work: Path
    ranks: int
    rounds: int


def measure(rank: int, store: Path, setting: Setting) -> None:
    """Loads in one rank, by zckpt and by torch in turn; rank 0 writes the report."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=setting.ranks
    )
    model = Transformer(768, 12)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    read = count_reads()
    saved = setting.work / "dcp"
    ways: dict[str, Callable[[], None]] = {
        "zckpt": lambda: dcp.load(state, storage_reader=StorageReader(setting.source)),
        "torch": lambda: dcp.load(state, checkpoint_id=saved),
    }
    ways["zckpt"]()
    total = sum(read)
    dcp.save(state, checkpoint_id=saved)
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(setting.rounds):
        for way, load in ways.items():
            costs[way].append(cost(load))
    if rank:
        return
    lines = [f"rank 0 read {total / needed(state):.4f} times its own bytes ({total / 1e6:.0f} MB)"]
    for way, pairs in costs.items():
        seconds, memory = zip(*pairs, strict=True)
        lines.append(f"{way}: {statistics.median(seconds):.2f} s, {max(memory):.0f} MiB of memory")
    (setting.work / "report").write_text("\n".join(lines))


def cost(load: Callable[[], None]) -> tuple[float, float]:
    """The seconds of a load until all ranks are done, and the MiB that it added in this process."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    distributed.barrier()
    started = time.monotonic()
    load()
    distributed.barrier()
    return time.monotonic() - started, status("VmHWM") - before


def status(key: str) -> float:
    """A value of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def count_reads() -> list[int]:
    """Returns a list to which each later read of zckpt appends its number of bytes."""
    counts: list[int] = []
    plain = Reader.read

    def read(self: Reader, extent: Any, into: memoryview) -> None:
        counts.append(extent.length)
        plain(self, extent, into)

    Reader.read = read  # type: ignore[method-assign]
    return counts


def needed(state: Any) -> int:
    """The bytes of this rank's tensors; memory that several tensors share counts once."""
    sizes: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, Tensor) and value.ndim:
            local = value.to_local()  # type: ignore[attr-defined]
            sizes[local.data_ptr()] = local.nbytes

    walk(state)
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    setting = Setting(
        arguments.source.resolve(),
        arguments.work.resolve(),
        arguments.ranks,
        arguments.rounds,
    )
    log = setting.work / "ranks.log"
    with tempfile.TemporaryDirectory() as meeting:
        words = (Path(meeting) / "store", setting)
        failure = zygote.run(measure, setting.ranks, words, log, TIMEOUT)
    if failure is not None:
        raise RuntimeError(f"{failure}; see {log}")
    print((setting.work / "report").read_text())


if __name__ == "__main__":
    main()
