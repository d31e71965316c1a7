"""The threads and the memory that a command may use to move bytes."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from ...errors import WrongOption
from .pooling import SINGLE, Pool

Progress = Callable[[int], None]
"""Is called with the number of bytes that were processed since the last call."""
Begin = Callable[[int], Progress]
"""Is called once with the number of bytes to come; returns the function to report them to."""
Describe = Callable[[str], None]
"""Is called with a description of the present work: "writing master.safetensors, 3 of 9 files"."""
Tell = Callable[[Sequence[dict[str, Any]]], None]
"""Is called with the warnings of a conversion, before its first byte is written."""


def describe(progress: Progress | None, text: str) -> None:
    """Shows `text`, which says what the command does at present, beside its progress.

    Does nothing if there is no `progress`.
    """
    show: Describe | None = getattr(progress, "describe", None)
    if show is not None:
        show(text)


@contextmanager
def uncollected() -> Iterator[None]:
    """Stops the garbage collector while many objects are created that will all remain in use.

    The collector would find no garbage, but scan all objects again and again, which takes a quarter
    of the time for a large checkpoint.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Copying(Struct, frozen=True):
    """The resources of a command: `jobs` threads, and `memory` bytes for all buffers.

    `io` is the kind of writes: auto, direct or buffered. `pool` has the processes that share a
    comparison.
    """

    jobs: int = 4
    memory: int = 256 << 20
    io: str = "auto"
    pool: Pool = SINGLE

    def __post_init__(self) -> None:
        if self.memory < 2 * self.jobs << 20:
            raise WrongOption(
                "option-invalid",
                f"{self.jobs} jobs need {2 * self.jobs} MiB of memory",
                hint="raise --memory, or lower --jobs",
            )


DEFAULT_COPYING = Copying()


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks this function
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


READING_JOBS = min(4, max(2, processors()))
"""The number of threads that only read.

They never wait for a write, so more would only take turns.
"""


def free_memory() -> int:
    """The bytes that this process may still allocate, on the machine and in its control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (kibibytes := re.search(r"MemAvailable: +(\d+) kB", _text("/proc/meminfo"))) is not None:
        free = int(kibibytes[1]) << 10
    for group in re.findall(r"^0::(/.*)$", _text("/proc/self/cgroup"), re.MULTILINE):
        most, used = (_text(f"/sys/fs/cgroup{group}/memory.{name}") for name in ("max", "current"))
        if most.strip().isdecimal() and used.strip().isdecimal():
            free = min(free, max(0, int(most) - int(used)))
    return free


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def own_rank() -> int:
    """The rank of this process, from torchrun's RANK and WORLD_SIZE; 0 unless both are set.

    RANK alone proves nothing: in many clusters it is set in every shell.
    """
    texts = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, size = (int(text) if text.isdecimal() else 0 for text in texts)
    return rank if rank < size else 0
