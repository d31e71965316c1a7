"""One pass over tensors: sizes of chunks, batches of parts, threads and their errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.dtypes import SIZES
from zckpt.core.fragments import Extent, solid
from zckpt.core.manifest import Entry
from zckpt.core.pieces import ElementReader
from zckpt.core.records import RecordChecker
from zckpt.core.streaming import batches, chunk_size, stream


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
        Entry(f"{number}/{slot}", dtype, (numel,), solid(numel, Extent("a", 0, 0)))
        for number, (slot, dtype, numel) in enumerate(tensors)
    ]
    read = []
    for batch in batches(entries, chunk):
        end = 0
        for request in batch:
            assert end <= request.at < request.end <= chunk
            assert request.at % SIZES[request.entry.dtype] == 0
            end = request.end
            read += [(request.entry.name, n) for n in range(request.start, request.stop)]
    by_slot = sorted(entries, key=lambda entry: [e.slot for e in entries].index(entry.slot))
    assert read == [(entry.name, n) for entry in by_slot for n in range(entry.numel)]


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
