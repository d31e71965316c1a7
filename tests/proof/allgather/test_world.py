"""Which processes gather, on which device, and by which backend: GPUs and processes are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zckpt.errors import ProcessFailed, WrongOption
from zckpt.proof.allgather.world import World, exchanged, join_world, together_with_others

CPU = torch.device("cpu")
NAMES = "LOCAL_RANK", "SLURM_LOCALID", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE"
TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


class Machine:
    """What a process finds, and what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.backend: str | None = None
        self.device: torch.device | None = None
        for name in (*NAMES, "SLURM_NTASKS_PER_NODE"):
            monkeypatch.delenv(name, raising=False)
        self.has(gpus=0)
        functions: dict[str, Callable[..., Any]] = {
            "is_initialized": lambda: self.backend is not None,
            "init_process_group": self.start,
            "destroy_process_group": self.stop,
            "is_nccl_available": lambda: True,
            "get_backend": lambda: self.backend,
            "get_rank": lambda: 5,
            "get_world_size": lambda: 7,
        }
        for name, function in functions.items():
            monkeypatch.setattr(dist, name, function)
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: setattr(self, "device", device)
        )

    def has(self, gpus: int, driver: bool = True, **environment: str) -> None:
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus) and driver)
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)

    def start(self, backend: str) -> None:
        self.backend = backend

    def stop(self) -> None:
        self.backend = None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("stated", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}])
@pytest.mark.parametrize(("gpus", "name"), [(0, "cpu"), (2, "cuda:0")])
def test_alone(machine: Machine, stated: dict[str, str], gpus: int, name: str) -> None:
    machine.has(gpus, **stated)
    device = torch.device(name)
    assert join_world(None) == World(0, 1, device, device, started=False)
    assert machine.backend is None
    assert machine.device == (device if gpus else None)


@pytest.mark.parametrize(
    ("gpus", "asked", "stated", "device", "backend"),
    [
        (0, None, {}, "cpu", "gloo"),
        (2, "cpu", {"LOCAL_RANK": "1"}, "cpu", "gloo"),
        (2, None, {"LOCAL_RANK": "1"}, "cuda:1", "nccl"),
        (2, "cuda", {"LOCAL_RANK": "1"}, "cuda:1", "nccl"),
        # two nodes with two of the processes each
        (
            2,
            None,
            {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "cuda:1",
            "nccl",
        ),
        (
            2,
            None,
            {"WORLD_SIZE": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
            "cuda:1",
            "nccl",
        ),
        # several processes share a GPU
        (2, None, {"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "cuda:1", "gloo"),
        (1, None, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cuda:0", "gloo"),
    ],
)
def test_several_processes(
    machine: Machine,
    gpus: int,
    asked: str | None,
    stated: dict[str, str],
    device: str,
    backend: str,
) -> None:
    """NCCL gathers on GPUs of their own, gloo in the processor's memory."""
    machine.has(gpus, **TWO | stated)
    world = join_world(asked)
    own = torch.device(device)
    assert world == World(5, 7, own, own if backend == "nccl" else CPU, started=True)
    assert machine.backend == backend
    assert machine.device == (None if device == "cpu" else own)
    world.close()
    assert machine.backend is None


def test_a_torch_without_nccl(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(2, **TWO)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert join_world(None).transport == CPU
    assert machine.backend == "gloo"


def test_a_group_that_a_program_has_started(machine: Machine) -> None:
    """It goes on after the gathering."""
    machine.has(0, **TWO)
    machine.start("of a program")
    world = join_world(None)
    assert world == World(5, 7, CPU, CPU, started=False)
    world.close()
    assert machine.backend == "of a program"


def test_processes_that_do_not_know_where_to_meet(machine: Machine) -> None:
    machine.has(0, WORLD_SIZE="2")
    with pytest.raises(WrongOption, match="WORLD_SIZE is 2, but MASTER_ADDR is not set") as error:
        join_world(None)
    assert "torchrun --nproc-per-node N -m zckpt verify" in str(error.value.hint)
    assert machine.backend is None


@pytest.mark.parametrize(("gpus", "driver"), [(0, True), (1, False)])
def test_there_is_no_gpu(machine: Machine, gpus: int, driver: bool) -> None:
    """Or torch cannot use it."""
    machine.has(gpus, driver)
    with pytest.raises(WrongOption, match="--device cuda, but torch finds no GPU") as error:
        join_world("cuda")
    assert error.value.hint == "use --device cpu"
    assert join_world(None).device == CPU


# -- bytes of every process


def two(rank: int = 0) -> World:
    return World(rank, 2, CPU, CPU, started=False)


def test_bytes_of_processes_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process sends a length, and then as many bytes as the longest has."""
    for own, other in ((b"abc", b"defgh"), (b"abcde", b"f"), (b"a", b"")):
        padded = [*other, *bytes(max(len(own), len(other)) - len(other))]
        sent = [torch.tensor([len(other)]), torch.tensor(padded, dtype=torch.uint8)]

        def all_gather(into: list[torch.Tensor], mine: torch.Tensor, sent: Any = sent) -> None:
            for whole, part in zip(into, (sent.pop(0), mine), strict=True):
                assert (whole.shape, whole.dtype) == (part.shape, part.dtype)
                whole.copy_(part)

        monkeypatch.setattr(dist, "all_gather", all_gather)
        assert exchanged(two(1), own) == [other, own]
    assert exchanged(World(0, 1, CPU, CPU, started=False), b"abc") == [b"abc"]


def test_another_process_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather", all_gather)
    with pytest.raises(ProcessFailed, match="another process of this `verify --gather` failed"):
        exchanged(two(), b"abc")
    with pytest.raises(ProcessFailed, match="another process"), together_with_others():
        raise RuntimeError


def test_a_process_that_failed_before_all_had_met(machine: Machine) -> None:
    """Or that is gone when the group ends, which is no error of its own."""

    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    for name, value in TWO.items():
        machine.monkeypatch.setenv(name, value)
    machine.monkeypatch.setattr(dist, "destroy_process_group", lost)
    join_world(None).close()
    machine.backend = None
    machine.monkeypatch.setattr(dist, "init_process_group", lost)
    with pytest.raises(ProcessFailed, match="failed, or cannot be reached"):
        join_world(None)
