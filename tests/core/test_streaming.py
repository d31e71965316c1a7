"""One pass over tensors: sizes of chunks, batches of parts, threads and their errors."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.passes.pieces import ElementReader
from zckpt.core.passes.streaming import (
    batches,
    carry_out_all,
    chunk_size,
    finish,
    in_turns,
    share,
    stream,
)
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.core.storage.records import RecordChecker, RecordCounts
from zckpt.core.storage.sources import Fingerprint
from zckpt.errors import SourceChanged


@pytest.mark.parametrize("dp", [1, 64, 1000])
@pytest.mark.parametrize("jobs", [1, 2, 16])
@pytest.mark.parametrize("memory", [1 << 20, 100_000_001, 1 << 30])
def test_chunks_are_aligned_and_within_memory(dp: int, jobs: int, memory: int) -> None:
    chunk = chunk_size(dp, jobs, memory)
    assert chunk % 4096 == 0
    assert chunk == 1 << 20 or 2 * jobs * chunk <= memory


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["param", "exp_avg"]),
            st.sampled_from(["F32", "U8", "F64"]),
            st.integers(0, 50),
        ),
        max_size=9,
    ),
    st.sampled_from([8, 24, 64]),
)
def test_batches_hold_every_element_once(tensors: list[tuple[str, str, int]], chunk: int) -> None:
    entries = [
        Entry(str(number), slot, dtype, (numel,), solid(numel, Extent("a", 0, 0)))
        for number, (slot, dtype, numel) in enumerate(tensors)
    ]
    read = []
    for (batch,) in batches(([entry] for entry in entries), chunk):
        end = 0
        for request in batch:
            assert end <= request.at < request.end <= chunk
            assert request.at % SIZES[request.entry.dtype] == 0
            end = request.end
            read += [(request.entry.name, n) for n in range(request.start, request.stop)]
    kinds = [(entry.slot, entry.dtype) for entry in entries]
    by_kind = sorted(entries, key=lambda entry: kinds.index((entry.slot, entry.dtype)))
    assert read == [(entry.name, n) for entry in by_kind for n in range(entry.numel)]


def test_a_batch_is_as_full_as_it_can_be() -> None:
    entries = [Entry(name, "param", "F32", (3,), solid(3, Extent("a", 0, 12))) for name in "abcde"]
    read = [
        [(request.entry.parameter, request.start, request.stop) for request in batch]
        for (batch,) in batches(([entry] for entry in entries), 32)
    ]
    assert read == [
        [("a", 0, 3), ("b", 0, 3), ("c", 0, 2)],
        [("c", 2, 3), ("d", 0, 3), ("e", 0, 3)],
    ]


@given(st.lists(st.integers(0, 50), max_size=9), st.sampled_from([64, 90, 1000]))
def test_a_batch_has_the_same_elements_of_a_group(sizes: list[int], chunk: int) -> None:
    kinds = (("param", "BF16"), ("master", "F32"), ("exp_avg", "F64"))
    groups = [
        [
            Entry(str(number), slot, dtype, (numel,), solid(numel, Extent("a", 0, 0)))
            for slot, dtype in kinds
        ]
        for number, numel in enumerate(sizes)
    ]
    read = []
    for batch in batches(groups, chunk):
        ends = [request for requests in batch for request in requests]
        assert all(a.end <= b.at for a, b in pairwise(ends))
        assert ends[-1].end <= chunk
        assert all(request.at % SIZES[request.entry.dtype] == 0 for request in ends)
        for together in zip(*batch, strict=True):
            (part,) = {(request.start, request.stop) for request in together}
            read += [(together[0].entry.parameter, n) for n in range(*part)]
    assert read == [(str(number), n) for number, numel in enumerate(sizes) for n in range(numel)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_task_is_carried_out_once(jobs: int) -> None:
    numbers: list[int] = []
    starts: list[int] = []

    def start(readers: Sequence[ElementReader]) -> Callable[[int], None]:
        starts.append(len(readers))
        return numbers.append

    stream(iter(range(100)), jobs, [RecordChecker(())] * 2, 4096, start)
    assert sorted(numbers) == list(range(100))
    assert starts == [2] * jobs


def test_the_first_error_ends_all_threads() -> None:
    numbers: list[int] = []

    def carry_out(number: int) -> None:
        numbers.append(number)
        if number == 5:
            raise KeyError("task")

    with pytest.raises(KeyError, match="task"):
        stream(iter(range(100_000)), 3, [], 4096, lambda _: carry_out)
    assert len(numbers) < 100_000
    assert not [thread for thread in threading.enumerate() if "zckpt" in thread.name]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("dp", "jobs", "memory", "chunk"),
    [
        (1, 1, 1 << 40, 2),
        (15, 1, 1 << 40, 2),
        (16, 1, 1 << 40, 4),
        (64, 1, 1 << 40, 16),
        (64, 2, 20 * MIB, 5),
        (64, 2, 20 * MIB - 1, 4),
        (1, 8, 16 * MIB, 1),
        (1, 8, 1, 1),
    ],
)
def test_chunks_grow_with_ranks_up_to_the_memory(
    dp: int, jobs: int, memory: int, chunk: int
) -> None:
    assert chunk_size(dp, jobs, memory) == chunk * MIB


def test_groups_take_turns() -> None:
    """At most two at a time: the third begins when one has ended."""
    groups = [iter(text) for text in ("abc", "d", "ef", "gh", "")]
    assert "".join(in_turns(iter(groups), 2)) == "adbcefgh"
    assert [*in_turns(iter([iter(()), iter((1,))]), 1)] == [1]


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_limit_of_threads(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that could be started carry out all tasks."""
    start, tried = threading.Thread.start, list[str]()

    def limited(self: threading.Thread) -> None:
        tried.append(self.name)
        if len(tried) > started:
            raise RuntimeError("can't start new thread")
        start(self)

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", limited)
    if started:
        share(iter(range(50)), 4, lambda: nullcontext(done.append))
        assert sorted(done) == [*range(50)]
        assert len(tried) == started + 1
        return
    with pytest.raises(RuntimeError, match="can't start"):
        share(iter(range(50)), 4, lambda: nullcontext(done.append))
    assert done == []


def test_records_of_several_checkpoints_are_counted_together(tmp_path: Path) -> None:
    """Of those that lack little, the rest is read, unless a file has changed since."""
    checkers: list[RecordChecker] = []
    for name in "ab":
        path = tmp_path / name
        path.write_bytes(bytes(100))
        extents = [Extent(str(path), 0, 60), Extent(str(path), 60, 40)]
        records = Record(extents[0], zlib.crc32(bytes(60))), Record(extents[1], None)
        seen = {str(path): Fingerprint.of(os.stat(path))}
        for fingerprints in (seen, {str(path): Fingerprint(0, 0, 0, 0)}):
            checker = RecordChecker(records, fingerprints=fingerprints)
            checker.passed_before(0, 0, 50, zlib.crc32(bytes(50)))
            checker.passed_before(1, 0, 40, 0)
            checkers.append(checker)
    assert finish([checkers[0], checkers[2]]) == RecordCounts(2, 2, 2)
    for pair in ([checkers[1]], [checkers[0], checkers[3]]):
        with pytest.raises(SourceChanged):
            finish(pair)


def test_records_that_lack_much_are_read_only_if_everything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.core.storage.records.LITTLE", 8)
    (tmp_path / "a").write_bytes(bytes(100))
    record = Record(Extent(str(tmp_path / "a"), 0, 100), zlib.crc32(bytes(100)))
    for more, counts in (({}, (0, 1, 0)), ({"everything": True}, (1, 0, 0))):
        checker = RecordChecker((record,))
        checker.passed_before(0, 0, 40, zlib.crc32(bytes(40)))
        assert finish([checker], **more) == RecordCounts(*counts)


@pytest.mark.parametrize(("tasks", "threads"), [(0, 0), (3, 3), (16, 16), (40, 16)])
def test_tasks_that_wait_for_the_disk(
    tasks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thread for each, at most sixteen, which debuggers show by name."""
    start, names = threading.Thread.start, list[str]()

    def noted(self: threading.Thread) -> None:
        names.append(self.name)
        start(self)

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", noted)
    carry_out_all(range(tasks), done.append)
    assert sorted(done) == [*range(tasks)]
    assert names == [f"zckpt-{number}" for number in range(threads)]


@pytest.mark.parametrize("fails", [False, True])
def test_an_interruption_waits_for_what_is_being_done(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the threads, and is what is raised, whatever became of a task meanwhile."""
    interrupted, join = threading.Event(), threading.Thread.join
    done: list[int] = []

    def carry_out(number: int) -> None:
        interrupted.wait(60)
        time.sleep(0.05)  # the main thread would return before
        done.append(number)
        if fails:
            raise KeyError("task")

    def interrupts(self: threading.Thread) -> None:
        if not interrupted.is_set():
            interrupted.set()
            if fails:
                join(self)
            raise KeyboardInterrupt
        join(self)

    monkeypatch.setattr(threading.Thread, "join", interrupts)
    with pytest.raises(KeyboardInterrupt):
        share(iter(range(1000)), 2, lambda: nullcontext(carry_out))
    assert not [thread for thread in threading.enumerate() if "zckpt" in thread.name]
    assert 1 <= len(done) < 1000
