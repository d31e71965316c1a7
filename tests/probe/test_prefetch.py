"""Which modules are read ahead of the calls, on which thread, and into which memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from zckpt.probe import prefetch
from zckpt.probe.prefetch import THREAD, Memory, Order, Prefetcher, WeightPart

A, B, C, D = range(4)
WAIT = 30  # seconds, on a busy machine
SIZE = 20 << 20  # bytes; two modules are more than AHEAD


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def guessed(order: Order, calls: list[int], count: int = 1) -> list[int]:
    """What is expected after the calls."""
    for module in calls:
        order.called(module)
    return list(islice(order.following(guessed=()), count))


def order_of(*paths: str) -> Order:
    return Order(dict(enumerate(paths)))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([A], [B, C, D]),
        ([D], []),
        ([A, C], [D]),
        ([A, C, D, A], [C, D, A]),
        ([A, B, A, C, A, D, A, B, A], [C, A, D]),  # a shared module
        ([A, B, C, D, A, C], [D, A, C]),  # B was skipped
    ],
)
def test_guesses_follow_registration_first_and_calls_later(
    calls: list[int], expected: list[int]
) -> None:
    assert guessed(order_of("a", "b", "c", "d"), calls, 3) == expected


def test_a_block_is_expected_to_call_its_modules_as_the_block_before() -> None:
    parts = ("norm_1", "norm_2", "attention", "mlp")
    order = order_of(*(f"layers.{layer}.{part}" for layer in range(3) for part in parts))
    calls = [A, C, B, D]
    assert guessed(order, calls) == [4]
    assert guessed(order, [4], 8) == [6, 5, 7, 8, 10, 9, 11]


def test_memory_is_used_again_when_no_tensor_is_made_from_it() -> None:
    memory = Memory(64 << 20)
    view = memory.take(4 << 20)
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    kept = torch.frombuffer(view, dtype=torch.float32).view(1024, 1024)[5].fill_(7)
    del view
    other = memory.take(4 << 20)
    assert torch.frombuffer(other, dtype=torch.uint8).data_ptr() != address
    other[:] = bytes(4 << 20)
    assert kept.eq(7).all()
    del kept
    assert torch.frombuffer(memory.take(3 << 20), dtype=torch.uint8).data_ptr() == address


def test_small_modules_do_not_take_large_memory() -> None:
    memory = Memory(64 << 20)
    address = torch.frombuffer(memory.take(4 << 20), dtype=torch.uint8).data_ptr()
    small = memory.take(100)
    assert torch.frombuffer(memory.take(4 << 20), dtype=torch.uint8).data_ptr() == address
    assert len(small) == 100
    assert len(memory.take(0)) == 0


def test_free_memory_is_given_back_before_there_is_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: weakref.WeakSet[prefetch.mmap.mmap] = weakref.WeakSet()
    plain = prefetch.mmap.mmap

    class Map(plain):
        def __init__(self, *about: object, **more: object) -> None:
            alive.add(self)

    monkeypatch.setattr(prefetch.mmap, "mmap", Map)
    memory = Memory(12 << 20)
    for size in (4, 5, 6, 7, 8, 9, 5, 4, 12, 1):
        memory.take(size << 20)
        assert sum(map(len, alive)) <= 12 << 20


class Reads:
    """Fills views with the number of their module; notes the modules and the threads.

    The block's thread waits until it may `go_on`.
    """

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.modules: list[int] = []
        self.threads: set[str] = set()
        self.views: list[weakref.ref[memoryview]] = []
        self.most_alive = 0
        self.begun = {module: threading.Event() for module in (A, B, C, D)}
        self.done = {module: threading.Event() for module in (A, B, C, D)}
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, module: int, view: memoryview, ahead: bool) -> None:
        assert ahead == (threading.current_thread().name == THREAD)
        self.modules.append(module)
        self.begun[module].set()
        self.threads.add(threading.current_thread().name)
        self.views.append(weakref.ref(view))
        self.most_alive = max(self.most_alive, sum(each() is not None for each in self.views))
        if ahead:
            assert self.go_on.wait(WAIT)
        if module in self.broken:
            raise OSError(f"module {module} cannot be read")
        view[:] = bytes([module]) * len(view)
        self.done[module].set()


def parts_of(size: int) -> dict[int, list[WeightPart]]:
    return {module: [WeightPart(size, [module], lambda view: view)] for module in (A, B, C, D)}


@contextmanager
def reading(
    reads: Reads, size: int = SIZE, parts: dict[int, list[WeightPart]] | None = None
) -> Iterator[Prefetcher]:
    parts = parts or parts_of(size)
    prefetcher = Prefetcher(parts, {module: "abcd"[module] for module in parts}, reads)
    try:
        yield prefetcher
        prefetcher.finish()
    finally:
        prefetcher.close()
    assert not running()


def test_the_next_module_is_read_while_one_is_used() -> None:
    with reading(reads := Reads()) as prefetcher:
        (view,) = prefetcher.take(A)
        assert reads.done[B].wait(WAIT)  # nobody has called B
        assert view[0] == A
        assert not reads.done[C].is_set()
    assert reads.modules == [A, B]
    assert THREAD in reads.threads


def test_values_and_memory_of_many_calls() -> None:
    with reading(reads := Reads()) as prefetcher:
        for module in [A, B, C, D] * 3 + [A, C, D, A, B, B, D, C]:
            (view,) = prefetcher.take(module)
            assert view == bytes([module]) * len(view)
            del view
    assert reads.most_alive <= 2


def test_small_modules_are_read_ahead_together() -> None:
    with reading(reads := Reads(), prefetch.LITTLE // 2) as prefetcher:
        prefetcher.take(A)
        assert reads.done[C].wait(WAIT)
        prefetcher.take(B)
        assert reads.done[D].wait(WAIT)
    assert sorted(reads.modules) == [A, B, C, D]


def test_a_call_reads_what_the_thread_has_not_begun() -> None:
    reads = Reads()
    with reading(reads) as prefetcher:
        reads.go_on.clear()
        prefetcher.take(A)
        assert reads.begun[B].wait(WAIT)  # by the thread, which stops there
        assert prefetcher.take(C)[0][0] == C
        assert not reads.done[B].is_set()
        reads.go_on.set()
    assert len(reads.threads) == 2


def test_two_threads_read_one_large_module() -> None:
    reads = Reads()
    parts = {A: [WeightPart(SIZE, [A, B, C], lambda view: bytes(view[:1]))]}
    with reading(reads, parts=parts) as prefetcher:
        reads.go_on.clear()
        threading.Timer(0.2, reads.go_on.set).start()
        assert len(prefetcher.take(A)[0]) == 1
        assert all(reads.done[piece].is_set() for piece in (A, B, C))


def test_what_was_read_for_a_call_that_came_later_is_not_read_again() -> None:
    with reading(reads := Reads(), prefetch.LITTLE // 2) as prefetcher:
        prefetcher.take(A)
        assert reads.done[B].wait(WAIT)
        assert reads.done[C].wait(WAIT)
        prefetcher.take(C)
        assert prefetcher.take(B)[0][0] == B
    assert reads.modules.count(B) == 1


def test_a_wrong_guess_needs_no_more_memory() -> None:
    parts = parts_of(SIZE)
    parts[A] = [WeightPart(1, [A], bytes)]
    with reading(reads := Reads(), parts=parts) as prefetcher:
        prefetcher.take(A)
        assert reads.done[B].wait(WAIT)
        assert reads.done[C].wait(WAIT)
        assert prefetcher.take(D)[0][0] == D
    assert reads.most_alive <= 2


def test_a_tied_part_is_read_once() -> None:
    tied = WeightPart(SIZE, [A], bytes, stays=True)
    parts = parts_of(4096)
    parts[A], parts[D] = [tied], [tied]
    with reading(reads := Reads(), parts=parts) as prefetcher:
        for module in [A, B, C, D] * 3:
            (value,) = prefetcher.take(module)
            assert value[0] == (A if module == D else module)
    assert reads.modules.count(A) == 1
    assert reads.modules.count(B) in (3, 4)  # the thread may have begun a fourth round


def test_the_call_that_needs_a_module_raises_its_error() -> None:
    with reading(reads := Reads(B)) as prefetcher:
        prefetcher.take(A)
        with pytest.raises(OSError, match="module 1"):
            prefetcher.take(B)
        assert prefetcher.take(C)[0][0] == C
    assert reads.modules.count(B) == 1


@pytest.mark.parametrize("stays", [True, False])
def test_a_module_that_could_not_be_read_is_read_again(stays: bool) -> None:
    parts = parts_of(SIZE)
    parts[B] = [WeightPart(SIZE, [B], bytes, stays)]
    reads = Reads(B)
    with reading(reads, parts=parts) as prefetcher:
        with pytest.raises(OSError, match="module 1"):
            prefetcher.take(B)
        reads.broken = ()
        assert prefetcher.take(B)[0][0] == B


def test_an_error_of_making_a_value_is_raised() -> None:
    def fail(view: memoryview) -> None:
        raise MemoryError("no memory for this")

    parts = parts_of(SIZE)
    parts[B] = [WeightPart(SIZE, [B], fail)]
    with reading(reads := Reads(), parts=parts) as prefetcher:
        prefetcher.take(A)
        assert reads.done[B].wait(WAIT)  # on the thread
        with pytest.raises(MemoryError, match="no memory"):
            prefetcher.take(B)


@pytest.mark.parametrize("calls", [[A], [A, C]])
def test_the_end_raises_the_error_of_a_read_that_no_call_needed(calls: list[int]) -> None:
    reads = Reads(B)

    def run() -> None:
        with reading(reads) as prefetcher:
            for module in calls:
                prefetcher.take(module)
                assert reads.begun[B].wait(WAIT)

    with pytest.raises(OSError, match="module 1"):
        run()
    assert not running()
