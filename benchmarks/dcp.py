"""Writes a directory of torch.distributed.checkpoint as FSDP2 saves it, with holes for tensors.

    python -m benchmarks.dcp RUN --json     measures torch's own reader of `.metadata`

An item is the file that torch.save writes for a tensor of its shape, with a hole in place of the
data. Every rank has rows of every tensor, and rank 0 also has the numbers.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

WEIGHT, BIAS = (4096, 4096), (4096,)
SLOTS = ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@cache
def item(shape: tuple[int, ...]) -> tuple[bytes, int, bytes]:
    """An item of `shape`: the bytes before a tensor's data, the data's length, the bytes behind it.

    They are those of torch.save, but without the checksum of the data.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved = io.BytesIO()
    with FakeTensorMode():
        tensor = torch.empty(shape)
    length = 4 * tensor.numel()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensor, saved)
    text = saved.getvalue()
    place = torch._C.PyTorchFileReader(io.BytesIO(text)).get_record_offset("data/0")
    return text[:place], length, text[place + length :]


def make(root: Path, tensors: int, ranks: int) -> int:
    """Writes the directory at `root`, and returns the number of its items; needs torch."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    def saved(value: Any) -> bytes:
        text = io.BytesIO()
        torch.save(value, text)
        return text.getvalue()

    root.mkdir(parents=True)
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    opened = ExitStack()
    files = [opened.enter_context((root / name).open("wb")) for name in names]
    places = [0] * ranks
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def put(index: Any, rank: int, head: bytes, length: int = 0, tail: bytes = b"") -> None:
        start, size = places[rank], len(head) + length + len(tail)
        files[rank].seek(start)
        files[rank].write(head)
        files[rank].seek(start + len(head) + length)
        files[rank].write(tail)
        stored[index] = _StorageInfo(names[rank], start, size)
        places[rank] += size

    def tensor(shape: Any, boxes: list[Any]) -> TensorStorageMetadata:
        properties = TensorProperties(dtype=torch.float32)
        return TensorStorageMetadata(properties, torch.Size(shape), boxes)

    weights = {
        f"layers.{number // 2}.{('weight', 'bias')[number % 2]}": (WEIGHT, BIAS)[number % 2]
        for number in range(tensors)
    }
    values = GROUP | {"params": list(weights)}
    for key, value in values.items():
        name = f"optim.param_groups.0.{key}"
        described[name], paths[name] = BytesStorageMetadata(), ("optim", "param_groups", 0, key)
        put(MetadataIndex(name), 0, saved(value))
    none, step = torch.Size(()), saved(torch.tensor(100.0))
    for weight, shape in weights.items():
        name = f"optim.state.{weight}.step"
        described[name] = tensor((), [ChunkStorageMetadata(none, none)])
        paths[name] = "optim", "state", weight, "step"
        put(MetadataIndex(name, none, 0), 0, step)
        for slot in SLOTS:
            name, boxes = slot.format(weight), []
            before, _, state = slot.partition(".{}")
            paths[name] = (*before.split("."), weight, *([state[1:]] if state else []))
            rows = -(-shape[0] // ranks)
            for rank, start in enumerate(range(0, shape[0], rows)):
                sizes = (min(rows, shape[0] - start), *shape[1:])
                offsets = torch.Size((start, *(0 for _ in shape[1:])))
                boxes.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
                put(MetadataIndex(name, offsets, rank), rank, *item(sizes))
            described[name] = tensor(shape, boxes)
    opened.close()
    with open(root / ".metadata", "wb") as target:
        pickle.dump(Metadata(described, paths, stored, version="1.0.0"), target)
    return len(stored)


def main() -> None:
    from torch.distributed.checkpoint import FileSystemReader

    reader = FileSystemReader(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    items = len(reader.read_metadata().storage_data)
    cpu = time.process_time() - started
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"items": items, "seconds": cpu, "mib": memory}))


if __name__ == "__main__":
    main()
