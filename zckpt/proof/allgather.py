"""The state that the ranks would all-gather, rebuilt the engine's way, and compared where it lies.

Every process reads some ranks' parts of the flat buffers, torch.distributed gathers them, and
parameters are cut out by the engine's own rule (`partition.py`), not by our manifest: of the
copying, this shares nothing but the parser of files. The other side is read through its manifest.

A bucket is as many columns of a (rank x element) matrix as memory allows, of as many buffers as
fit: one coalesced all-gather into a flat buffer that is there already, and tensors are compared as
views of it. Two buckets are in flight: threads read the next into pinned memory while this one is
moved, gathered and compared. What a process compares is a share of the gathered whole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeGuard, TypeVar

from .. import formats
from ..core.checksum import Cover, crc32
from ..core.compare import ComparisonOutcome, Result
from ..core.difference import Difference, measure, same
from ..core.dtypes import SIZES, TORCH_NAMES
from ..core.fileio import Reader, files_per_thread
from ..core.fragments import Box, Extent, Runs, solid
from ..core.manifest import Entry, Manifest
from ..core.partition import (
    Block,
    Bucket,
    FlatMember,
    Partition,
    Partitioned,
    Whole,
    buckets,
    share_of,
)
from ..core.pieces import ElementReader, ReadRequest, RecordChecker
from ..core.plan import Match, match
from ..errors import MissingExtra, ProcessFailed, WrongOption
from . import verify as proof

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtra(
        "--gather needs torch, which is not installed", hint="pip install 'zckpt[torch]'"
    ) from error

# all_gather_into_tensor is its name before torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GLOO = 32 << 20  # bytes; larger messages take it longer a byte
LINE = 4096  # bytes of a row, from which on rows are compared one by one
READ = 8 << 20  # bytes that one thread reads at a time
LOOK = 1 << 20  # elements of a difference that are looked at together
ALIGNMENT = 8  # bytes, so that every tensor in a buffer can be viewed in its type
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Report = dict[str, Any]
T = TypeVar("T")
Progress = Callable[[int], None]


# -- who takes part


@dataclass(frozen=True)
class World:
    """This process among those that gather; `transport` is where the gathered buffer lies."""

    rank: int
    size: int
    device: torch.device
    transport: torch.device
    started: bool

    def close(self) -> None:
        if self.started:
            dist.destroy_process_group()


def join_world(asked: str | None) -> World:
    """The processes that torchrun started, or this one alone.

    NCCL where every process has a GPU of its own; gloo gathers in the processor's memory where
    several share one, which NCCL refuses, and on the CPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise WrongOption("--device cuda, but torch finds no GPU", hint="use --device cpu")
    cuda = bool(gpus) and asked != "cpu"
    local = _stated("LOCAL_RANK", "SLURM_LOCALID", default=0)
    device = torch.device("cuda", local % gpus) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    size = _stated("WORLD_SIZE", default=1)
    started = size > 1 and not dist.is_initialized()
    if started:
        if "MASTER_ADDR" not in os.environ:
            raise WrongOption(
                f"WORLD_SIZE is {size}, but MASTER_ADDR does not say where they meet",
                hint="start it with `torchrun --nproc-per-node N -m zckpt verify ...`, or unset "
                "WORLD_SIZE",
            )
        own = _stated("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", default=size) <= gpus
        dist.init_process_group("nccl" if cuda and own and dist.is_nccl_available() else "gloo")
    if not dist.is_initialized():
        return World(0, 1, device, device, started=False)
    on_device = dist.get_backend() == "nccl"
    transport = device if on_device else torch.device("cpu")
    return World(dist.get_rank(), dist.get_world_size(), device, transport, started)


def _stated(*names: str, default: int) -> int:
    """A number of the environment, by the first of these names that it has."""
    told = next((os.environ[name] for name in names if name in os.environ), "")
    return int(told) if told.isdecimal() else default


@contextmanager
def _together_with_others() -> Iterator[None]:
    """Around what all processes take part in: it fails where one of them did."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessFailed("another process of this gathering failed") from error


# -- the work


@dataclass(frozen=True, slots=True)
class Item:
    """A block and one match of its tensor, whose other side begins at byte `at` of a buffer."""

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


class _Readers:
    """Threads that read parts of files into memory that tensors lie in."""

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="zckpt")
        self._own = threading.local()
        self._keep = files_per_thread(jobs)

    def _gatherer(self) -> ElementReader:
        if not hasattr(self._own, "gatherer"):
            self._own.gatherer = ElementReader(Reader(self._keep), RecordChecker(()), READ)
        held: ElementReader = self._own.gatherer
        return held

    def extents(self, wanted: Sequence[tuple[Extent, int]], into: memoryview) -> list[Future[Any]]:
        """Every extent to its byte of `into`."""
        small = [
            (extent.part(start, min(start + READ, extent.length)), at + start)
            for extent, at in wanted
            for start in range(0, extent.length, READ)
        ]

        def work(some: Sequence[tuple[Extent, int]]) -> None:
            reader = self._gatherer().reader
            for extent, at in some:
                reader.read(extent, into[at : at + extent.length])

        return [
            self._pool.submit(work, some) for some in _grouped(small, lambda item: item[0].length)
        ]

    def elements(self, items: Sequence[Item], into: memoryview) -> list[Future[list[Seen]]]:
        """The other side's elements of every item; gives their CRCs."""
        wanted = [
            (item, ReadRequest(item.other, first, min(first + step, stop), 0))
            for item in items
            for step in [max(1, READ // SIZES[item.other.dtype])]
            for start, stop in item.block.runs()
            for first in range(start, stop, step)
        ]
        here, placed, last = 0, [], None
        for item, part in wanted:
            here = item.at if item is not last else here
            placed.append((item, replace(part, at=here)))
            here, last = placed[-1][1].end, item

        def work(some: Sequence[tuple[Item, ReadRequest]]) -> list[Seen]:
            self._gatherer().read([part for _, part in some], into)
            return [
                (item, part.start, part.stop, crc32(into[part.at : part.end]))
                for item, part in some
            ]

        return [
            self._pool.submit(work, some)
            for some in _grouped(placed, lambda item: item[1].end - item[1].at)
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


Seen = tuple[Item, int, int, int]
"""An item, a range of its tensor's elements, and the CRC-32 of the other side's bytes there."""


def _grouped(listed: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbours together, about READ bytes of them."""
    some: list[T] = []
    size = 0
    for item in listed:
        if some and size + length(item) > READ:
            yield some
            some, size = [], 0
        some.append(item)
        size += length(item)
    if some:
        yield some


class _Slot:
    """Memory of one bucket in flight: the gathered rows, this process's own, the other side."""

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

    def own(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this process's rows are read, and where they are gathered from."""
        length = self.rows(bucket) // self.world.size
        part = self.gathered[self.world.rank * length : (self.world.rank + 1) * length]
        return (part if self._rows is None else self._rows[:length]), part

    def grow(self, other: int) -> None:
        """More room for the other side; what is there is lost."""
        self.other = self._host(other)
        self.near_other = self._near(other) if self.cuda else self.other

    def rows(self, bucket: Bucket) -> int:
        """Bytes of all rows, those included that fill up the last processes."""
        each = -(-bucket.rows // self.world.size)
        return each * self.world.size * bucket.width * bucket.size

    def move(self, bucket: Bucket, other: int) -> None:
        """Gathers what was read; brings it, and `other` bytes of the other side, to the device."""
        read, part = self.own(bucket)
        if self._rows is not None:
            part.copy_(read, non_blocking=True)
        if self.cuda:
            self.near_other[:other].copy_(self.other[:other], non_blocking=True)
        whole = self.gathered[: self.rows(bucket)]
        if self.world.size > 1:
            with _together_with_others():
                self._all_gather(whole, part)
        if self.near is not self.gathered:
            self.near[: len(whole)].copy_(whole, non_blocking=True)

    def _all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Every process's part, which lies in its place of the whole already, to all others.

        gloo's own all-gather copies twice: broadcasts of the parts, under way together, bring the
        same bytes in half of the time (torch 2.13, 2 and 4 processes on one machine).
        """
        if self.world.transport.type == "cuda":
            ALL_GATHER(whole, part)
            return
        parts = enumerate(whole.chunk(self.world.size))
        for work in [dist.broadcast(held, rank, async_op=True) for rank, held in parts]:
            work.wait()

    def sides(self, bucket: Bucket, item: Item) -> tuple[torch.Tensor, torch.Tensor]:
        """A block as the engine's ranks hold it and as the other side does: views, no copies."""
        block, other = item.block, item.other
        matrix = self.near[: self.rows(bucket)].view(BITS[bucket.size]).view(-1, bucket.width)
        a = matrix[block.row : block.row + block.rows, block.column : block.column + block.columns]
        b = self.near_other[item.at : item.end].view(BITS[SIZES[other.dtype]])
        return a, b.view(block.rows, block.columns)


@dataclass
class _Flight:
    """A bucket under way."""

    bucket: Bucket
    slot: _Slot
    items: list[Item]
    reads: list[Future[Any]]
    other_reads: list[Future[list[Seen]]]
    seen: list[Seen] = field(default_factory=list)
    flags: torch.Tensor | None = None


class _Gathering:
    """Everything that one process does, and what it found."""

    def __init__(
        self,
        world: World,
        matches: Sequence[tuple[str, Match]],
        jobs: int,
        progress: Progress | None,
    ) -> None:
        self.world = world
        self.progress = progress
        self.readers = _Readers(jobs)
        self.matches = [item for _, item in matches]
        self.places: dict[str, list[int]] = {}
        for place, (key, item) in enumerate(matches):
            if item.is_read:
                self.places.setdefault(key, []).append(place)
        # tensors with nothing of their own bits to be compared with are hashed by themselves
        self.apart = {
            places[0]
            for places in self.places.values()
            if all(self.matches[place].how != "bits" for place in places)
        }
        self.found: dict[int, Difference] = {}
        self.crcs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.bytes = 0

    def run(self, parts: Sequence[Partitioned], memory: int) -> None:
        """All buckets, two in flight at a time."""
        least = max((len(part.ranks) for part in parts), default=1) * self.world.size * 8
        room, other = self._room(memory, least)
        slots = [_Slot(self.world, room, other) for _ in range(2)]
        flights: list[_Flight] = []
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
        """Bytes of gathered rows, and of the other side, in each slot."""
        most = 1.0
        for places in self.places.values():
            size = SIZES[self.matches[places[0]].a.dtype]
            entries = [self.matches[place].b for place in places]
            most = max(most, sum(SIZES[entry.dtype] for entry in entries if entry) / size)
        cuda = self.world.device.type == "cuda"
        near = self.world.transport != self.world.device
        own = 1 / self.world.size if cuda and not near else 0
        # rows, their copy on the device, own rows, the other side twice, a mask of the comparison
        share = (most * (2 if cuda else 1) + 1) / self.world.size
        room = int(memory / 2 / (1 + near + own + share))
        if self.world.transport.type == "cpu":
            room = min(room, GLOO)
        room = max(room // 4096 * 4096, least)
        return room, int(room * most / self.world.size)

    def _read(self, bucket: Bucket, slot: _Slot) -> _Flight:
        """Starts reading this process's rows, and its share of the other side."""
        world = self.world
        each = -(-bucket.rows // world.size)
        read, _ = slot.own(bucket)
        wanted = []
        for row in range(world.rank * each, min((world.rank + 1) * each, bucket.rows)):
            for segment in bucket.segments:
                part = segment.part
                stop = min(segment.stop, part.length(row))
                if segment.start < stop:
                    at = (row - world.rank * each) * bucket.width + segment.at
                    extent = part.ranks[row].part(segment.start * bucket.size, stop * bucket.size)
                    wanted.append((extent, at * bucket.size))
        reads = self.readers.extents(wanted, _memory(read))
        items, here = [], 0
        for block in share_of(bucket.blocks(), world.rank, world.size):
            for place in self.places.get(block.member.name, ()):
                item = Item(block, place, self.matches[place], here)
                items.append(item)
                here = -(-item.end // ALIGNMENT) * ALIGNMENT
        if here > len(slot.other):  # many small tensors, whose alignment counts
            slot.grow(here)
        others = self.readers.elements(items, _memory(slot.other))
        self.bytes += sum(extent.length for extent, _ in wanted)
        return _Flight(bucket, slot, items, reads, others)

    def _compare(self, flight: _Flight) -> None:
        """Waits for the reads; everything after them is only started, on a GPU."""
        for read in flight.reads:
            read.result()
        flight.seen = [seen for read in flight.other_reads for seen in read.result()]
        slot, end = flight.slot, max((item.end for item in flight.items), default=0)
        self.bytes += end
        with torch.cuda.stream(slot.stream) if slot.stream else nullcontext():
            slot.move(flight.bucket, end)
            flags = torch.zeros(len(flight.items), dtype=torch.bool, device=self.world.device)
            for place, item in enumerate(flight.items):
                a, b = slot.sides(flight.bucket, item)
                flags[place] = _any_unequal(a, b, item.match)
            flight.flags = flags
            if slot.done:
                slot.done.record()

    def _finish(self, flight: _Flight) -> None:
        """What the comparison found; only what differs is looked at once more."""
        if flight.slot.done:
            flight.slot.done.synchronize()
        assert flight.flags is not None
        differing = [
            item
            for item, flag in zip(flight.items, flight.flags.tolist(), strict=True)
            if flag or item.match.how == "values"
        ]
        for item in differing:
            a, b = flight.slot.sides(flight.bucket, item)
            found = _difference(a, b, item)
            self.found.setdefault(item.place, Difference()).add(found)
        places = {id(item) for item in differing}
        for item, start, stop, crc in flight.seen:
            self._keep(item, 1, start, stop, crc)
            if item.match.how == "bits" and id(item) not in places:
                self._keep(item, 0, start, stop, crc)
        for item in flight.items:
            if item.place in self.apart or (item.match.how == "bits" and id(item) in places):
                self._hash(flight.slot.sides(flight.bucket, item)[0], item)
        if self.progress:
            self.progress(sum(item.end - item.at for item in flight.items) * 2)

    def _keep(self, item: Item, side: int, start: int, stop: int, crc: int) -> None:
        self.crcs.setdefault((item.place, side), []).append((start, stop, crc))

    def _hash(self, a: torch.Tensor, item: Item) -> None:
        """The CRCs of a block that is not the other side's."""
        for lines, (start, stop) in zip(_lines(a, item.block), item.block.runs(), strict=True):
            self._keep(item, 0, start, stop, crc32(_bytes(lines)))

    def look_at(self, part: Whole) -> None:
        """Compares a tensor that is not row-major, in the processor's memory."""
        data = torch.empty(part.extent.length, dtype=torch.uint8)
        for read in self.readers.extents([(part.extent, 0)], _memory(data)):
            read.result()
        assert part.strides is not None
        a = data.view(BITS[SIZES[part.dtype]]).as_strided(part.shape, part.strides).reshape(1, -1)
        block = Block(FlatMember(part.name, part.shape, 0), 0, 1, 0, a.numel(), 0, 0)
        for place in self.places.get(part.name, ()):
            item = Item(block, place, self.matches[place], 0)
            held = torch.empty(item.end, dtype=torch.uint8)
            for seen in self.readers.elements([item], _memory(held)):
                for _, start, stop, crc in seen.result():
                    self._keep(item, 1, start, stop, crc)
            b = held.view(BITS[SIZES[item.other.dtype]]).view(1, -1)
            self.found.setdefault(place, Difference()).add(_difference(a, b, item))
            if item.match.how == "bits" or place in self.apart:
                self._hash(a, item)


def _lines(a: torch.Tensor, block: Block) -> list[torch.Tensor]:
    """A block's rows, or all of it where they follow each other in the tensor."""
    return [a] if len(block.runs()) == 1 else list(a)


def _float(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    return bits.view(kind)


def _unequal(a: torch.Tensor, b: torch.Tensor, item: Match) -> torch.Tensor:
    """Where two blocks, given by their bits, differ."""
    assert item.b is not None
    if item.how == "values":
        ours, theirs = _float(a, item.a.dtype).double(), _float(b, item.b.dtype).double()
        return (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    a, b = _rounded(a, b, item)
    return torch.ne(a, b)


def _any_unequal(a: torch.Tensor, b: torch.Tensor, item: Match) -> torch.Tensor | bool:
    """Whether two blocks differ anywhere: on a GPU without waiting for the answer."""
    if item.how == "bits" and a.device.type == "cpu":
        if a.shape[1] * a.element_size() < LINE:
            return not torch.equal(a, b)
        lines = zip(a, b, strict=True)  # memcmp(3) is five times faster than torch's comparison
        return not all(same(_memory(one), _memory(other)) for one, other in lines)
    return _unequal(a, b, item).any()


def _rounded(a: torch.Tensor, b: torch.Tensor, item: Match) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bits of one type: the wider is rounded to the other's."""
    assert item.b is not None
    if item.how != "rounded":
        return a, b
    if SIZES[item.a.dtype] > SIZES[item.b.dtype]:
        narrow = getattr(torch, TORCH_NAMES[item.b.dtype])
        return _float(a, item.a.dtype).to(narrow).view(b.dtype), b
    narrow = getattr(torch, TORCH_NAMES[item.a.dtype])
    return a, _float(b, item.b.dtype).to(narrow).view(a.dtype)


def _difference(a: torch.Tensor, b: torch.Tensor, item: Item) -> Difference:
    """Numbers of a block that differs; only the elements that do leave the device."""
    held, found = item.match, Difference()
    dtypes = (held.a.dtype, item.other.dtype)
    if held.how == "rounded":
        a, b = _rounded(a, b, held)
        narrow = min(dtypes, key=lambda dtype: SIZES[dtype])
        dtypes = (narrow, narrow)
    plain = replace(held, how="bits") if held.how == "rounded" else held
    columns = item.block.columns
    step = max(1, LOOK // columns)
    for row in range(0, item.block.rows, step):
        for column in range(0, columns, LOOK):
            ours = a[row : row + step, column : column + LOOK]
            theirs = b[row : row + step, column : column + LOOK]
            unequal = _unequal(ours, theirs, plain)
            places = unequal.nonzero()
            if not len(places):
                continue
            views = [_bytes(side[unequal]) for side in (ours, theirs)]
            part = measure(views[0], dtypes[0], views[1], dtypes[1], 0, held.how == "rounded")
            if part.first is not None:
                at_row, at_column = places[part.first].tolist()
                first = (row + at_row) * item.block.stride + column + at_column
                part.first = item.block.start + first
            found.add(part)
    return found


def _memory(tensor: torch.Tensor) -> memoryview:
    """What a tensor of bytes in the processor's memory lies in."""
    held: Any = tensor.numpy()
    return memoryview(held)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements, row-major."""
    return _memory(tensor.contiguous().view(-1).view(torch.uint8).cpu())


# -- the whole


def verify_gathered(
    manifest: Manifest,
    other: Manifest,
    pattern: str | None = None,
    device: str | None = None,
    *,
    jobs: int = 4,
    memory: int = 256 << 20,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """Whether what the ranks of `manifest` would gather is what `other` holds.

    Every process of the world gives the same report, with its own `rank`. Raises WrongOption,
    MissingData where no weights are shared.
    """
    world = join_world(device)
    try:
        return _verify(world, manifest, other, pattern, jobs, memory, begin)
    finally:
        world.close()


def _verify(
    world: World,
    manifest: Manifest,
    other: Manifest,
    pattern: str | None,
    jobs: int,
    memory: int,
    begin: Callable[[int], Progress] | None,
) -> Report:
    parts, held, copies = _named(_parts(manifest), manifest)
    known = [name for name in manifest.entries if name in held]  # in the order of the model
    ours = replace(manifest, entries={name: held[name] for name in (*known, *held)}, replicas=())
    found, only_a, only_b = match(ours, other)
    matches = [(item.a.name, item) for item in found if item.a.slot != "state"]
    matches += [
        (key, Match(entry, item.b, "bits" if _alike(entry, item.b) else "shapes", copy=True))
        for key, entry in copies.items()
        for item in found
        if item.a.name == entry.name and item.how == "bits" and item.b and not item.copy
    ]
    chosen = {id(item) for item in proof.chosen([item for _, item in matches], pattern)}
    matches = [(key, item) for key, item in matches if id(item) in chosen]
    if pattern is None:
        proof.needs_weights([item for _, item in matches], manifest.root, other.root)
    total = sum(2 * item.b.length for _, item in matches if item.b) // world.size
    progress = begin(total) if begin and not world.rank else None
    gathering = _Gathering(world, matches, jobs, progress)
    try:
        flat = [part for part in parts if isinstance(part, Partitioned)]
        flat += [_spread(part, world.size) for part in parts if _is_flat(part)]
        flat = [
            part for part in flat if any(member.name in gathering.places for member in part.members)
        ]
        gathering.run(_by_kind(flat), memory)
        strided = [part for part in parts if isinstance(part, Whole) and part.strides]
        for part in strided[world.rank :: world.size]:
            gathering.look_at(part)
    finally:
        gathering.readers.close()
    outcome = _together(world, gathering)
    told = proof.findings(outcome, manifest, other)
    told |= proof.inferences([item for _, item in matches], manifest, other)
    told["problems"] += _uncovered(outcome)
    told["records"] = None  # CRCs of records are for the reading that is not gathered
    if pattern is None:
        told["problems"] += _forgotten(manifest, held)
        only = [
            [name for name in names if not name.endswith("/state")] for names in (only_a, only_b)
        ]
        told = proof.with_values(told, ours, other, *only)
    versions = {**proof.versions(manifest, other), "torch": torch.__version__}
    return {
        **told,
        "equal": proof.nothing_found(told),
        "device": str(world.device.type),
        "world": world.size,
        "rank": world.rank,
        "versions": versions,
    }


def _alike(a: Entry, b: Entry | None) -> bool:
    return b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _uncovered(outcome: ComparisonOutcome) -> list[Report]:
    """Tensors of which some elements were not brought by any bucket."""
    return [
        {
            "tensor": result.match.name,
            "message": f"{result.match.name}: what the ranks hold does not cover its "
            f"{result.match.a.numel} elements",
        }
        for result in outcome.results
        if result.match.is_read and result.digests[1] is None
    ]


def _forgotten(manifest: Manifest, held: Mapping[str, Entry]) -> list[Report]:
    """Tensors that our reader knows, and the engine's rule does not."""
    return [
        {"tensor": name, "message": f"{name} is not what the engine would gather"}
        for name in manifest.entries
        if name not in held and not name.endswith("/state")
    ]


def _parts(manifest: Manifest) -> list[Partition]:
    """By the engine's rule; formats that no engine gathers hold their tensors whole."""
    module = formats.named(manifest.format).load()
    if hasattr(module, "partitions"):
        found: list[Partition] = module.partitions(manifest.root)
        return found
    return [_own(entry) for entry in manifest.entries.values() if entry.slot != "state"]


def _own(entry: Entry) -> Partition:
    fragments = entry.fragments
    if isinstance(fragments, Box):  # alone it is all of the tensor
        size = fragments.size
        last = sum(
            (count - 1) * step
            for count, step in zip(fragments.sizes, fragments.strides, strict=True)
        )
        extent = fragments.extent.part(fragments.first * size, (fragments.first + last + 1) * size)
        return Whole(entry.name, entry.dtype, fragments.sizes, extent, fragments.strides)
    # pieces that are cut along an inner axis are as many runs, between those of others
    runs = (run for fragment in fragments for run in fragment.runs(0, entry.numel))
    extents = tuple(run.extent for run in sorted(runs, key=lambda run: run.start))
    return Partitioned(entry.dtype, extents, [FlatMember(entry.name, entry.shape, 0)])


def _named(
    parts: Sequence[Partition], manifest: Manifest
) -> tuple[list[Partition], dict[str, Entry], dict[str, Entry]]:
    """Parts under keys of their own, the tensors by name, and further copies of them by key.

    A tied weight goes by its owner's name. Copies: whole momenta on several ranks, a tied weight
    that was saved with memory of its own.
    """
    owners = {alias: name for name, held in manifest.parameters.items() for alias in held.aliases}
    named: list[Partition] = []
    entries: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    for part in parts:
        if isinstance(part, Partitioned):
            for member in part.members:
                entry = Entry(member.name, part.dtype, member.shape, Runs([]))
                entries.setdefault(member.name, entry)
            named.append(part)
            continue
        parameter, _, slot = part.name.rpartition("/")
        name = f"{owners.get(parameter, parameter)}/{slot}"
        fragments = Runs([]) if part.strides else solid(prod(part.shape), part.extent)
        entry = Entry(name, part.dtype, part.shape, fragments)
        key = name if name not in entries else f"{name}#{len(copies)}"
        (entries if key == name else copies)[key] = entry
        named.append(replace(part, name=key))
    return named, entries, copies


def _is_flat(part: Partition) -> TypeGuard[Whole]:
    return isinstance(part, Whole) and part.strides is None


def _spread(part: Whole, size: int) -> Partitioned:
    """A whole tensor as if every process held a part, so that each reads its own alone."""
    width = SIZES[part.dtype]
    numel = part.extent.length // width
    each = -(-numel // size) * width
    ends = [min((rank + 1) * each, numel * width) for rank in range(size)]
    ranks = [part.extent.part(min(rank * each, end), end) for rank, end in enumerate(ends)]
    return Partitioned(part.dtype, tuple(ranks), [FlatMember(part.name, part.shape, 0)])


def _by_kind(parts: Sequence[Partitioned]) -> list[Partitioned]:
    """In their order, but those together that fit into common buckets."""
    kinds: dict[tuple[str, int], list[Partitioned]] = {}
    for part in parts:
        kinds.setdefault((part.dtype, len(part.ranks)), []).append(part)
    return [part for held in kinds.values() for part in held]


def _together(world: World, own: _Gathering) -> ComparisonOutcome:
    """What all processes found, as each of them then knows it."""
    mine = (own.found, own.crcs, own.bytes)
    everyone: list[Any] = [mine]
    if world.size > 1:
        everyone = [None] * world.size
        with _together_with_others():
            dist.all_gather_object(everyone, mine)
    found: dict[int, Difference] = {}
    covers: dict[tuple[int, int], Cover] = {}
    for differences, crcs, _ in everyone:
        for place, difference in differences.items():
            found.setdefault(place, Difference()).add(difference)
        for (place, side), ranges in crcs.items():
            item = own.matches[place]
            entry = item.b if side else item.a
            assert entry is not None
            cover = covers.setdefault((place, side), Cover(entry.length))
            for start, stop, crc in ranges:
                cover.add(start * SIZES[entry.dtype], stop * SIZES[entry.dtype], crc)
    results = []
    for place, item in enumerate(own.matches):
        sides = [covers.get((place, side)) for side in (0, 1)]
        digests = [0 if not item.a.numel else cover.crc if cover else None for cover in sides]
        results.append(Result(item, (digests[0], digests[1]), found.get(place)))
    return ComparisonOutcome(results, bytes=sum(size for _, _, size in everyone))
