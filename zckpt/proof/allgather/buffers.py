"""The memory of a bucket (a matrix with a row per rank), in which an all-gather joins the rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...core.checkpoint.dtypes import SIZES
from .buckets import Bucket
from .elements import BITS
from .readers import BlockMatch
from .world import World, together_with_others

# before torch 2.13 its name is all_gather_into_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(world: World, whole: torch.Tensor, part: torch.Tensor) -> None:
    """All-gathers `whole`: every process sends its `part`, a slice of it, to all others.

    gloo's own all-gather copies twice. Broadcasts of the parts, all started together, send the same
    bytes in half the time (torch 2.13, 2 and 4 processes on one machine).
    """
    if world.transport.type == "cuda":
        ALL_GATHER(whole, part)
        return
    parts = enumerate(whole.chunk(world.size))
    for work in [dist.broadcast(part, rank, async_op=True) for rank, part in parts]:
        work.wait()


class BucketBuffers:
    """The memory for one bucket: a matrix with a row for each rank, moved by one all-gather.

    It has all gathered rows, the rows that this process reads, and the elements of the other
    checkpoint that this process compares with gathered elements.
    """

    def __init__(self, world: World, room: int, other: int) -> None:
        self.world = world
        self.cuda = world.device.type == "cuda"
        self.gathered = self._host(room) if world.transport.type == "cpu" else self._near(room)
        self.near = self.gathered if world.transport == world.device else self._near(room)
        self._rows = None if world.transport.type == "cpu" else self._host(room // world.size)
        self.other = self._host(other)
        self.near_other = self._near(other) if self.cuda else self.other
        self.stream: Any = torch.cuda.Stream() if self.cuda else None  # type: ignore[no-untyped-call]
        self.done: Any = torch.cuda.Event() if self.cuda else None  # type: ignore[no-untyped-call]

    def _host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.cuda)

    def _near(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.world.device)

    def own_rows(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this process reads its rows to, and its slice of the gathered rows.

        Both tensors are the same memory, unless rows are read into pinned memory first.
        """
        length = self.rows(bucket) // self.world.size
        part = self.gathered[self.world.rank * length : (self.world.rank + 1) * length]
        return (part if self._rows is None else self._rows[:length]), part

    def grow(self, other: int) -> None:
        """Allocates `other` bytes for the other checkpoint's elements; the old content is lost."""
        self.other = self._host(other)
        self.near_other = self._near(other) if self.cuda else self.other

    def rows(self, bucket: Bucket) -> int:
        """The number of bytes of all rows in the bucket.

        This includes padding rows, which give every process the same number of rows.
        """
        rows_of_process = -(-bucket.rows // self.world.size)
        return rows_of_process * self.world.size * bucket.width * bucket.size

    def move(self, bucket: Bucket, other: int) -> None:
        """All-gathers the rows, and copies them and the other checkpoint's elements to the device.

        `other` is the number of bytes of the other checkpoint's elements.
        """
        own_rows, part = self.own_rows(bucket)
        if self._rows is not None:
            part.copy_(own_rows, non_blocking=True)
        if self.cuda:
            self.near_other[:other].copy_(self.other[:other], non_blocking=True)
        whole = self.gathered[: self.rows(bucket)]
        if self.world.size > 1 and not bucket.apart:
            with together_with_others():
                all_gather(self.world, whole, part)
        if self.near is not self.gathered:
            self.near[: len(whole)].copy_(whole, non_blocking=True)

    def sides(self, bucket: Bucket, item: BlockMatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The gathered elements of a block (a piece of a tensor), and those to compare with them.

        The second tensor is from the other checkpoint. Both are views of this memory; the first is
        a copy if the block has several `pieces`.
        """
        block, other = item.block, item.other
        matrix = self.near[: self.rows(bucket)].view(BITS[bucket.size]).view(-1, bucket.width)
        lines = [
            matrix[row, column : column + block.rows * columns].view(block.rows, columns)
            for row, column, columns in block.pieces
        ]
        if lines:
            a = lines[0] if len(lines) == 1 else torch.cat(lines, 1)
        else:
            rows = matrix[block.row : block.row + block.rows]
            a = rows[:, block.column : block.column + block.columns]
        b = self.near_other[item.at : item.end].view(BITS[SIZES[other.dtype]])
        return a, b.view(block.rows, block.columns)
