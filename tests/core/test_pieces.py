"""How elements get into a buffer: what is put there, and by which reads."""

from __future__ import annotations

import tracemalloc
import zlib
from array import array
from collections import defaultdict
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zckpt.core.checkpoint.dtypes import SIZES, encode
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.passes import pieces
from zckpt.core.passes.pieces import SHORT, SMALL, ElementReader, ReadRequest
from zckpt.core.storage.fragments import (
    Box,
    Extent,
    Fragment,
    Fragments,
    Record,
    Runs,
    Slices,
    solid,
)
from zckpt.core.storage.records import RecordChecker
from zckpt.errors import UnsupportedCheckpoint

SIZE = 4  # bytes of an element
BEFORE = 16  # bytes before a flat buffer in its file
LENGTH = 1 << 20  # bytes of a file
UNTOUCHED = 0xFFFFFFFF


class Files:
    """Files in memory, which note what is read of them, and what counts for their records."""

    def __init__(self) -> None:
        self._data: dict[str, bytearray] = defaultdict(lambda: bytearray(LENGTH))
        self.reads: list[Extent] = []
        self.counted: list[Extent] = []

    def put(self, number: int, numel: int, fragments: Fragments) -> Entry:
        """A tensor whose element n is `1000 * number + n`."""
        first = 1000 * number
        for fragment in fragments:
            for run in fragment.runs(0, numel):
                data = array("I", range(first + run.start, first + run.stop)).tobytes()
                at = run.extent.offset
                self._data[run.extent.file][at : at + len(data)] = data
        return Entry(str(number), "param", "U32", (numel,), fragments)

    def sliced(self, numels: list[int], dp: int, gap: int = 0, first: int = 0) -> list[Entry]:
        """Tensors whose slices follow each other in the flat buffers of `dp` ranks."""
        flats = tuple(Extent(f"{first} on {rank}", BEFORE, 1 << 19) for rank in range(dp))
        entries, offset = [], 0
        for number, numel in enumerate(numels, first):
            entries.append(self.put(number, numel, Slices(flats, offset, numel, SIZE)))
            offset += -(-numel // dp) + gap
        return entries

    def read(self, extent: Extent, into: memoryview) -> None:
        self.reads.append(extent)
        into[:] = self._data[extent.file][extent.offset : extent.offset + extent.length]

    def reader(self, memory: int = 1 << 16) -> ElementReader:
        itself: Any = self
        return ElementReader(itself, RecordChecker(self.records), memory, [])

    @property
    def records(self) -> list[Record]:
        return [Record(Extent(file, 0, LENGTH), 1) for file in self._data]


def read(files: Files, *requests: ReadRequest, memory: int = 1 << 16) -> list[int]:
    """The elements in the buffer after a read of these requests."""
    view = memoryview(bytearray(b"\xff" * max(request.end for request in requests)))
    reader = files.reader(memory)
    reader.read(requests, view)
    for number, start, stop, _ in reader.passed or ():
        files.counted.append(files.records[number].extent.part(start, stop))
    return view.cast("I").tolist()


def wanted(*requests: ReadRequest) -> list[int]:
    elements = [UNTOUCHED] * (max(request.end for request in requests) // SIZE)
    for request in requests:
        first, at = 1000 * int(request.entry.parameter), request.at // SIZE
        own = range(first + request.start, first + request.stop)
        elements[at : at + len(own)] = own
    return elements


def in_a_row(entries: list[Entry], **fields: Any) -> list[ReadRequest]:
    """Requests of whole tensors, which follow each other in the buffer."""
    ends = accumulate((entry.length for entry in entries), initial=0)
    return [
        ReadRequest(entry, 0, entry.numel, at, **fields)
        for entry, at in zip(entries, ends, strict=False)
    ]


def test_small_slices_are_one_read_for_each_rank() -> None:
    files = Files()
    requests = in_a_row(files.sliced([1, 7, 12, 5], dp=3))
    assert read(files, *requests) == wanted(*requests)
    width = (1 + 3 + 4 + 2) * SIZE
    assert files.reads == [Extent(f"0 on {rank}", BEFORE, width) for rank in range(3)]
    assert files.counted == files.reads


def test_a_read_gives_the_crcs_that_it_came_to_know() -> None:
    """Those of bytes that were hashed as one, and count."""
    files = Files()
    small = files.sliced([4], dp=2)
    entries = [
        files.put(number, 3, solid(3, Extent(file, at, 12)))
        for number, (file, at) in enumerate([("a", 8), ("a", 20), ("b", 40), ("c", 8)], 1)
    ]
    requests = in_a_row([*small, *entries])
    requests[-1] = replace(requests[-1], check=False)
    view = memoryview(bytearray(requests[-1].end))
    assert files.reader().read(requests, view) == {
        (16, 40): zlib.crc32(view[16:40]),
        (40, 52): zlib.crc32(view[40:52]),
    }


def test_small_slices_around_another_tensor() -> None:
    files = Files()
    first, last = files.sliced([4, 4], dp=2)
    requests = in_a_row([first, files.put(9, 3, solid(3, Extent("a", 8, 12))), last])
    assert read(files, *requests) == wanted(*requests)
    assert len(files.reads) == 3  # one for each rank, and the other tensor


def test_what_is_larger_than_the_memory_is_read_in_batches() -> None:
    files = Files()
    requests = in_a_row(files.sliced([6, 6, 6, 6], dp=2))
    assert read(files, *requests, memory=2 * 2 * 3 * SIZE) == wanted(*requests)
    assert [extent.length for extent in files.reads] == [6 * SIZE] * 4
    files.reads.clear()
    assert read(files, *requests, memory=2 * 2 * 3 * SIZE - 1) == wanted(*requests)
    assert [extent.length for extent in files.reads] == [3 * SIZE] * 8


def test_small_slices_take_no_memory_beside_the_working_memory() -> None:
    """`--memory` limits all buffers together, and a tensor of small slices may be large."""
    files, dp, numel = Files(), 16, 16 * 16_000 - 3
    (entry,) = files.sliced([numel], dp)
    view = memoryview(bytearray(numel * SIZE))
    reader = files.reader(2 << 20)
    tracemalloc.start()
    try:
        reader.read([ReadRequest(entry, 0, numel, 0)], view)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(files.reads) == dp
    assert peak < numel * SIZE / 4
    assert view.cast("I").tolist() == [*range(numel)]


@pytest.mark.parametrize(("gap", "batches"), [(0, 1), (SMALL // SIZE - 1, 1), (SMALL // SIZE, 2)])
def test_slices_far_from_each_other_are_read_alone(gap: int, batches: int) -> None:
    files = Files()
    requests = in_a_row(files.sliced([4, 4], dp=2, gap=gap))
    assert read(files, *requests, memory=1 << 20) == wanted(*requests)
    assert len(files.reads) == 2 * batches


def test_slices_that_go_back_in_their_file_are_read_alone() -> None:
    files = Files()
    requests = in_a_row(files.sliced([4, 4], dp=2)[::-1])
    assert read(files, *requests) == wanted(*requests)
    assert len(files.reads) == 4


def test_slices_of_other_flat_buffers_are_read_alone() -> None:
    files = Files()
    first, last = files.sliced([4, 4], dp=2)
    requests = in_a_row([first, *files.sliced([4], dp=2, first=2), last])
    assert read(files, *requests) == wanted(*requests)
    assert len(files.reads) == 4  # for each rank, one of two neighbors and one of the other buffer


def test_slices_that_do_not_count_are_read_alone() -> None:
    files = Files()
    entries = files.sliced([4, 4, 4], dp=2)
    requests = [ReadRequest(each, 0, 4, 16 * n, check=n != 1) for n, each in enumerate(entries)]
    assert read(files, *requests) == wanted(*requests)
    assert files.counted == files.reads[:2] + files.reads[4:]
    assert len(files.reads) == 6


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_part_of_small_slices(is_cut: bool) -> None:
    """Another part is for another file, or for another chunk of the same file."""
    files = Files()
    one, other = files.sliced([8, 8], dp=4)
    requests = [
        ReadRequest(one, 2, 6, 0, is_cut=is_cut),
        ReadRequest(other, 2, 6, 16, is_cut=is_cut),
    ]
    assert read(files, *requests) == wanted(*requests)
    assert len(files.reads) == (4 if is_cut else 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_slices_that_two_ranks_of_a_target_share_count_once(
    sizes: list[int], dp: int, ranks: int
) -> None:
    """Each rank of the target has an even part of every tensor."""
    files = Files()
    entries = files.sliced([size * dp * ranks for size in sizes], dp)
    for rank in range(ranks):
        requests, at = [], 0
        for entry in entries:
            width = entry.numel // ranks
            start = rank * width
            requests.append(ReadRequest(entry, start, start + width, at, is_cut=False))
            at = requests[-1].end
        assert read(files, *requests) == wanted(*requests)
    length = sum(sizes) * ranks * SIZE
    flats = [Extent(f"0 on {rank}", BEFORE, length) for rank in range(dp)]
    assert sorted(files.counted, key=lambda extent: extent.file) == flats


def test_runs_that_follow_each_other_are_one_read() -> None:
    files = Files()
    entries = [
        files.put(
            0, 6, Runs([Fragment(0, 4, Extent("a", 8, 16)), Fragment(4, 6, Extent("a", 24, 8))])
        ),
        files.put(1, 3, solid(3, Extent("a", 32, 12))),
        files.put(2, 3, solid(3, Extent("b", 44, 12))),
        files.put(3, 3, solid(3, Extent("b", 60, 12))),
    ]
    requests = in_a_row(entries)
    assert read(files, *requests) == wanted(*requests)
    assert files.reads == [Extent("a", 8, 36), Extent("b", 44, 12), Extent("b", 60, 12)]


def test_what_lies_apart_in_the_buffer_is_read_apart() -> None:
    files = Files()
    entries = [files.put(n, 2, solid(2, Extent("a", 8 * n, 8))) for n in range(2)]
    requests = [ReadRequest(entries[0], 0, 2, 0), ReadRequest(entries[1], 0, 2, 12)]
    assert read(files, *requests) == wanted(*requests)
    assert files.reads == [Extent("a", 0, 8), Extent("a", 8, 8)]


@pytest.mark.parametrize("counts", [(True, False), (False, True)])
def test_bytes_that_do_not_count_are_read_apart(counts: tuple[bool, bool]) -> None:
    files = Files()
    entries = [files.put(n, 2, solid(2, Extent("a", 8 * n, 8))) for n in range(2)]
    requests = [
        ReadRequest(entry, 0, 2, 8 * n, check)
        for n, (entry, check) in enumerate(zip(entries, counts, strict=True))
    ]
    assert read(files, *requests) == wanted(*requests)
    assert files.reads == [Extent("a", 0, 8), Extent("a", 8, 8)]
    assert files.counted == [files.reads[counts.index(True)]]


@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 5), st.data())
def test_short_runs_at_a_stride(width: int, rows: int, gap: int, draw: st.DataObject) -> None:
    """Columns of a matrix, of which a part is read, with memory for some rows."""
    files = Files()
    extent = Extent("a", 8, rows * width * SIZE)
    whole, rest = (rows, width + gap), Extent("b", 0, rows * gap * SIZE)
    columns = files.put(
        0,
        rows * (width + gap),
        Box(
            whole=whole,
            offsets=(0, 0),
            sizes=(rows, width),
            strides=(width, 1),
            first=0,
            size=SIZE,
            extent=extent,
        ),
    )
    others = files.put(
        0,
        columns.numel,
        Box(
            whole=whole,
            offsets=(0, width),
            sizes=(rows, gap),
            strides=(gap, 1),
            first=0,
            size=SIZE,
            extent=rest,
        ),
    )
    start = draw.draw(st.integers(0, columns.numel - 1))
    stop = draw.draw(st.integers(start + 1, columns.numel))
    memory = draw.draw(st.sampled_from([SIZE, 50, 1 << 16]))
    view = memoryview(bytearray((stop - start + 1) * SIZE))
    for entry in (columns, others):
        files.reader(max(memory, width * SIZE, gap * SIZE)).read(
            [ReadRequest(entry, start, stop, SIZE)], view
        )
    assert view.cast("I").tolist() == [0, *range(start, stop)]


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("is_long", [False, True])
def test_long_runs_are_read_alone(is_long: bool, rows: int) -> None:
    """The right columns of a matrix, behind the first one."""
    files, width = Files(), SHORT // SIZE - (not is_long)
    extent = Extent("a", 0, rows * width * SIZE)
    box = Box(
        whole=(rows, width + 1),
        offsets=(0, 1),
        sizes=(rows, width),
        strides=(width, 1),
        first=0,
        size=SIZE,
        extent=extent,
    )
    columns = files.put(0, rows * (width + 1), box)
    view = memoryview(bytearray(columns.length))
    files.reader().read([ReadRequest(columns, 0, columns.numel, 0)], view)
    assert len(files.reads) == (rows if is_long else 1)
    expected = [n if n % (width + 1) else 0 for n in range(columns.numel)]
    assert view.cast("I").tolist() == expected


def test_of_short_runs_only_those_in_the_range_are_read() -> None:
    files = Files()
    box = Box(
        whole=(6, 4),
        offsets=(0, 1),
        sizes=(6, 2),
        strides=(2, 1),
        first=0,
        size=SIZE,
        extent=Extent("a", 80, 12 * SIZE),
    )
    columns = files.put(0, 24, box)
    for (start, stop), rows in {
        (8, 16): (2, 4),
        (10, 14): (2, 4),
        (10, 13): (2, 3),
        (11, 14): (3, 4),
    }.items():
        files.reads.clear()
        files.reader().read([ReadRequest(columns, start, stop, 0)], memoryview(bytearray(32)))
        first, last = (80 + 2 * row * SIZE for row in rows)
        assert files.reads == [Extent("a", first, last - first)]


@pytest.mark.parametrize(("memory", "rows"), [(4096, [1] * 5), (8192, [2, 2, 1]), (1 << 16, [5])])
def test_short_runs_take_no_more_than_the_memory(memory: int, rows: list[int]) -> None:
    files = Files()
    box = Box(
        whole=(5, 1001),
        offsets=(0, 1),
        sizes=(5, 1000),
        strides=(1000, 1),
        first=0,
        size=SIZE,
        extent=Extent("a", 0, 5000 * SIZE),
    )
    columns = files.put(0, 5005, box)
    view = memoryview(bytearray(columns.length))
    files.reader(memory).read([ReadRequest(columns, 0, 5005, 0)], view)
    assert [extent.length for extent in files.reads] == [1000 * SIZE * count for count in rows]
    assert view.cast("I").tolist() == [n if n % 1001 else 0 for n in range(5005)]


@pytest.mark.parametrize(("width", "reads"), [(SMALL // SIZE - 1, 2), (SMALL // SIZE, 4)])
def test_large_slices_are_read_alone(width: int, reads: int) -> None:
    files = Files()
    requests = in_a_row(files.sliced([2 * width, 2 * width], dp=2))
    assert read(files, *requests, memory=1 << 20) == wanted(*requests)
    assert len(files.reads) == reads


def test_requests_know_their_bytes_and_whether_they_are_whole() -> None:
    entry = Files().put(0, 4, solid(4, Extent("a", 0, 16)))
    assert ReadRequest(entry, 1, 4, 8).end == 20
    parts = [(0, 4), (1, 4), (0, 3)]
    assert [ReadRequest(entry, *part, 0).is_whole for part in parts] == [True, False, False]


def numbers(files: Files, *values: float) -> Entry:
    """A tensor of F32."""
    data = b"".join(encode("F32", value) for value in values)
    entry = files.put(0, len(values), solid(len(values), Extent("a", 0, len(data))))
    files._data["a"][: len(data)] = data
    return replace(entry, dtype="F32")


def test_elements_are_cast_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CAST_BLOCK", 2)
    files, passed = Files(), []
    entry = numbers(files, 1, 2, 3, 4, 5, 6)
    view = memoryview(bytearray(12))
    reader = files.reader()
    reader.read_as(
        "BF16",
        ReadRequest(entry, 1, 6, 2),
        view,
        lambda *block: passed.append((*block[:2], bytes(block[2]))),
    )
    assert bytes(view) == b"\0\0" + b"".join(encode("BF16", n) for n in range(2, 7))
    data = b"".join(encode("F32", n) for n in range(2, 7))
    assert passed == [(1, 3, data[:8]), (3, 5, data[8:16]), (5, 6, data[16:])]
    assert [extent.length for extent in files.reads] == [8, 8, 4]
    assert [(start, stop) for _, start, stop, _ in reader.passed or ()] == [
        (4, 12),
        (12, 20),
        (20, 24),
    ]
    reader.read_as("BF16", ReadRequest(entry, 0, 6, 0, check=False), view)
    assert len(reader.passed or ()) == 3


def test_a_block_of_the_widest_type_has_room() -> None:
    assert len(Files().reader().block) >= pieces.CAST_BLOCK * max(SIZES.values())


def test_elements_of_the_wanted_type_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CAST_BLOCK", 2)
    files, passed = Files(), []
    entry = numbers(files, 1, 2, 3)
    view = memoryview(bytearray(12))
    files.reader().read_as("F32", ReadRequest(entry, 0, 3, 0), view)
    assert files.reads == [Extent("a", 0, 12)]
    files.reader().read_as(
        "F32", ReadRequest(entry, 0, 3, 0), view, lambda *block: passed.append(block[:2])
    )
    assert passed == [(0, 2), (2, 3)]
    assert view.cast("f").tolist() == [1, 2, 3]


def test_a_number_that_becomes_infinite_is_refused_if_bounded() -> None:
    files = Files()
    request = ReadRequest(numbers(files, 1, 1e38), 0, 2, 0)
    view = memoryview(bytearray(4))
    files.reader().read_as("F16", request, view)
    with pytest.raises(UnsupportedCheckpoint, match="0/param"):
        files.reader().read_as("F16", request, view, bounded=True)
