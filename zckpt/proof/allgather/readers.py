"""Threads that read the elements of both checkpoints into the memory of tensors.

A bucket is what one all-gather moves. While it is gathered, threads read the next one. So reading
returns futures, and the comparison of a bucket waits for its futures. (Functions of
core/passes/streaming.py return only when everything is read.)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry
from ...core.grouping import portions
from ...core.passes.pieces import ElementReader, ReadRequest
from ...core.passes.plan import Match
from ...core.passes.streaming import reading
from ...core.storage.checksum import crc32
from ...core.storage.fragments import Extent
from ...core.storage.records import RecordChecker
from .buckets import Block

READ = 8 << 20  # bytes that one thread reads at a time


class BlockMatch(Struct, frozen=True):
    """A block of a gathered tensor, and the buffer position of the other checkpoint's elements.

    match    the pair of tensors to compare, one of each checkpoint
    place    the index of this pair in the list of all pairs
    at       the first byte of the other checkpoint's elements in the buffer
    """

    block: Block
    place: int
    match: Match
    at: int

    @property
    def other(self) -> Entry:
        assert self.match.b is not None
        return self.match.b

    @property
    def end(self) -> int:
        return self.at + self.block.numel * SIZES[self.other.dtype]


class Readers:
    """Threads that read parts of files into the memory of tensors."""

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="zckpt")
        self._jobs = jobs
        self._own = threading.local()
        self._open = ExitStack()

    def _of_thread(self) -> ElementReader:
        if not hasattr(self._own, "reader"):
            files = reading([RecordChecker(())], READ, self._jobs)
            (self._own.reader,) = self._open.enter_context(files)
        reader: ElementReader = self._own.reader
        return reader

    def extents(self, wanted: Sequence[tuple[Extent, int]], into: memoryview) -> list[Future[Any]]:
        """Starts reading byte ranges of files into `into`; returns the futures.

        `wanted` are pairs of a byte range and the offset in `into` at which it is stored.
        """
        small = [
            (extent.part(start, min(start + READ, extent.length)), at + start)
            for extent, at in wanted
            for start in range(0, extent.length, READ)
        ]

        def work(some: Sequence[tuple[Extent, int]]) -> None:
            reader = self._of_thread().reader
            for extent, at in some:
                reader.read(extent, into[at : at + extent.length])

        batches = portions(small, lambda item: item[0].length, READ)
        return [self._pool.submit(work, batch) for batch in batches]

    def elements(self, items: Sequence[BlockMatch], into: memoryview) -> list[Future[list[Seen]]]:
        """Starts reading the elements with which blocks are compared; returns the futures.

        The elements are in the other checkpoint, and are read into `into`, at the place that each
        `BlockMatch` states. A future returns the CRC-32s of the elements that it has read.
        """
        wanted = [
            (item, ReadRequest(item.other, first, min(first + step, stop), 0))
            for item in items
            for step in [READ // SIZES[item.other.dtype]]
            for start, stop in item.block.runs()
            for first in range(start, stop, step)
        ]
        end, placed, last = 0, [], None
        for item, part in wanted:
            start = end if item is last else item.at
            placed.append((item, replace(part, at=start)))
            end, last = placed[-1][1].end, item

        def work(some: Sequence[tuple[BlockMatch, ReadRequest]]) -> list[Seen]:
            self._of_thread().read([part for _, part in some], into)
            return [
                (item, part.start, part.stop, crc32(into[part.at : part.end]))
                for item, part in some
            ]

        batches = portions(placed, lambda item: item[1].end - item[1].at, READ)
        return [self._pool.submit(work, batch) for batch in batches]

    def close(self) -> None:
        """Ends the threads and closes their files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.close()


Seen = tuple[BlockMatch, int, int, int]
"""A `BlockMatch`, a range [start, stop) of elements, and their CRC-32 in the other checkpoint."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU, as a memoryview of elements, not of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)
