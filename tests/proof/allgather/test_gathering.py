"""Buckets that one or two processes read, gather and compare: what they find, and what they read.

Two processes are two threads here, which exchange their parts instead of torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.entries import Entry, key_of, name_of
from zckpt.core.passes.plan import Match
from zckpt.core.ranks.partition import BoxPart, FlatMember, Joined, Partitioned, Whole
from zckpt.core.storage.checksum import Cover, crc32
from zckpt.core.storage.fragments import Extent, Runs, solid
from zckpt.errors import CorruptCheckpoint
from zckpt.proof.allgather import buffers, gathering, readers
from zckpt.proof.allgather.buckets import Cut
from zckpt.proof.allgather.gathering import Gathering
from zckpt.proof.allgather.parts import cut_over
from zckpt.proof.allgather.world import World

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = World(0, 1, CPU, CPU, started=False)


class Files:
    """Files of made-up tensors, one each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, values: Any) -> Extent:
        path = self.folder / str(len([*self.folder.iterdir()]))
        path.write_bytes(values.tobytes())
        return Extent(str(path), 0, values.nbytes)

    def entry(self, name: str, values: Any, dtype: str) -> Entry:
        return Entry(*key_of(name), dtype, values.shape, solid(values.size, self.put(values)))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ours(name: str, shape: tuple[int, ...], dtype: str) -> Entry:
    return Entry(*key_of(name), dtype, shape, Runs(()))


def gathered(
    matches: Sequence[Match],
    parts: Sequence[Cut],
    memory: int = 0,
    world: World = ALONE,
    progress: Any = None,
) -> Gathering:
    found = Gathering(world, [(item.a.key, item) for item in matches], 2, progress)
    try:
        found.run(parts, memory)
    finally:
        found.readers.close()
    return found


def by_two(
    monkeypatch: pytest.MonkeyPatch, matches: Sequence[Match], parts: Sequence[Cut], memory: int = 0
) -> list[Gathering]:
    """What two processes find, each in a thread of its own."""
    barrier, sent = threading.Barrier(2, timeout=5), [torch.empty(0), torch.empty(0)]

    def all_gather(world: World, whole: torch.Tensor, part: torch.Tensor) -> None:
        sent[world.rank] = part.clone()
        barrier.wait()
        for its, place in zip(sent, whole.chunk(2), strict=True):
            place.copy_(its)
        barrier.wait()

    monkeypatch.setattr(buffers, "all_gather", all_gather)

    def one(rank: int) -> Gathering:
        try:
            return gathered(matches, parts, memory, World(rank, 2, CPU, CPU, started=False))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def differences(found: Sequence[Gathering]) -> dict[int, tuple[int, int]]:
    """How many elements of each match differ, and the first one."""
    listed: dict[int, tuple[int, int]] = {}
    for own in found:
        for place, difference in own.differences.items():
            if difference.first is not None:
                count, first = listed.get(place, (0, difference.first))
                listed[place] = count + difference.count, min(first, difference.first)
    return listed


def digests(found: Sequence[Gathering]) -> dict[tuple[int, int], int]:
    """The CRC-32 of each side of each match; every byte of it must have been hashed once."""
    covers: dict[tuple[int, int], Cover] = {}
    for own in found:
        for (place, side), ranges in own.crcs.items():
            item = own.matches[place]
            entry = item.b if side else item.a
            assert entry is not None
            cover = covers.setdefault((place, side), Cover(entry.length))
            for start, stop, crc in ranges:
                cover.add(start * SIZES[entry.dtype], stop * SIZES[entry.dtype], crc)
            numel = sum(
                stop - start
                for each in found
                for start, stop, _ in each.crcs.get((place, side), ())
            )
            assert numel == entry.numel
    crcs = {key: cover.crc for key, cover in covers.items()}
    assert None not in crcs.values()
    return {key: crc for key, crc in crcs.items() if crc is not None}


def flat(files: Files, ranks: int, values: Any, name: str = "w/param") -> Partitioned:
    """Stages 1 and 2: the last rank has less than the others."""
    each = -(-values.size // ranks)
    parts = [values.reshape(-1)[rank * each : (rank + 1) * each] for rank in range(ranks)]
    member = FlatMember(key_of(name), values.shape, 0)
    return Partitioned("I32", tuple(map(files.put, parts)), [member])


def sliced(files: Files, ranks: int, values: Any, name: str = "w/param") -> Partitioned:
    """Stage 3: the last rank is padded."""
    each = -(-values.size // ranks)
    padded = np.full(ranks * each, -1, "i4")
    padded[: values.size] = values.reshape(-1)
    extents = tuple(map(files.put, padded.reshape(ranks, each)))
    return Partitioned(
        "I32", extents, [FlatMember(key_of(name), values.shape, 0)], interleaved=True
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("memory", [0, 1 << 16])
@pytest.mark.parametrize("layout", [flat, sliced])
@pytest.mark.parametrize("changed", [[], [0], [28], [3, 17, 18]])
def test_one_tensor_of_three_ranks(
    monkeypatch: pytest.MonkeyPatch,
    files: Files,
    processes: int,
    memory: int,
    layout: Any,
    changed: list[int],
) -> None:
    """29 elements, ten of each rank: in one bucket, or in five of two columns each."""
    values = np.arange(29, dtype="i4")
    other = values.copy()
    other[changed] += 1000
    item = Match(ours("w/param", (29,), "I32"), files.entry("w/param", other, "I32"))
    parts = [layout(files, 3, values)]
    if processes == 1:
        found = [gathered([item], parts, memory)]
    else:
        found = by_two(monkeypatch, [item], parts, memory)
    assert differences(found) == ({0: (len(changed), min(changed))} if changed else {})
    assert digests(found) == {(0, 0): crc32(values.tobytes()), (0, 1): crc32(other.tobytes())}


@pytest.mark.parametrize("processes", [1, 2])
def test_several_tensors_in_one_bucket(
    monkeypatch: pytest.MonkeyPatch, files: Files, processes: int
) -> None:
    """Each row has a part of one tensor, and behind it one of the other."""
    values = {"a/param": np.arange(9, dtype="i4"), "b/param": np.arange(100, 129, dtype="i4")}
    parts = [sliced(files, 3, values["a/param"], "a/param")]
    parts.append(flat(files, 3, values["b/param"], "b/param"))
    matches = []
    for name, own in values.items():
        other = own.copy()
        other[7] = -1
        matches.append(Match(ours(name, own.shape, "I32"), files.entry(name, other, "I32")))
    if processes == 1:
        found = [gathered(matches, parts, 1 << 16)]
    else:
        found = by_two(monkeypatch, matches, parts, 1 << 16)
    assert differences(found) == {0: (1, 7), 1: (1, 7)}
    assert {key: crc for key, crc in digests(found).items() if not key[1]} == {
        (place, 0): crc32(own.tobytes()) for place, own in enumerate(values.values())
    }


COLUMNS = ((0, 0), (4, 2)), ((0, 2), (4, 4))
CORNERS = ((0, 0), (3, 4)), ((3, 0), (1, 6)), ((0, 4), (3, 2))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("memory", [0, 1 << 16])
@pytest.mark.parametrize("boxes", [COLUMNS, CORNERS], ids=["columns", "corners"])
def test_boxes_of_a_matrix(
    monkeypatch: pytest.MonkeyPatch, files: Files, processes: int, memory: int, boxes: Any
) -> None:
    """4 x 6 elements, of which two ranks have columns, or three ranks a part of both axes each."""
    values = np.arange(24, dtype="i4").reshape(4, 6)
    other = values.copy()
    other[1:3, 3] = -1
    parts = []
    for (row, column), (rows, columns) in boxes:
        extent = files.put(values[row : row + rows, column : column + columns])
        parts.append(BoxPart((row, column), (rows, columns), extent))
    cuts = list(cut_over(Joined(("w", "param"), "I32", (4, 6), tuple(parts)), processes))
    item = Match(ours("w/param", (4, 6), "I32"), files.entry("w/param", other, "I32"))
    if processes == 1:
        found = [gathered([item], cuts, memory)]
    else:
        found = by_two(monkeypatch, [item], cuts, memory)
    assert differences(found) == {0: (2, 9)}
    assert digests(found) == {(0, 0): crc32(values.tobytes()), (0, 1): crc32(other.tobytes())}


def test_the_bytes_that_were_read(files: Files) -> None:
    """Of both sides, each once, in however many buckets; some ranks have nothing in them."""
    values = np.arange(26, dtype="i4")
    item = Match(ours("w/param", (26,), "I32"), files.entry("w/param", values, "I32"))
    extents = tuple(map(files.put, np.split(values, [20, 24])))
    parts = [Partitioned("I32", extents, [FlatMember(("w", "param"), (26,), 0)])]
    for memory in (0, 1 << 16):
        assert gathered([item], parts, memory).bytes == 2 * 4 * 26


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_reads_its_part_of_a_whole_tensor(files: Files, rank: int) -> None:
    """Nothing is sent: the first of two has elements 0 to 5, the second one 5 to 9."""
    values = np.arange(9, dtype="i4")
    other = values.copy()
    other[[4, 8]] = -1
    item = Match(ours("w/param", (9,), "I32"), files.entry("w/param", other, "I32"))
    parts = list(cut_over(Whole(("w", "param"), "I32", (9,), files.put(values)), 2))
    for memory in (0, 1 << 16):
        found = gathered([item], parts, memory, World(rank, 2, CPU, CPU, started=False))
        assert differences([found]) == {0: (1, (4, 8)[rank])}
        ranges = sorted(found.crcs[0, 0])
        assert (ranges[0][0], ranges[-1][1]) == ((0, 5), (5, 9))[rank]


def test_small_tensors_are_aligned(files: Files) -> None:
    """A bucket of 20 tensors of one element: aligned, they need more room than the bucket."""
    values = np.arange(20, dtype="i2")
    members = [FlatMember((f"w{place}", "param"), (1,), place) for place in range(20)]
    parts = [Partitioned("I16", (files.put(values),), members)]
    matches = []
    for place, member in enumerate(members):
        other = files.entry(name_of(member.key), values[place : place + 1] + (place == 7), "I16")
        matches.append(Match(ours(name_of(member.key), (1,), "I16"), other))
    found = gathered(matches, parts, memory=40)
    assert differences([found]) == {7: (1, 0)}
    assert len(digests([found])) == 40


def test_which_sides_are_hashed(files: Files) -> None:
    """A digest of ours is that of an equal other side, or it is hashed: once for every tensor."""
    values = np.array([1.0, 2.0, 3.0, 4.0], "f4")
    shape = values.shape
    halves = values.astype("f2")
    same, master = files.entry("w/param", values, "F32"), files.entry("w/master", values, "F32")
    half = files.entry("half/param", halves, "F16")
    doubles = files.entry("number/param", values.astype("f8"), "F64")
    other = files.entry("other/param", values + 1, "F32")
    names = "w", "half", "number", "other", "shape"
    matches = [
        Match(ours("w/param", shape, "F32"), same),
        Match(ours("w/param", shape, "F32"), files.entry("w/param", halves, "F16"), "rounded"),
        Match(ours("half/param", shape, "F32"), half, "rounded"),
        Match(ours("half/param", shape, "F32"), half, "rounded", copy=True),
        Match(ours("number/param", shape, "F32"), doubles, "values"),
        Match(ours("other/param", shape, "F32"), other),
        Match(
            ours("shape/param", shape, "F32"), files.entry("s/param", values[:2], "F32"), "shapes"
        ),
        Match(ours("w/param", shape, "F32"), master, copy=True),
        Match(ours("w/param", shape, "F32"), files.entry("w/param", halves + 1, "F16"), "rounded"),
    ]
    members = [FlatMember((name, "param"), shape, 4 * n) for n, name in enumerate(names)]
    parts = [Partitioned("F32", (files.put(np.tile(values, 5)),), members)]
    for memory in (0, 1 << 16):
        found = gathered(matches, parts, memory)
        assert differences([found]) == {5: (4, 0), 8: (4, 0)}
        assert found.differences.keys() == {5, 8}
        own, narrow = crc32(values.tobytes()), crc32(halves.tobytes())
        wide = crc32(values.astype("f8").tobytes())
        assert digests([found]) == {
            (0, 0): own, (0, 1): own,
            (1, 1): narrow,
            (2, 0): own, (2, 1): narrow,
            (3, 1): narrow,
            (4, 0): own, (4, 1): wide,
            (5, 0): own, (5, 1): crc32((values + 1).tobytes()),
            (7, 0): own, (7, 1): own,
            (8, 1): crc32((halves + 1).tobytes()),
        }  # fmt: skip


class Shown:
    """A progress bar."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.said: list[str] = []

    def __call__(self, count: int) -> None:
        self.done.append(count)

    def describe(self, text: str) -> None:
        self.said.append(text)


def test_progress(files: Files) -> None:
    """Both sides count, and the first tensor of a bucket is named; unmatched ones are none."""
    values = np.arange(8, dtype="i4")
    known = Match(ours("w/param", (4,), "I32"), files.entry("w/param", values[:4], "I32"))
    members = [FlatMember(("w", "param"), (4,), 0), FlatMember(("unknown", "param"), (4,), 4)]
    parts = [Partitioned("I32", (files.put(values),), members)]
    shown = Shown()
    found = gathered([known], parts, memory=0, progress=shown)
    assert shown.done == [16, 16, 0, 0]
    assert shown.said == ["gathering w/param"] * 2
    assert found.bytes == 32 + 16
    other = files.entry("unknown/param", values[4:], "I32")
    both, shown = [known, Match(ours("unknown/param", (4,), "I32"), other)], Shown()
    gathered(both, parts, memory=1 << 16, progress=shown)
    assert (shown.done, shown.said) == ([64], ["gathering w/param"])


def test_files_that_end_too_early(files: Files) -> None:
    """On either side."""
    values = np.arange(8, dtype="i4")
    cut_short = Extent(files.put(values[:7]).file, 0, 32)
    sound = files.put(values)
    for our, their in ((cut_short, sound), (sound, cut_short)):
        item = Match(
            ours("w/param", (8,), "I32"), Entry("w", "param", "I32", (8,), solid(8, their))
        )
        parts = [Partitioned("I32", (our,), [FlatMember(("w", "param"), (8,), 0)])]
        for memory in (0, 1 << 16):
            with pytest.raises(CorruptCheckpoint, match="ends at byte 28"):
                gathered([item], parts, memory)


# -- memory


@pytest.mark.parametrize(
    ("device", "transport", "size", "others", "shares", "other"),
    [
        # a slot has the rows, the other side, and a mask of the comparison
        (CPU, CPU, 1, ["I32"], 1 + 1 + 1, 1),
        (CPU, CPU, 2, ["I32"], 1 + (1 + 1) / 2, 1 / 2),
        (CPU, CPU, 1, ["I32", "I64"], 1 + 3 + 1, 3),
        (CPU, CPU, 1, ["I16"], 1 + 1 + 1, 1),
        (CPU, CPU, 1, [None], 1 + 1 + 1, 1),
        # on a GPU, the other side twice, and own rows that are sent
        (CUDA, CUDA, 1, ["I32"], 1 + 1 + 2 + 1, 1),
        (CUDA, CUDA, 2, ["I32"], 1 + 1 / 2 + (2 + 1) / 2, 1 / 2),
        # or the rows twice, if gloo gathers them
        (CUDA, CPU, 1, ["I32"], 2 + 2 + 1, 1),
        (CUDA, CPU, 2, ["I32"], 2 + (2 + 1) / 2, 1 / 2),
    ],
)
def test_two_slots_fit_into_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    transport: torch.device,
    size: int,
    others: list[str | None],
    shares: float,
    other: float,
) -> None:
    slots: list[tuple[int, int]] = []
    monkeypatch.setattr(gathering, "BucketBuffers", lambda _, *rooms: slots.append(rooms))
    monkeypatch.setattr(gathering, "buckets", lambda *_: ())
    sides = [name and ours("w/param", (9,), name) for name in others]
    matches = [Match(ours("w/param", (9,), "I32"), side or None) for side in sides]
    world = World(0, size, device, transport, started=False)
    parts = [
        Partitioned("I32", (Extent("a", 0, 4),) * ranks, [FlatMember(("w", "param"), (9,), 0)])
        for ranks in (5, 3)
    ]
    for rest in (0, 4095):
        gathered(matches, parts, int(2 * 5 * 4096 * shares) + rest, world)
    assert slots == [(5 * 4096, int(5 * 4096 * other))] * 4
    slots.clear()
    gathered(matches, parts, 0, world)  # an element of every rank fits in, whatever its type
    gathered(matches, [], 0, world)
    assert [room for room, _ in slots] == [40 * size, 40 * size, 8 * size, 8 * size]
    slots.clear()
    gathered(matches, parts, 1 << 40, world)  # gloo is slower for larger messages
    assert (slots[0][0] == 32 << 20) == (transport == CPU)


# -- boxes that are not row-major


def turned(files: Files, values: Any, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Joined:
    """A box of a tensor, in whose file the first axis is the innermost one."""
    extent = files.put(values.ravel(order="F"))
    strides = tuple(prod(values.shape[:axis]) for axis in range(values.ndim))
    box = BoxPart(offsets, values.shape, extent, strides=strides)
    return Joined(("w", "param"), "I32", shape, (box,))


def compared(matches: Sequence[Match], box: Joined) -> Gathering:
    found = Gathering(ALONE, [(item.a.key, item) for item in matches], 2, None)
    try:
        found.compare_strided(box)
    finally:
        found.readers.close()
    return found


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "lines"),
    [
        ((2, 3), (0, 0), (2, 3), [(0, 6)]),
        ((4, 5), (1, 2), (2, 3), [(7, 10), (12, 15)]),
        ((3, 4, 5), (1, 1, 1), (2, 2, 3), [(26, 29), (31, 34), (46, 49), (51, 54)]),
    ],
)
def test_a_transposed_box(
    files: Files,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    lines: list[tuple[int, int]],
) -> None:
    """Each element of it, compared with one of the same type and with one of a wider type."""
    whole = np.arange(prod(shape), dtype="i4").reshape(shape)
    cut = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
    box = turned(files, whole[cut], offsets, shape)
    for first in (element for start, stop in lines for element in range(start, stop)):
        other, wide = whole.copy(), whole.astype("i8")
        other.flat[first] = wide.flat[first] = -5
        mine, its = ours("w/param", shape, "I32"), files.entry("w/param", other, "I32")
        matches = [
            Match(mine, its),
            Match(mine, files.entry("w/param", wide, "I64"), "values"),
            Match(ours("other/param", shape, "I32"), its),
        ]
        found = compared(matches, box)
        assert differences([found]) == {0: (1, first), 1: (1, first)}
        assert found.differences[0].b == found.differences[1].b == -5
        expected: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for key, side in (((0, 1), other), ((0, 0), whole), ((1, 1), wide)):
            every = side.reshape(-1)
            expected[key] = [(a, b, crc32(every[a:b].tobytes())) for a, b in lines]
        assert found.crcs == expected


def test_a_transposed_box_that_is_longer_than_one_read(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setattr(readers, "READ", 4)
    values = np.arange(6, dtype="i4").reshape(2, 3)
    match = Match(ours("w/param", (2, 3), "I32"), files.entry("w/param", values, "I32"))
    found = compared([match], turned(files, values, (0, 0), (2, 3)))
    assert differences([found]) == {}
    assert digests([found]) == {(0, side): crc32(values.tobytes()) for side in (0, 1)}


def test_a_transposed_box_that_only_a_master_supplies(files: Files) -> None:
    """No other side has its bits, so that it is hashed by itself."""
    values = np.array([[1, 2, 3], [4, 5, 6]], "f4")
    box = Joined(("w", "param"), "F32", (2, 3), turned(files, values, (0, 0), (2, 3)).parts)
    half = files.entry("w/param", values.astype("f2"), "F16")
    match = Match(ours("w/param", (2, 3), "F32"), half, "rounded")
    found = compared([match], box)
    assert digests([found])[0, 0] == crc32(values.tobytes())
    assert differences([found]) == {}


def test_a_transposed_box_in_a_file_that_ends_too_early(files: Files) -> None:
    values = np.arange(6, dtype="i4").reshape(2, 3)
    box = turned(files, values, (0, 0), (2, 3))
    (part,) = box.parts
    Path(part.extent.file).write_bytes(bytes(20))
    match = Match(ours("w/param", (2, 3), "I32"), files.entry("w/param", values, "I32"))
    with pytest.raises(CorruptCheckpoint, match="ends at byte 20"):
        compared([match], box)
