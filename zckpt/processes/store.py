"""The store through which the processes of a launch communicate.

It is a store of torch.distributed. There are three kinds: that of the process group which the
program has made, torchrun's own, which outlives its processes, or one that rank 0 opens at
MASTER_ADDR and MASTER_PORT. All keys of zckpt begin with `zckpt/`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ..errors import MissingExtra, ProcessFailed, ProcessLost
from .launcher import Launch, joined, meeting_place

VALUE = 4 << 20  # bytes of one value; torch's store allows 8 MiB
# the time for an attempt to reach a store that rank 0 may still open
ATTEMPT = timedelta(seconds=5)
LOOK = 0.05  # seconds

PROCESSES = "processes"
"""The subject of errors that can occur only if several processes work together."""
Patience = Callable[[str], None]
"""Called repeatedly during a wait, with a text to print once if the wait becomes long."""


class Store:
    """A key-value store of short values that all processes of a launch see.

        is_hosted    rank 0 has opened the store for this group, and will end it
        outlives     the store still exists after the launcher has restarted all processes

    Raises ProcessLost if the connection ends.
    """

    def __init__(self, launch: Launch, patient: Callable[[], Patience]) -> None:
        try:
            if "torch" not in sys.modules:  # torch would print stacks beside our errors
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            import torch.distributed as torch_store
            from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
        except ImportError as error:
            raise MissingExtra(
                "extra-missing",
                f"{launch.size} processes need torch to share one command",
                hint="install it: pip install 'zckpt[torch]'; or let one process work alone, "
                "which needs no torch: --single",
                subject=PROCESSES,
            ) from error
        in_group = joined() == launch  # the program's group, which may have other processes
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.outlives = of_agent and not in_group
        self.is_hosted = not of_agent and not torch_store.is_initialized()
        if launch.size == 1:
            self._store = PrefixStore("zckpt", HashStore())
            return
        if in_group:  # use the program's own store, however it was opened
            from torch.distributed.distributed_c10d import _get_default_store

            store: Any = _get_default_store()  # torch 2.6 makes no second connection
            self._store = PrefixStore("zckpt", getattr(store, "clone", lambda: store)())
            return
        place = meeting_place()
        opened: Any = torch_store.TCPStore  # type: ignore[attr-defined]
        is_host = self.is_hosted and launch.rank == 0
        words = {"is_master": is_host, "timeout": ATTEMPT, "wait_for_workers": False}
        self._place, where, patience = place, f"{place[0]}:{place[1]}", patient()
        while True:
            try:
                store = _patiently(
                    lambda: opened(*place, **words),
                    lambda: patience(f"rank {launch.rank} waits for the store at {where}"),
                )
                break
            except RuntimeError as error:
                if is_host:
                    raise ProcessLost(
                        "launcher-variables",
                        f"rank 0 cannot open a store at {where}: {_first_line(error)}",
                        hint="choose another MASTER_PORT; if this process should run alone, as in "
                        "a program that uses this port, add --single",
                    ) from error
        self._store = PrefixStore("zckpt", store)

    def add(self, key: str, count: int) -> int:
        """Adds `count` to a counter, which begins at 0, and returns its new value."""
        return int(self._ask(self._store.add, key, count))

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def get(self, key: str) -> bytes:
        """The value of a key, which must exist."""
        value: bytes = self._ask(self._store.get, key)
        if len(value) > VALUE:
            raise unreadable(f"it has {len(value)} bytes")
        return value

    def outlived(self, last: Callable[[], object], seconds: float) -> None:
        """Ends this process's use of a store that rank 0 hosts: calls `last`, its last request.

        Then it waits until rank 0 has ended the store, at most for `seconds`. It waits on a plain
        connection, because a request to a store that has ended makes torch print a stack trace.
        """
        with suppress(OSError), socket.create_connection(self._place, seconds) as line:
            last()
            line.recv(1)

    def close(self) -> None:
        """Ends the connection, and the store if this process is its host."""
        del self._store

    def _ask(self, call: Callable[..., Any], *words: Any) -> Any:
        try:
            return call(*words)
        except RuntimeError as error:
            raise ProcessLost(
                "process-lost", f"the store of this launch is gone: {_first_line(error)}"
            ) from error


def unreadable(reason: str) -> ProcessFailed:
    """Makes the error for a message that cannot be parsed, because another program has sent it."""
    return ProcessFailed(
        "processes-disagree",
        f"a message of another process cannot be read: {reason}",
        hint="start all processes with the same version of zckpt; another program may use their "
        "store: choose another MASTER_PORT",
    )


def _patiently(call: Callable[[], Any], wait: Callable[[], None]) -> Any:
    """Runs a blocking call of torch (`call`) in a thread, and returns its result.

    Meanwhile it calls `wait` again and again, and signals can end this process.
    """
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not answer.done():
        time.sleep(LOOK)
        wait()
    return answer.result()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]  # torch's texts have stacks
