"""The processes that take part in an all-gather, and the devices with their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from msgspec import Struct

from ...errors import ProcessFailed, WrongOption


class World(Struct, frozen=True):
    """The place of this process among those that gather: its rank, and its devices.

    `transport` is the device on which tensors are gathered, `device` the one on which they are
    compared.
    """

    rank: int
    size: int
    device: torch.device
    transport: torch.device
    started: bool

    def close(self) -> None:
        if self.started:
            with suppress(RuntimeError):  # processes that failed are gone already
                dist.destroy_process_group()


def join_world(asked: str | None) -> World:
    """Connects the processes that torchrun started; without torchrun's variables, works alone.

    NCCL gathers if every process has its own GPU. gloo gathers in the CPU's memory otherwise: on
    the CPU, and if several processes share a GPU, which NCCL refuses.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise WrongOption(
            "option-invalid", "--device cuda, but torch finds no GPU", hint="use --device cpu"
        )
    cuda = bool(gpus) and asked != "cpu"
    local = _stated("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", default=0)
    device = torch.device("cuda", local % gpus) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    size = _stated("WORLD_SIZE", default=1)
    started = size > 1 and not dist.is_initialized()
    if started:
        if "MASTER_ADDR" not in os.environ:
            raise WrongOption(
                "launcher-variables",
                f"WORLD_SIZE is {size}, but MASTER_ADDR is not set: the processes cannot connect",
                hint="start it with `torchrun --nproc-per-node N -m zckpt verify ...`, or unset "
                "WORLD_SIZE",
            )
        has_own_gpus = _stated("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", default=size) <= gpus
        backend = "nccl" if cuda and has_own_gpus and dist.is_nccl_available() else "gloo"
        says = "another process of this `verify --gather` failed, or cannot be reached"
        with together_with_others(says):
            dist.init_process_group(backend)
    if not dist.is_initialized():
        return World(0, 1, device, device, started=False)
    on_device = dist.get_backend() == "nccl"
    transport = device if on_device else torch.device("cpu")
    return World(dist.get_rank(), dist.get_world_size(), device, transport, started)


def _stated(*names: str, default: int) -> int:
    """The number in the first environment variable of `names` that is set.

    `default` if none is set, or if the value is not a number.
    """
    text = next((os.environ[name] for name in names if name in os.environ), "")
    return int(text) if text.isdecimal() else default


def exchanged(world: World, data: bytes) -> list[bytes]:
    """Sends `data` to all processes; returns the data of every process, in the order of ranks.

    torch's own function for objects is not used, because it would pickle them.
    """
    if world.size == 1:
        return [data]
    with together_with_others():
        length = torch.tensor([len(data)], device=world.transport)
        lengths = [torch.empty_like(length) for _ in range(world.size)]
        dist.all_gather(lengths, length)
        sizes = [int(each) for each in lengths]
        buffer = torch.zeros(max(sizes), dtype=torch.uint8)
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffer = buffer.to(world.transport)
        buffers = [torch.empty_like(buffer) for _ in range(world.size)]
        dist.all_gather(buffers, buffer)
    return [each.cpu().numpy().tobytes()[:size] for each, size in zip(buffers, sizes, strict=True)]


@contextmanager
def together_with_others(
    says: str = "another process of this `verify --gather` failed",
) -> Iterator[None]:
    """Raises ProcessFailed if another process fails during the `with` block.

    `says` is the message of this error.
    """
    try:
        yield
    except RuntimeError as error:
        raise ProcessFailed("process-failed", says) from error
