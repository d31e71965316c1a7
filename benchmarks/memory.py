"""Puts a machine's memory into a state that decides how fast buffered writes are.

    hot     a process has just freed many pages, as when benchmarks are repeated
    cold    the machine was idle for a minute: a virtual machine's host may have taken pages back
    short   only 3 GB are available: the page cache must drop pages for new ones

`python -m benchmarks.memory BYTES` takes and locks that memory until its standard input ends. It is
a process of its own, because a program starts with the peak memory of its parent process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HOT = 4 << 30  # bytes, more than a run writes
IDLE = 60.0  # seconds
LEFT = 3 << 30  # bytes that stay available
STATES = ("hot", "cold", "short")


@contextmanager
def state(name: str) -> Iterator[Callable[[], None]]:
    """Yields a function that puts memory into this state, to be called before each run.

    Raises ValueError for an unknown state, and RuntimeError if the memory cannot be locked.
    """
    if name == "short":
        with taken(available() - LEFT):
            yield lambda: None
    elif name == "hot":
        yield just_freed
    elif name == "cold":
        yield lambda: time.sleep(IDLE)
    else:
        raise ValueError(f"{name} is not one of {', '.join(STATES)}")


def available() -> int:
    """The bytes that processes can still allocate (MemAvailable of the kernel)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file)
    return int(facts["MemAvailable"].split()[0]) << 10


def just_freed() -> None:
    """Starts a process that takes up to 4 GiB of memory, and ends it: its pages are free then."""
    with taken(min(HOT, available() // 2)):
        pass


@contextmanager
def taken(size: int) -> Iterator[None]:
    """Within the block, another process has `size` bytes of memory locked."""
    command = (sys.executable, "-m", __spec__.name, str(max(size, mmap.PAGESIZE)))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        is_locked = process.stdout.readline()
        try:
            if not is_locked:
                raise RuntimeError("the memory cannot be locked: run as root, or raise `ulimit -l`")
            yield
        finally:
            process.stdin.close()


def main() -> None:
    size = int(sys.argv[1])
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # so that few faults touch them all
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):  # touches every page
        sys.exit(os.strerror(ctypes.get_errno()))
    print("locked", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
