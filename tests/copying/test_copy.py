"""Copies of synthetic layouts: every byte, CRC and failure, in chunks of a few kilobytes."""

from __future__ import annotations

import _thread
import errno
import os
import random
import signal
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from zckpt.copying import assembling
from zckpt.copying import copy as execute
from zckpt.copying.journal import Journal
from zckpt.copying.sharing import ALONE, Sharing
from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.checkpoint.entries import Entry, Key, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison.compare import compare
from zckpt.core.passes import pieces as elements
from zckpt.core.passes import plan
from zckpt.core.passes.layout import CopyOutcome
from zckpt.core.passes.resources import DEFAULT_COPYING, Copying, Progress
from zckpt.core.storage import records
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.fragments import (
    Box,
    Extent,
    Fragment,
    Fragments,
    Record,
    Runs,
    Slices,
    boxes,
    range_of_box,
    solid,
)
from zckpt.core.storage.sources import Fingerprint
from zckpt.errors import CorruptCheckpoint, SourceChanged, UnsupportedCheckpoint

CHUNK = 8192


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks(monkeypatch, CHUNK)


def use_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(execute, "chunk_size", lambda *_: chunk)
    monkeypatch.setattr(elements, "SMALL", 64)
    monkeypatch.setattr(records, "LITTLE", 4096)
    monkeypatch.setattr(elements, "CAST_BLOCK", 100)
    monkeypatch.setattr(assembling, "SMALL", 64)
    monkeypatch.setattr(assembling, "CAST_BLOCK", 100)


@dataclass
class Disk:
    """Files in the making, and where the tensors of a checkpoint were put in them."""

    root: Path
    random: random.Random
    files: dict[str, bytearray] = field(default_factory=dict)
    entries: dict[Key, Entry] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)

    def put(self, name: str, data: bytes, size: int, most: int = 50) -> Extent:
        """`data` behind a gap of random bytes, at a multiple of `size`."""
        file = self.files.setdefault(str(self.root / name), bytearray())
        gap = self.random.choice([0, 0, self.random.randrange(most)])
        gap += -(len(file) + gap) % size
        file += self.random.randbytes(gap)
        extent = Extent(str(self.root / name), len(file), len(data))
        file += data
        return extent

    def runs(self, data: bytes, size: int) -> Runs:
        """Cut anywhere, the pieces in several files."""
        numel = len(data) // size
        cuts = sorted({0, numel, *(self.random.randint(0, numel) for _ in range(4))})
        listed = []
        for start, stop in pairwise(cuts):
            extent = self.put(
                f"run {self.random.randrange(3)}", data[start * size : stop * size], size
            )
            listed.append(Fragment(start, stop, extent))
            self.extents.append(extent)
        return Runs(listed)

    def whole(self, data: bytes, size: int) -> Fragments:
        extent = self.put(f"whole {self.random.randrange(2)}", data, size)
        self.extents.append(extent)
        return solid(len(data) // size, extent)

    def slices(self, tensors: list[bytes], size: int, dp: int, name: str) -> list[Fragments]:
        """ZeRO-3's flat buffers, the padding of random bytes."""
        flats, places = [bytearray() for _ in range(dp)], []
        for data in tensors:
            width = -(-(len(data) // size) // dp) * size
            places.append(len(flats[0]) // size)
            for rank, flat in enumerate(flats):
                mine = data[rank * width : (rank + 1) * width]
                flat += mine + self.random.randbytes(width - len(mine))
        extents = tuple(
            self.put(f"{name} rank {rank}", bytes(flat), size) for rank, flat in enumerate(flats)
        )
        self.extents += extents
        return [
            Slices(extents, place, len(data) // size, size)
            for place, data in zip(places, tensors, strict=True)
        ]

    def lines(self, data: bytes, size: int, shape: tuple[int, ...]) -> Fragments:
        """The tensor in another order of its axes."""
        order = list(range(len(shape)))
        self.random.shuffle(order)
        unit = torch.uint8
        tensor = torch.frombuffer(bytearray(data), dtype=unit).view(*shape, size)
        moved = tensor.permute(*order, len(shape)).contiguous()
        strides = [0] * len(shape)
        for axis, stride in zip(order, moved.stride()[:-1], strict=True):
            strides[axis] = stride // size
        extent = self.put("lines", bytes(moved.view(-1).numpy()), size)
        self.extents.append(extent)
        return Box(
            whole=shape,
            offsets=(0,) * len(shape),
            sizes=shape,
            strides=strides,
            first=0,
            size=size,
            extent=extent,
        )

    def boxes(self, data: bytes, size: int, shape: tuple[int, ...], split: int = 0) -> Fragments:
        """Cut along any axes, each part row-major, and cut again into up to `split` + 1 ranges."""
        cuts = [
            sorted({0, length, *(self.random.randint(0, length) for _ in range(2))})
            for length in shape
        ]
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*shape, size)
        parts: list[Box] = []
        for corner in product(*map(pairwise, cuts)):
            part = whole[tuple(slice(*ends) for ends in corner)].contiguous()
            offsets, sizes = [start for start, _ in corner], part.shape[:-1]
            bounds = {0, prod(sizes), *(self.random.randint(0, prod(sizes)) for _ in range(split))}
            for start, stop in pairwise(sorted(bounds)):
                inside = bytes(part.view(-1)[start * size : stop * size].numpy())
                extent = self.put(f"box {len(parts) % 3}", inside, size)
                self.extents.append(extent)
                parts += range_of_box(shape, offsets, sizes, start, stop, size, extent)
        return boxes(parts)

    def ranges(self, data: bytes, size: int, shape: tuple[int, ...]) -> Fragments:
        """As the partitions of tensor-parallel slices lie in files."""
        return self.boxes(data, size, shape, 2)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], fragments: Fragments) -> None:
        self.entries[key_of(name)] = Entry(*key_of(name), dtype, shape, fragments)

    def write(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for path, data in self.files.items():
            data += self.random.randbytes(self.random.randrange(30))
            Path(path).write_bytes(data)

    def manifest(self, checked: bool = True) -> Manifest:
        records = tuple(
            Record(
                extent,
                zlib.crc32(self.files[extent.file][extent.offset : extent.offset + extent.length])
                if checked
                else None,
            )
            for extent in self.extents
            if extent.length
        )
        return Manifest(
            str(self.root), "x", Run(), dict(self.entries), {}, files=Files(records=records)
        )


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def some_tensors(chosen: random.Random, dtypes: tuple[str, ...], count: int) -> list[Tensor]:
    tensors = []
    for place in range(count):
        dtype = chosen.choice(dtypes)
        shape = tuple(chosen.choice([1, 2, 3, 7, 13]) for _ in range(chosen.choice([1, 1, 2, 3])))
        if chosen.random() < 0.2:
            shape = (chosen.randint(0, 6000),)
        data = chosen.randbytes(prod(shape) * SIZES[dtype])
        tensors.append(Tensor(f"{place}/exp_avg", dtype, shape, data))
    return tensors


def lay(disk: Disk, tensors: list[Tensor], kinds: tuple[str, ...]) -> None:
    """Puts every tensor somewhere: tensors of one dtype that are cut in slices share buffers."""
    sliced: dict[tuple[str, int], list[Tensor]] = {}
    for tensor in tensors:
        size = SIZES[tensor.dtype]
        kind = disk.random.choice(kinds)
        if kind == "slices":
            sliced.setdefault((tensor.dtype, disk.random.choice([1, 2, 3, 9])), []).append(tensor)
            continue
        if kind in ("lines", "boxes", "ranges") and tensor.data:
            layout = {"lines": disk.lines, "boxes": disk.boxes, "ranges": disk.ranges}[kind]
            fragments = layout(tensor.data, size, tensor.shape)
        else:
            fragments = (disk.runs if kind == "runs" else disk.whole)(tensor.data, size)
        disk.add(tensor.name, tensor.dtype, tensor.shape, fragments)
    for (dtype, dp), same_kind in sliced.items():
        for tensor, fragments in zip(
            same_kind,
            disk.slices([item.data for item in same_kind], SIZES[dtype], dp, f"{dtype} {dp}"),
            strict=True,
        ):
            disk.add(tensor.name, dtype, tensor.shape, fragments)


def torch_cast(data: bytes, source: str, target: str) -> bytes:
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, TORCH_NAMES[source]))
    return bytes(tensor.to(getattr(torch, TORCH_NAMES[target])).view(torch.uint8).numpy())


@dataclass
class Job:
    """A source, shells of a target, and what the target must be in the end."""

    source: Disk
    target: Disk
    tensors: list[Tensor]

    def copy(
        self,
        copying: Copying = DEFAULT_COPYING,
        progress: Progress | None = None,
        checked: bool = True,
        journal: Journal | None = None,
    ) -> CopyOutcome:
        outcome = self.copy_portions(ALONE, copying, progress, checked, journal)
        assert outcome is not None
        return outcome

    def copy_portions(
        self,
        sharing: Sharing,
        copying: Copying = DEFAULT_COPYING,
        progress: Progress | None = None,
        checked: bool = True,
        journal: Journal | None = None,
    ) -> CopyOutcome | None:
        source, target = self.source.manifest(checked), self.target.manifest()
        pairs = plan.join(source, target, from_masters=False)
        with Folder.at(str(self.target.root)) as root:
            return execute.copy(pairs, source, target, root, copying, progress, journal, sharing)

    def check(self, outcome: CopyOutcome) -> None:
        for path, data in self.target.files.items():
            assert Path(path).read_bytes() == data, path
        for path, (size, crc) in outcome.files.items():
            assert (size, crc) == (
                len(self.target.files[path]),
                zlib.crc32(self.target.files[path]),
            )
        assert outcome.digests == {
            0: {key_of(item.name): zlib.crc32(item.data) for item in self.tensors}
        }
        for extent, crc in outcome.records.items():
            data = self.target.files[extent.file][extent.offset : extent.offset + extent.length]
            assert crc == zlib.crc32(data)
        assert not [thread for thread in threading.enumerate() if "zckpt" in thread.name]
        assert not open_files(self)


def open_files(job: Job) -> list[str]:
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of listdir itself
            continue
    return [path for path in paths if path in {**job.source.files, **job.target.files}]


def prepare(
    root: Path,
    seed: int,
    tensors: list[Tensor],
    source: tuple[str, ...] = ("runs", "slices", "lines", "boxes", "ranges", "whole"),
    target: tuple[str, ...] = ("whole", "runs", "slices", "lines", "boxes", "ranges"),
    dtypes: dict[str, str] | None = None,
) -> Job:
    """`dtypes` of the target by name of the tensor, where another than the source's."""
    chosen = random.Random(seed)
    disks = Disk(root / "source", chosen), Disk(root / "target", chosen)
    lay(disks[0], tensors, source)
    disks[0].write()
    wanted = [replace_tensor(item, (dtypes or {}).get(item.name, item.dtype)) for item in tensors]
    lay(disks[1], wanted, target)
    disks[1].write()
    for entry in disks[1].entries.values():  # a shell: the tensors' bytes are holes
        for fragment in entry.fragments:
            with open(fragment.extent.file, "r+b") as file:
                os.pwrite(file.fileno(), bytes(fragment.extent.length), fragment.extent.offset)
    return Job(*disks, wanted)


def replace_tensor(tensor: Tensor, dtype: str) -> Tensor:
    if dtype == tensor.dtype or not tensor.data:
        return replace(tensor, dtype=dtype)
    return replace(tensor, dtype=dtype, data=torch_cast(tensor.data, tensor.dtype, dtype))


ANY = ("F32", "BF16", "I64", "U8", "F16")
ANYWHERE = ("runs", "slices", "lines", "boxes", "ranges", "whole")


@pytest.mark.parametrize("seed", range(14))
def test_random_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = random.Random(seed)
    use_chunks(monkeypatch, chosen.choice([4096, 12288, 1 << 20]))
    job = prepare(tmp_path, seed, some_tensors(chosen, ANY, chosen.choice([1, 10, 40])))
    done: list[int] = []
    outcome = job.copy(Copying(jobs=chosen.choice([1, 2, 4])), done.append)
    job.check(outcome)
    assert sum(done) == outcome.bytes == sum(size for size, _ in outcome.files.values())


@pytest.mark.parametrize("kinds", [(ANYWHERE, ANYWHERE), (("whole",), ("runs",))])
@pytest.mark.parametrize("damaged", [None, 0, 1, 2])
def test_tensors_of_one_name_on_several_ranks(
    tmp_path: Path, damaged: int | None, kinds: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    """Each rank's own bytes are copied, and those of every rank are checked."""
    alike, chosen = some_tensors(random.Random(4), ("F32", "BF16"), 8), random.Random(9)
    jobs = []
    for rank in range(3):
        own = [replace(item, data=chosen.randbytes(len(item.data))) for item in alike]
        jobs.append(prepare(tmp_path / str(rank), 7, own, *kinds))
    if damaged is not None:
        flip(max(touched(jobs[damaged].source), key=lambda extent: extent.length), 0)
    sources, targets = ([getattr(job, side) for job in jobs] for side in ("source", "target"))
    grids = [
        Manifest(
            str(tmp_path),
            "x",
            Run(),
            {},
            {},
            ranks=tuple(disk.manifest() for disk in disks),
            files=Files(
                records=tuple(record for disk in disks for record in disk.manifest().files.records)
            ),
        )
        for disks in (sources, targets)
    ]
    pairs = plan.join(*grids, from_masters=False)
    with Folder.at(str(tmp_path)) as root:
        if damaged is not None:
            with pytest.raises(CorruptCheckpoint, match=f"/{damaged}/source"):
                execute.copy(pairs, *grids, root, DEFAULT_COPYING, None, None, ALONE)
            return
        outcome = execute.copy(pairs, *grids, root, DEFAULT_COPYING, None, None, ALONE)
    assert outcome is not None
    assert outcome.counts.unchecked == 0
    assert outcome.digests == {
        rank: {key_of(item.name): zlib.crc32(item.data) for item in job.tensors}
        for rank, job in enumerate(jobs)
    }
    for job in jobs:
        for path, data in job.target.files.items():
            assert Path(path).read_bytes() == data, path


def touched(disk: Disk) -> set[Extent]:
    """The records that hold a part of a tensor; the last ranks of many may hold padding alone."""
    return {
        extent
        for entry in disk.entries.values()
        for fragment in entry.fragments
        for extent in disk.extents
        if extent.file == fragment.extent.file
        and 0 <= fragment.extent.offset - extent.offset < extent.length
    }


@pytest.mark.parametrize("target", ["whole", "runs", "slices", "lines", "boxes", "ranges"])
@pytest.mark.parametrize("source", ["whole", "runs", "slices", "lines", "boxes", "ranges"])
def test_each_layout_to_each(tmp_path: Path, source: str, target: str) -> None:
    tensors = some_tensors(random.Random(5), ("F32", "BF16"), 20)
    tensors.append(Tensor("large/exp_avg", "F32", (130, 91), random.Random(1).randbytes(47320)))
    job = prepare(tmp_path, 1, tensors, (source,), (target,))
    outcome = job.copy()
    job.check(outcome)
    if source not in (
        "lines",
        "boxes",
        "ranges",
    ):  # chunks' edges read parts of a strided run twice
        assert (outcome.counts.checked, outcome.counts.unchecked) == (len(touched(job.source)), 0)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", [(40, 90), (7, 13, 6), (5, 4000)])
def test_columns_in_a_file_each(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """As ranks hold the slices of a tensor-parallel weight; runs are short, or longer than gaps."""
    data = torch.rand(prod(shape)).numpy().tobytes()
    tensor = Tensor("a/exp_avg", "F32", shape, data)
    job = prepare(tmp_path, 3, [tensor], ("whole",), ("boxes",), {"a/exp_avg": dtype})
    entry = job.source.entries["a", "exp_avg"]
    job.source.entries["a", "exp_avg"] = changed(entry, digest=zlib.crc32(data))
    counts = [fragment.count for fragment in job.target.entries["a", "exp_avg"].fragments]
    assert max(counts) > 1
    outcome = job.copy()
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (1, 0)
    flip(job.source.extents[0], 1000)
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        job.copy()
    with pytest.raises(CorruptCheckpoint, match="a/exp_avg"):
        job.copy(checked=False)


def put(disk: Disk, entry: Entry, element: int, data: bytes) -> None:
    """Changes elements of a tensor that is F32 and in one piece."""
    extent = entry.fragments[0].extent
    file, at = disk.files[extent.file], extent.offset + 4 * element
    file[at : at + len(data)] = data
    Path(extent.file).write_bytes(file)


@pytest.mark.parametrize("layout", ["whole", "slices", "boxes"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_target_gets_the_mean_of_copies(tmp_path: Path, dtype: str, layout: str) -> None:
    """Ranks have changed them, each its own. Of the others, this copy counts no bytes."""
    shape = 9, 700
    values = torch.arange(prod(shape)).reshape(shape) % 100
    tensor = Tensor("a/exp_avg", "F32", shape, values.float().numpy().tobytes())
    job = prepare(tmp_path, 3, [tensor], ("whole",), (layout,), {"a/exp_avg": dtype})
    entry = job.source.entries["a", "exp_avg"]
    put(job.source, entry, 0, (values - 5).float().numpy().tobytes())
    copies, stated = [entry], [*job.source.manifest().files.records]
    for name, shift, kind in (("second", 2, "F64"), ("third", 3, "F32")):
        path, data = tmp_path / name, (values + shift).numpy().astype(f"f{SIZES[kind]}").tobytes()
        path.write_bytes(data)
        extent = Extent(str(path), 0, len(data))
        copies.append(Entry("a", name, kind, shape, solid(prod(shape), extent)))
        stated.append(Record(extent, 0))
    job.source.entries["a", "exp_avg"] = changed(entry, mean=tuple(copies))
    source, target = job.source.manifest(), job.target.manifest()
    source = source.replace(records=tuple(stated))
    pairs = plan.join(source, target, from_masters=False)
    with Folder.at(str(job.target.root)) as root:
        outcome = execute.copy(pairs, source, target, root, DEFAULT_COPYING, None, None, ALONE)
    assert outcome is not None
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (1, 0)


def test_what_is_cast_counts_for_its_record(tmp_path: Path) -> None:
    data = torch.rand(9 * 700).numpy().tobytes()
    tensor = Tensor("a/exp_avg", "F32", (9, 700), data)
    job = prepare(tmp_path, 3, [tensor], ("whole",), ("whole",), {"a/exp_avg": "BF16"})
    outcome = job.copy()
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (1, 0)


@pytest.mark.parametrize("layout", ["whole", "boxes"])
def test_numbers_that_become_infinite_end_the_copy(tmp_path: Path, layout: str) -> None:
    data = torch.ones(90, 12).numpy().tobytes()
    tensor = Tensor("a/exp_avg", "F32", (90, 12), data)
    job = prepare(tmp_path, 3, [tensor], ("whole",), (layout,), {"a/exp_avg": "F16"})
    parts = job.target.entries["a", "exp_avg"].fragments
    last = max(parts, key=lambda part: part.count)
    assert (last.count > 1) is (layout == "boxes")
    number = torch.tensor([1e38]).numpy().tobytes()
    put(job.source, job.source.entries["a", "exp_avg"], last.start + last.stride, number)
    with pytest.raises(UnsupportedCheckpoint, match="a/exp_avg"):
        job.copy()


def test_columns_are_compared_with_the_whole(tmp_path: Path) -> None:
    data = torch.rand(9 * 700).numpy().tobytes()
    tensor = Tensor("a/exp_avg", "F32", (9, 700), data)
    job = prepare(tmp_path, 3, [tensor], ("whole",), ("boxes",))
    job.copy()
    sides = job.source.manifest(), job.target.manifest()
    matches, *_ = plan.match(*sides)
    outcome = compare(matches, *sides)
    assert outcome.results[0].difference is None
    assert outcome.results[0].digests == (zlib.crc32(data), zlib.crc32(data))
    box = max(job.target.entries["a", "exp_avg"].fragments, key=lambda fragment: fragment.count)
    assert box.count > 1
    flip(box.extent, (box.stop - box.start) * 4)  # the first element of its second run
    outcome = compare(matches, *sides)
    difference = outcome.results[0].difference
    assert difference is not None
    assert (difference.count, difference.first) == (1, box.start + box.stride)
    assert [damage.record.extent for damage in outcome.damage] == [box.extent]


@pytest.mark.parametrize("seed", range(5))
def test_random_casts(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    tensors = some_tensors(chosen, ("F32", "BF16", "F16", "F64"), 20)
    for item in tensors:  # torch may make another NaN
        size = SIZES[item.dtype]
        item.data = b"".join(
            item.data[i : i + size - 1] + b"\x3b" for i in range(0, len(item.data), size)
        )
    dtypes = {item.name: chosen.choice(["F32", "BF16", "F16"]) for item in tensors}
    job = prepare(tmp_path, seed, tensors, dtypes=dtypes)
    for name, entry in job.source.entries.items():
        data = next(item.data for item in tensors if key_of(item.name) == name)
        job.source.entries[name] = changed(entry, digest=zlib.crc32(data))
    job.check(job.copy())


@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
def test_every_way_of_writing_gives_the_same(tmp_path: Path, io: str) -> None:
    job = prepare(tmp_path, 3, some_tensors(random.Random(3), ANY, 30))
    try:
        outcome = job.copy(Copying(io=io))
    except OSError as error:
        if io == "direct" and error.errno == errno.EINVAL:
            pytest.skip("this filesystem refuses O_DIRECT")
        raise
    job.check(outcome)


def test_nothing_to_copy(tmp_path: Path) -> None:
    job = prepare(tmp_path, 3, [])
    assert repr(job.copy()) == repr(CopyOutcome())


@pytest.mark.parametrize(("processors", "most"), [(1, 2), (2, 2), (3, 3), (8, 4)])
def test_no_more_threads_assemble_than_there_are_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int, most: int
) -> None:
    """The first ones wait for as many as may come; a further one would be seen in time."""
    monkeypatch.setattr(execute, "processors", lambda: processors)
    assemble, inside, seen = assembling.Assembler.assemble, [0], [0]
    changed_now = threading.Condition()

    def counted(self: assembling.Assembler, *args: Any) -> Any:
        with changed_now:
            inside[0] += 1
            seen[0] = max(seen[0], inside[0])
            changed_now.notify_all()
            assert changed_now.wait_for(lambda: seen[0] >= most, timeout=60)
            changed_now.wait_for(lambda: inside[0] > most, timeout=0.05)
        try:
            return assemble(self, *args)
        finally:
            with changed_now:
                inside[0] -= 1

    monkeypatch.setattr(assembling.Assembler, "assemble", counted)
    job = one(tmp_path, numel=8 * CHUNK // SIZES["F32"])
    job.check(job.copy(Copying(jobs=4)))
    assert seen == [most]


# -- what the source's files state


def one(root: Path, kind: str = "whole", numel: int = 9000, dtype: str = "F32") -> Job:
    data = random.Random(7).randbytes(numel * SIZES[dtype])
    return prepare(root, 7, [Tensor("a/exp_avg", dtype, (numel,), data)], (kind,), ("whole",))


def flip(extent: Extent, place: int) -> None:
    with open(extent.file, "r+b") as file:
        byte = os.pread(file.fileno(), 1, extent.offset + place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), extent.offset + place)


@pytest.mark.parametrize("kind", ["whole", "runs", "slices", "lines"])
@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_flipped_bit_of_a_record_is_found(tmp_path: Path, kind: str, place: int) -> None:
    job = one(tmp_path, kind)
    extent = job.source.extents[0]
    flip(extent, place % extent.length)
    with pytest.raises(CorruptCheckpoint, match="CRC-32") as caught:
        job.copy()
    assert extent.file in caught.value.message


def test_without_a_stated_sum_nothing_is_checked(tmp_path: Path) -> None:
    job = one(tmp_path, "runs")
    outcome = job.copy(checked=False)
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (0, len(job.source.extents))


def padded(root: Path, before: int, after: int) -> tuple[Job, Extent]:
    """The record holds bytes before and behind the tensor that no copy reads."""
    job = one(root)
    inner = job.source.extents.pop()
    data = job.source.files[inner.file]
    data[:] = bytes(before) + data[inner.offset : inner.offset + inner.length] + bytes(after)
    Path(inner.file).write_bytes(data)
    record = Extent(inner.file, 0, len(data))
    job.source.extents.append(record)
    entry = job.source.entries["a", "exp_avg"]
    job.source.entries["a", "exp_avg"] = changed(
        entry, fragments=solid(entry.numel, Extent(inner.file, before, inner.length))
    )
    return job, record


@pytest.mark.parametrize("place", [0, 99, 36_100, 36_199])
def test_a_flipped_bit_of_the_padding_is_found(tmp_path: Path, place: int) -> None:
    job, record = padded(tmp_path, 100, 100)
    flip(record, place)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        job.copy()


def test_padding_completes_a_record(tmp_path: Path) -> None:
    outcome = padded(tmp_path, 100, 100)[0].copy()
    assert (outcome.counts.checked, outcome.counts.unchecked) == (1, 0)


def test_a_record_of_which_little_was_read_is_unchecked(tmp_path: Path) -> None:
    job, record = padded(tmp_path, 10, 100_000)
    flip(record, 5)
    outcome = job.copy()
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (0, 1)


def test_records_that_touch_are_each_checked(tmp_path: Path) -> None:
    """One read passes over both."""
    job = one(tmp_path)
    extent = job.source.extents.pop()
    job.source.extents += [extent.part(0, 4000), extent.part(4000, extent.length)]
    outcome = job.copy()
    assert (outcome.counts.checked, outcome.counts.unchecked) == (2, 0)
    flip(extent, 3999)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        job.copy()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_digest_of_the_source_is_checked(tmp_path: Path, dtype: str) -> None:
    data = torch.rand(9000).numpy().tobytes()
    tensors = [Tensor("a/exp_avg", "F32", (9000,), data)]
    job = prepare(tmp_path, 7, tensors, ("runs",), ("whole",), {"a/exp_avg": dtype})
    entry = job.source.entries["a", "exp_avg"]
    job.source.entries["a", "exp_avg"] = changed(entry, digest=zlib.crc32(data))
    job.check(job.copy(checked=False))
    flip(job.source.extents[0], 1)
    with pytest.raises(CorruptCheckpoint, match="a/exp_avg"):
        job.copy(checked=False)


def test_a_source_that_was_cut_short_is_found(tmp_path: Path) -> None:
    job = one(tmp_path)
    extent = job.source.extents[0]
    os.truncate(extent.file, extent.offset + extent.length - 1)
    with pytest.raises(CorruptCheckpoint, match="ends at byte") as caught:
        job.copy()
    assert extent.file in caught.value.message
    assert not open_files(job)


def test_a_source_that_is_another_file_by_now_is_found(tmp_path: Path) -> None:
    job = one(tmp_path)
    seen = {path: Fingerprint(0, 0, 0, 0) for path in job.source.files}
    source, target = job.source.manifest().replace(fingerprints=seen), job.target.manifest()
    pairs = plan.join(source, target, from_masters=False)
    with Folder.at(str(job.target.root)) as root, pytest.raises(SourceChanged):
        execute.copy(pairs, source, target, root, DEFAULT_COPYING, None, None, ALONE)
    assert not open_files(job)


# -- failures in the middle


@pytest.fixture
def write_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The third write fails with the error that is set."""
    wanted: list[int] = []
    real, count, lock = os.pwrite, [0], threading.Lock()

    def pwrite(file: int, data: Any, offset: int) -> int:
        with lock:
            count[0] += 1
            fails = wanted and count[0] >= 3
        if fails:
            raise OSError(wanted[0], os.strerror(wanted[0]))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield wanted.append
    monkeypatch.undo()


def ended(job: Job) -> bool:
    threads = [thread for thread in threading.enumerate() if "zckpt" in thread.name]
    return not threads and not open_files(job)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_failed_write_ends_the_copy(
    tmp_path: Path, write_fails: Any, code: int, jobs: int
) -> None:
    job = prepare(tmp_path, 3, some_tensors(random.Random(3), ANY, 30))
    write_fails(code)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        job.copy(Copying(jobs))
    assert caught.value.errno == code
    assert ended(job)


def test_a_failing_sync_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_fails: Any
) -> None:
    job = prepare(tmp_path, 3, some_tensors(random.Random(3), ANY, 30))

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "sync")

    write_fails(errno.ENOSPC)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        job.copy()
    assert ended(job)


def test_a_failed_sync_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = one(tmp_path)

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "sync")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="sync"):
        job.copy()
    assert ended(job)


def test_a_target_that_is_gone_ends_the_copy(tmp_path: Path) -> None:
    job = prepare(tmp_path, 3, some_tensors(random.Random(3), ANY, 30))
    os.remove(sorted(job.target.files)[-1])
    with pytest.raises(FileNotFoundError):
        job.copy(Copying(3))
    assert ended(job)


def test_an_error_of_progress_ends_the_copy(tmp_path: Path) -> None:
    job = one(tmp_path)

    def progress(_: int) -> None:
        raise KeyError("progress")

    with pytest.raises(KeyError, match="progress"):
        job.copy(progress=progress)
    assert ended(job)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell may start its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_copy(tmp_path: Path) -> None:
    job = one(tmp_path, numel=400_000)
    seen: list[int] = []

    def progress(length: int) -> None:
        seen.append(length)
        if len(seen) == 2:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        job.copy(Copying(2), progress)
    assert ended(job)


def cut_otherwise(root: Path, seed: int, numels: list[int], dps: tuple[int, int]) -> Job:
    """Tensors in the flat buffers of one number of ranks, and shells for another number."""
    chosen = random.Random(seed)
    tensors = [
        Tensor(f"{place}/param", "F32", (numel,), chosen.randbytes(4 * numel))
        for place, numel in enumerate(numels)
    ]
    disks = Disk(root / "source", chosen), Disk(root / "target", chosen)
    for disk, dp in zip(disks, dps, strict=True):
        slices = disk.slices([item.data for item in tensors], 4, dp, "flat")
        for item, fragments in zip(tensors, slices, strict=True):
            disk.add(item.name, "F32", item.shape, fragments)
        disk.write()
    for entry in disks[1].entries.values():
        for fragment in entry.fragments:
            with open(fragment.extent.file, "r+b") as file:
                os.pwrite(file.fileno(), bytes(fragment.extent.length), fragment.extent.offset)
    return Job(*disks, tensors)


@pytest.mark.parametrize("numels", [[1, 90], [90, 1], [1, 30, 90, 2]])
def test_the_flats_of_all_ranks_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numels: list[int]
) -> None:
    """A tensor of one element leaves padding in the others, however much that is."""
    monkeypatch.setattr(records, "LITTLE", 0)
    job = cut_otherwise(tmp_path, 3, numels, (9, 2))
    outcome = job.copy()
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (9, 0)


@pytest.mark.parametrize("dps", [(64, 8), (64, 48), (8, 64), (9, 2), (5, 7), (4, 1)])
def test_small_slices_of_other_ranks_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dps: tuple[int, int]
) -> None:
    """A rank of the target reads a slice's neighbors with it, and every record is checked."""
    chosen = random.Random(3)
    numels = [chosen.choice([0, 1, 7, 64, 100, 640, 641]) for _ in range(300)]
    job = cut_otherwise(tmp_path, 3, numels, dps)
    disks = job.source, job.target
    use_chunks(monkeypatch, 1 << 18)
    monkeypatch.setattr(elements, "SMALL", 4096)
    reads: list[Extent] = []
    read = Reader.read

    def count(self: Reader, extent: Extent, into: memoryview) -> None:
        if extent.file in job.source.files:
            reads.append(extent)
        read(self, extent, into)

    monkeypatch.setattr(Reader, "read", count)
    outcome = job.copy()
    job.check(outcome)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (len(touched(job.source)), 0)
    pieces = [sum(len(entry.fragments) for entry in disk.entries.values()) for disk in disks]
    assert len(reads) < max(pieces) / 4
