"""Reads shards of tensors, cut along any axes, from a checkpoint's files into a program's tensors.

A process reads only the regions (blocks of tensors) that it loads, in the order of the files,
through one small buffer and on one thread, since all ranks read simultaneously. torch's `copy_`
moves, casts and rounds. The CRC-32 of a record is checked if one process reads the complete record,
because files have no checksums for parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod

import torch
from msgspec import Struct

from ..core.checkpoint.dtypes import SIZES, TORCH_NAMES
from ..core.checkpoint.entries import Entry
from ..core.grouping import portions
from ..core.passes.pieces import ReadRequest
from ..core.passes.streaming import reading
from ..core.storage.fileio import Buffer, align
from ..core.storage.fragments import Record, row_major
from ..core.storage.records import RecordChecker

BLOCK = 16 << 20  # bytes: the buffer that is read, and then copied into the tensors


class BoxRegion(Struct, frozen=True, eq=False):
    """A block of a stored tensor, and the program's tensor that it fills.

    The block has the elements [offset, offset + size) along each axis.
    """

    entry: Entry
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def inner(self) -> int:
        """The first axis from which on the region contains all elements.

        For example 1, if the region has some rows of a matrix.
        """
        axis = len(self.sizes)
        while axis and self.sizes[axis - 1] == self.entry.shape[axis - 1]:
            axis -= 1
        return axis

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields the region's elements as row-major ranges [start, stop) of the stored tensor."""
        shape, axis = self.entry.shape, max(self.inner - 1, 0)
        strides = row_major(shape)
        length = prod(self.sizes[axis:])
        ends = zip(self.offsets[:axis], self.sizes[:axis], strict=True)
        for outer in product(*(range(offset, offset + size) for offset, size in ends)):
            corner = (*outer, *self.offsets[axis:])
            start = sum(offset * stride for offset, stride in zip(corner, strides, strict=True))
            yield start, start + length

    def cut(self, most: int) -> Iterator[BoxRegion]:
        """Divides the region into parts of at most `most` elements.

        It is cut along its first axis with more than one index.
        """
        if self.numel <= most:
            yield self
            return
        axis = next(place for place, size in enumerate(self.sizes) if size > 1)
        step = max(1, most * self.sizes[axis] // self.numel)
        for start in range(0, self.sizes[axis], step):
            count = min(step, self.sizes[axis] - start)
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[axis] += start
            sizes[axis] = count
            part = self.target.narrow(axis, start, count)
            yield from BoxRegion(self.entry, tuple(offsets), tuple(sizes), part).cut(most)

    def position(self) -> tuple[str, int]:
        """The file and the offset of the region's first byte, by which regions are sorted."""
        start, stop = next(self.runs())
        for fragment in self.entry.fragments.overlapping(start, stop):
            size = SIZES[self.entry.dtype]
            inside = 0 if fragment.count > 1 else max(0, start - fragment.start) * size
            return fragment.extent.file, fragment.extent.offset + inside
        return "", 0

    def wanted(self, at: int) -> Iterator[ReadRequest]:
        """Yields requests that read the region's elements into a buffer, from byte `at` on."""
        size = SIZES[self.entry.dtype]
        whole = self.inner <= 1  # many small runs: a record's checksum is not worth its pieces
        for start, stop in self.runs():
            yield ReadRequest(self.entry, start, stop, at, whole)
            at += (stop - start) * size


def fill(regions: Iterable[BoxRegion], records: Sequence[Record]) -> None:
    """Reads all regions into their tensors, many small regions together.

    Memory with two names (a tied weight) is filled once. Raises CorruptCheckpoint for damaged
    records.
    """
    seen = set()
    parts: list[BoxRegion] = []
    for region in regions:
        tensor = region.target
        memory = tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device
        key = id(region.entry), region.offsets, region.sizes, memory
        if region.numel and key not in seen:
            seen.add(key)
            parts += region.cut(BLOCK // 8)
    parts.sort(key=BoxRegion.position)
    view = Buffer(BLOCK).view
    with reading([RecordChecker(records)], BLOCK) as (element_reader,):
        for batch in portions(parts, _room, BLOCK):
            places = list(zip(batch, accumulate(map(_room, batch), initial=0), strict=False))
            element_reader.read([each for part, at in places for each in part.wanted(at)], view)
            for part, at in places:
                dtype = getattr(torch, TORCH_NAMES[part.entry.dtype])
                block = torch.frombuffer(view, dtype=dtype, count=part.numel, offset=at)
                part.target.copy_(block.view(part.sizes))


def _room(region: BoxRegion) -> int:
    return align(region.numel * SIZES[region.entry.dtype], 8)
