"""Files of ranks as torch itself pickles them, of any number of ranks, in one process.

torch's fake process group moves nothing, and nothing has to be moved: the parts are cut here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

Axes = Sequence[int | None]
"""The axis of a tensor that each axis of a mesh cuts; None if the mesh's axis replicates."""

Make = Callable[[int, Tensor], Any]
"""What a rank saves of a whole tensor."""


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensors(sizes: Sequence[int], axes: Axes) -> Make:
    """DTensors on a mesh of these sizes; every part is what torch.chunk gives."""

    def make(rank: int, whole: Tensor) -> DTensor:
        mesh = init_device_mesh("cpu", tuple(sizes))
        local, rest = whole, rank
        for size, axis, stride in zip(sizes, axes, _strides(sizes), strict=True):
            position, rest = divmod(rest, stride)
            if axis is not None:
                chunks = local.chunk(size, axis)
                empty = local.narrow(axis, 0, 0)
                local = chunks[position] if position < len(chunks) else empty
        places: list[Placement] = [Replicate() if a is None else Shard(a) for a in axes]
        local, strides = local.contiguous().clone(), whole.stride()
        return DTensor.from_local(
            local, mesh, places, run_check=False, shape=whole.shape, stride=strides
        )

    return make


def _strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def sharded_tensors(world: int, turned: bool = False) -> Make:
    """ShardedTensors of rows, as FSDP1 saves them; `turned`: the last rank has the first rows."""

    def make(rank: int, whole: Tensor) -> ShardedTensor:
        parts = list(whole.chunk(world))
        starts = [sum(len(part) for part in parts[:place]) for place in range(len(parts))]
        places = [world - 1 - place if turned else place for place in range(len(parts))]
        listed = [
            ShardMetadata([start, *[0] * (whole.ndim - 1)], list(part.shape), f"rank:{place}/cpu")
            for part, start, place in zip(parts, starts, places, strict=True)
        ]
        metadata = ShardedTensorMetadata(
            listed, whole.shape, TensorProperties(dtype=whole.dtype, requires_grad=False)
        )
        own = [
            LocalShard(part.clone(), about)
            for part, about, place in zip(parts, listed, places, strict=True)
            if place == rank
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata)

    return make


def save(folder: Path, world: int, model: Mapping[str, Tensor], make: Make) -> Path:
    """Every rank's model and optimizer, the latter with two moments of every weight by name."""
    folder.mkdir()
    moments = {
        name: {"exp_avg": weight + 1, "exp_avg_sq": weight * weight + 3, "step": torch.tensor(5.0)}
        for name, weight in model.items()
    }
    for rank in range(world):
        with as_rank(rank, world):
            weights = {name: make(rank, weight) for name, weight in model.items()}
            state = {
                name: {
                    key: value if key == "step" else make(rank, value)
                    for key, value in states.items()
                }
                for name, states in moments.items()
            }
            optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}
            torch.save(weights, folder / f"model_world_size_{world}_rank_{rank}.pt")
            torch.save(optim, folder / f"optim_world_size_{world}_rank_{rank}.pt")
    return folder
