"""Memory of buckets: which of it a process fills, what is sent, and where it is compared.

`meta` stands for the memory of a GPU: torch's device without any memory.
"""

from __future__ import annotations

from importlib.util import module_from_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zckpt.errors import ProcessFailed
from zckpt.proof.allgather import buffers as module
from zckpt.proof.allgather.buckets import Bucket
from zckpt.proof.allgather.buffers import BucketBuffers, all_gather
from zckpt.proof.allgather.world import World

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
SAME = torch.device("cpu", 0)  # the same memory, under another name
THREE_ROWS = Bucket("I32", 3, False, 4, ())


def world(rank: int, size: int, device: torch.device = CPU, transport: torch.device = CPU) -> World:
    return World(rank, size, device, transport, started=False)


def bounds(part: torch.Tensor, whole: torch.Tensor) -> tuple[int, int]:
    """Where a slice of a tensor begins and ends."""
    start = part.data_ptr() - whole.data_ptr()
    return start, start + len(part)


NAMES = ("all_gather_single", "all_gather_into_tensor")


@pytest.mark.parametrize("name", NAMES)
def test_either_name_of_the_collective_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 has the second one alone; the first one counts where it has both."""
    for other in NAMES[NAMES.index(name) :: -1]:
        monkeypatch.delattr(dist, other, raising=False)
    monkeypatch.setattr(dist, name, gather := object(), raising=False)
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.ALL_GATHER is gather


@pytest.mark.parametrize(
    ("size", "rows", "bytes_of_each"),
    [(1, 3 * 16, 3 * 16), (2, 4 * 16, 2 * 16), (3, 3 * 16, 16), (5, 5 * 16, 16)],
)
def test_every_process_has_as_many_rows(size: int, rows: int, bytes_of_each: int) -> None:
    """Three rows of 16 bytes; the last processes have padding."""
    for rank in range(size):
        slot = BucketBuffers(world(rank, size), 100, 7)
        assert slot.rows(THREE_ROWS) == rows
        read, part = slot.own_rows(THREE_ROWS)
        assert read is part
        assert bounds(part, slot.gathered) == (rank * bytes_of_each, (rank + 1) * bytes_of_each)
        assert (len(slot.other), slot.near_other is slot.other) == (7, True)


def test_rows_that_are_sent_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read into memory of their own on the processor's side, and copied to their place."""
    monkeypatch.setattr(module, "all_gather", lambda *_: None)
    slot = BucketBuffers(world(1, 2, META, META), 100, 7)
    assert slot.near is slot.gathered
    read, part = slot.own_rows(THREE_ROWS)
    assert (read.device, part.device, slot.gathered.device) == (CPU, META, META)
    assert len(read) == len(part) == 32
    assert read._base is not None
    assert len(read._base) == 50
    assert slot.gathered.dtype == torch.uint8
    slot.gathered = slot.near = torch.zeros(100, dtype=torch.uint8)  # memory that can be read
    slot.own_rows(THREE_ROWS)[0][:] = 7
    slot.move(THREE_ROWS, 0)
    assert slot.gathered.tolist() == [*[0] * 32, *[7] * 32, *[0] * 36]


def test_rows_that_are_gathered_beside_a_device() -> None:
    """gloo gathers on the processor's side; what it has gathered is copied to the device."""
    slot = BucketBuffers(world(1, 2, META, CPU), 100, 7)
    assert (slot.gathered.device, slot.near.device) == (CPU, META)
    assert slot.own_rows(THREE_ROWS)[0].device == CPU
    slot = BucketBuffers(world(0, 1, CPU, SAME), 100, 7)
    slot.gathered[:] = torch.arange(100)
    slot.near[:] = 255
    slot.move(THREE_ROWS, 0)
    assert slot.near.tolist() == [*range(48), *[255] * 52]


def test_more_memory_for_the_other_side() -> None:
    slot = BucketBuffers(world(0, 1), 100, 7)
    slot.grow(30)
    assert (len(slot.other), slot.near_other is slot.other) == (30, True)


@pytest.mark.parametrize(("size", "apart"), [(1, False), (2, True)])
def test_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, size: int, apart: bool) -> None:
    """By a process that is alone, or of what each process compares by itself."""
    monkeypatch.setattr(module, "all_gather", lambda *_: pytest.fail("it was sent"))
    slot = BucketBuffers(world(0, size), 100, 7)
    slot.gathered[:] = torch.arange(100)
    slot.move(Bucket("I32", 3, apart, 4, ()), 0)
    assert slot.near.tolist() == list(range(100))


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the bucket alone, of which a part is this process's own."""
    sent: list[tuple[int, int]] = []

    def gather(_: World, whole: torch.Tensor, part: torch.Tensor) -> None:
        sent.extend((bounds(whole, slot.gathered), bounds(part, slot.gathered)))

    monkeypatch.setattr(module, "all_gather", gather)
    slot = BucketBuffers(world(1, 2), 100, 7)
    slot.move(THREE_ROWS, 0)
    assert sent == [(0, 64), (32, 64)]


def test_gloo_broadcasts_all_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sends its own part to all others; none is awaited before all have begun."""
    done: list[Any] = []

    class Work:
        def wait(self) -> None:
            done.append("wait")

    def broadcast(part: torch.Tensor, rank: int, async_op: bool) -> Work:
        assert async_op
        done.append((rank, part.tolist()))
        return Work()

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(module, "ALL_GATHER", lambda *_: pytest.fail("gloo's own copies twice"))
    whole = torch.arange(6)
    all_gather(world(1, 3), whole, whole[2:4])
    assert done == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), "wait", "wait", "wait"]


def test_nccl_gathers_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(module, "ALL_GATHER", lambda *tensors: gathered.append(tensors))
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: pytest.fail("it was broadcast"))
    whole = torch.arange(6)
    part = whole[2:4]
    all_gather(world(1, 3, CUDA, CUDA), whole, part)
    ((to, own),) = gathered
    assert to is whole
    assert own is part


def test_another_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(module, "all_gather", broken)
    with pytest.raises(ProcessFailed, match="another process of this `verify --gather` failed"):
        BucketBuffers(world(0, 2), 100, 7).move(THREE_ROWS, 0)
