"""Reads, all-gathers and compares tensors in one process, in buckets.

A bucket is what one all-gather moves. While one is gathered and compared, the next one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from msgspec import Struct, field

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Key
from ...core.comparison.difference import Difference
from ...core.grouping import by_key
from ...core.passes.plan import Match
from ...core.passes.resources import Progress, describe
from ...core.ranks.partition import Joined
from ...core.storage.checksum import crc32
from .buckets import Block, Bucket, Cut, buckets, lines_of, share_of
from .buffers import BucketBuffers
from .elements import BITS, any_unequal, bytes_of, difference_of
from .readers import BlockMatch, Readers, Seen, memory_of
from .world import World

GLOO = 32 << 20  # bytes; for larger messages gloo needs more time per byte
ALIGNMENT = 8  # bytes; then every tensor in a buffer can be viewed in its type


class Flight(Struct, eq=False):
    """A bucket on its way through a process: read, then all-gathered, then compared."""

    bucket: Bucket
    slot: BucketBuffers
    items: list[BlockMatch]
    reads: list[Future[Any]]
    other_reads: list[Future[list[Seen]]]
    seen: list[Seen] = field(default_factory=list)
    flags: torch.Tensor | None = None


class Gathering:
    """Compares two checkpoints in one process, and collects differences and CRC-32s of tensors.

    The tensors of one checkpoint are all-gathered in buckets, and each bucket is compared.
    `matches` lists the pairs of tensors to compare. Results are kept by the index of the pair.
    """

    def __init__(
        self,
        world: World,
        matches: Sequence[tuple[Key, Match]],
        jobs: int,
        progress: Progress | None,
    ) -> None:
        self.world = world
        self.progress = progress
        self.readers = Readers(jobs)
        self.matches = [item for _, item in matches]
        numbered_matches = enumerate(matches)
        self.places = by_key(
            (key, place) for place, (key, item) in numbered_matches if item.is_read
        )
        # no compared side has the same bits, so these tensors need their own CRC
        self.apart = {
            places[0]
            for places in self.places.values()
            if all(self.matches[place].how != "bits" for place in places)
        }
        self.differences: dict[int, Difference] = {}
        self.crcs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.bytes = 0

    def run(self, parts: Sequence[Cut], memory: int) -> None:
        """Reads, gathers and compares all buckets: while one is compared, the next one is read."""
        least = max((len(part.ranks) for part in parts), default=1) * self.world.size * 8
        room, other = self._room(memory, least)
        slots = [BucketBuffers(self.world, room, other) for _ in range(2)]
        flights: list[Flight] = []
        for number, bucket in enumerate(buckets(parts, room, self.world.size)):
            if len(flights) == 2:
                self._finish(flights.pop(0))
            flights.append(self._read(bucket, slots[number % 2]))
            if len(flights) == 2:
                self._compare(flights[0])
        for flight in flights:
            if flight.flags is None:
                self._compare(flight)
            self._finish(flight)

    def _room(self, memory: int, least: int) -> tuple[int, int]:
        """The sizes of a bucket's two buffers: gathered rows, and the other checkpoint's elements.

        All sizes are in bytes. `memory` is for two buckets, but the rows get at least `least`.
        """
        most = 1.0
        for places in self.places.values():
            size = SIZES[self.matches[places[0]].a.dtype]
            entries = [self.matches[place].b for place in places]
            most = max(most, sum(SIZES[entry.dtype] for entry in entries if entry) / size)
        cuda = self.world.device.type == "cuda"
        near = self.world.transport != self.world.device
        own_share = 1 / self.world.size if cuda and not near else 0
        # gathered rows, their copy on the device, this process's rows, the other side twice, a mask
        share = (most * (2 if cuda else 1) + 1) / self.world.size
        room = int(memory / 2 / (1 + near + own_share + share))
        if self.world.transport.type == "cpu":
            room = min(room, GLOO)
        room = max(room // 4096 * 4096, least)
        return room, int(room * most / self.world.size)

    def _read(self, bucket: Bucket, slot: BucketBuffers) -> Flight:
        """Starts reading what this process needs for a bucket, which has a row for each rank.

        It reads its share of the rows. From the other checkpoint it reads the elements of those
        tensors that it will compare after the all-gather.
        """
        world = self.world
        rows_of_process = -(-bucket.rows // world.size)
        own_rows, _ = slot.own_rows(bucket)
        wanted = []
        for row in range(
            world.rank * rows_of_process, min((world.rank + 1) * rows_of_process, bucket.rows)
        ):
            for segment in bucket.segments:
                part = segment.part
                start, stop = part.own_range(row, segment.start, segment.stop)
                if start < stop:
                    at = (row - world.rank * rows_of_process) * bucket.width + segment.at
                    extent = part.extent(row).part(start * bucket.size, stop * bucket.size)
                    wanted.append((extent, at * bucket.size))
        reads = self.readers.extents(wanted, memory_of(own_rows))
        items, end = [], 0
        for block in share_of(bucket, world.rank, world.size):
            for place in self.places.get(block.member.key, ()):
                item = BlockMatch(block, place, self.matches[place], end)
                items.append(item)
                end = -(-item.end // ALIGNMENT) * ALIGNMENT
        if end > len(slot.other):  # alignment adds up over many small tensors
            slot.grow(end)
        other_reads = self.readers.elements(items, memory_of(slot.other))
        self.bytes += sum(extent.length for extent, _ in wanted)
        return Flight(bucket, slot, items, reads, other_reads)

    def _compare(self, flight: Flight) -> None:
        for reading in flight.reads:
            reading.result()
        flight.seen = [seen for read in flight.other_reads for seen in read.result()]
        slot, end = flight.slot, max((item.end for item in flight.items), default=0)
        self.bytes += end
        with torch.cuda.stream(slot.stream) if slot.stream else nullcontext():
            slot.move(flight.bucket, end)
            flags = torch.zeros(len(flight.items), dtype=torch.bool, device=self.world.device)
            for place, item in enumerate(flight.items):
                a, b = slot.sides(flight.bucket, item)
                flags[place] = any_unequal(a, b, item.match)
            flight.flags = flags
            if slot.done:
                slot.done.record()

    def _finish(self, flight: Flight) -> None:
        if flight.slot.done:
            flight.slot.done.synchronize()
        assert flight.flags is not None
        flags = zip(flight.items, flight.flags.tolist(), strict=True)
        differing = [item for item, flag in flags if flag]
        for item in differing:
            a, b = flight.slot.sides(flight.bucket, item)
            difference = difference_of(a, b, item)
            self.differences.setdefault(item.place, Difference()).add(difference)
        places = {id(item) for item in differing}
        for item, start, stop, crc in flight.seen:
            self._keep(item, 1, start, stop, crc)
            if item.match.how == "bits" and id(item) not in places:
                self._keep(item, 0, start, stop, crc)
        for item in flight.items:
            if item.place in self.apart or (item.match.how == "bits" and id(item) in places):
                self._hash(flight.slot.sides(flight.bucket, item)[0], item)
        if self.progress:
            if flight.items:
                describe(self.progress, f"gathering {flight.items[0].match.a.name}")
            self.progress(sum(item.end - item.at for item in flight.items) * 2)

    def _keep(self, item: BlockMatch, side: int, start: int, stop: int, crc: int) -> None:
        self.crcs.setdefault((item.place, side), []).append((start, stop, crc))

    def _hash(self, a: torch.Tensor, item: BlockMatch) -> None:
        """Computes the CRC-32s of a gathered block.

        This is needed only if it differs from the other checkpoint's block, or has another type.
        Otherwise the CRC-32s of the other block are used.
        """
        for lines, (start, stop) in zip(_lines(a, item.block), item.block.runs(), strict=True):
            self._keep(item, 0, start, stop, crc32(bytes_of(lines)))

    def compare_strided(self, tensor: Joined) -> None:
        """Compares one box (shard) that is not row-major in its file, in the CPU's memory."""
        (part,) = tensor.parts
        data = torch.empty(part.extent.length, dtype=torch.uint8)
        for reading in self.readers.extents([(part.extent, 0)], memory_of(data)):
            reading.result()
        assert part.strides is not None
        elements = data.view(BITS[SIZES[tensor.dtype]]).as_strided(part.sizes, part.strides)
        elements = elements.reshape(-1)
        for place in self.places.get(tensor.key, ()):
            match, end = self.matches[place], 0
            items = []
            for block in lines_of(tensor, 0, 0, elements.numel()):
                items.append(BlockMatch(block, place, match, end))
                end = items[-1].end
            other = torch.empty(end, dtype=torch.uint8)
            for seen in self.readers.elements(items, memory_of(other)):
                for item, start, stop, crc in seen.result():
                    self._keep(item, 1, start, stop, crc)
            for item in items:
                block = item.block
                shape = block.rows, block.columns
                a = elements[block.column : block.column + block.numel].view(shape)
                b = other[item.at : item.end].view(BITS[SIZES[item.other.dtype]]).view(shape)
                self.differences.setdefault(place, Difference()).add(difference_of(a, b, item))
                if item.match.how == "bits" or place in self.apart:
                    self._hash(a, item)


def _lines(a: torch.Tensor, block: Block) -> list[torch.Tensor]:
    """The rows of a block of elements: a tensor for each, or one tensor if they are contiguous.

    They are contiguous if each begins in the full tensor where the row before ends.
    """
    return [a] if len(block.runs()) == 1 else list(a)
