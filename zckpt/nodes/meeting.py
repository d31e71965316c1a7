"""Where do the processes of a launch meet?

    torchrun         its agents have a store, at MASTER_ADDR and MASTER_PORT
    MASTER_ADDR set  rank 0 opens a store there, as programs of torch.distributed do
    neither          rank 0 opens a store on any free port, and writes the address into a file
                     beside the target, which all nodes see

Nothing else of torch.distributed is used: no process group, and no tensor passes here. Only the
process that opens a store imports torch, or one whose store does not answer as expected.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from ..copying.staging import make_folders, save
from ..errors import MissingExtra, ProcessLost, WrongOption
from .launch import Launch
from .tcpstore import OtherProtocol, TcpStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

PREFIX = "zckpt"  # of all keys: torchrun has keys in its store, too
PAUSE = 0.1  # seconds between two looks for a store
PORTS = range(1, 1 << 16)
TRY = 5.0  # seconds for one attempt to reach an address, which may be of an earlier run


class Meeting(Struct, frozen=True):
    """The store of a launch, whether it ends with this process, and the file with its address.

    A store that outlives rank 0 is used by all commands of a launch. Others are used by one.
    """

    store: Store | TcpStore
    is_host: bool = False
    outlives_rank_0: bool = False
    address: str | None = None

    def close(self) -> None:
        if isinstance(self.store, TcpStore):
            self.store.close()
        if self.address is not None:
            with suppress(OSError):
                os.unlink(self.address)


def meet(launch: Launch, beside: str | None, timeout: float) -> Meeting:
    """Where all processes of a launch meet; `beside` is a path on a filesystem that all share.

    Raises MissingExtra without torch, ProcessLost if the store is not there in `timeout` seconds.
    """
    # else torch prints a stack of its own beside the error that this process prints
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        if os.environ.get("MASTER_ADDR"):
            return _at_master(launch, timeout)
        if beside is not None:
            path = f"{os.path.abspath(beside)}.{launch.name or launch.launcher}"
            return _host(path) if launch.rank == 0 else _guest(path, launch, timeout)
    except ImportError as error:
        raise MissingExtra(
            f"{launch.size} processes need torch to share one command",
            hint="install it: pip install 'zckpt[torch]'\n"
            f"or give each process a --part K/{launch.size}, which needs no torch",
        ) from error
    raise WrongOption(
        "MASTER_ADDR does not say where the processes meet",
        hint="set MASTER_ADDR and MASTER_PORT, use torchrun, or add --single",
    )


def _at_master(launch: Launch, timeout: float) -> Meeting:
    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "29500")
    if not port.isdecimal() or int(port) not in PORTS:
        raise WrongOption(f"MASTER_PORT is {port!r}, which is not a port from 1 to 65535")
    has_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = launch.rank == 0 and not has_agents
    try:
        if is_host:
            return Meeting(_prefixed(_store(host, int(port), True, timeout)), is_host)
        store = _reached(host, int(port), timeout)
        return Meeting(store, outlives_rank_0=has_agents)
    except RuntimeError as error:
        name = "torchrun's store" if has_agents else "rank 0"
        raise ProcessLost(
            f"{name} at {host}:{port} cannot be reached: {str(error).splitlines()[0]}",
            hint="see the messages of rank 0; if this process should run alone, add --single",
        ) from error


def _reached(host: str, port: int, timeout: float) -> Store | TcpStore:
    """A store that another process has opened; raises RuntimeError if nobody answers there."""
    try:
        return TcpStore(host, port, PREFIX, timeout)
    except OtherProtocol:
        import torch.distributed  # noqa: F401  # takes a while, before the time counts

        return _prefixed(_within(timeout, partial(_store, host, port, False, timeout)))


def _within(timeout: float, call: Callable[[], TCPStore]) -> TCPStore:
    """What `call` gives; raises RuntimeError if it has given nothing after `timeout` seconds.

    torch's client waits without end for a store that took its connection and then hangs.
    """
    results: list[TCPStore] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"no answer within {timeout:.0f} s")
    return results[0]


def _prefixed(store: TCPStore) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    prefixed: Store = PrefixStore(PREFIX, store)
    return prefixed


def _host(path: str) -> Meeting:
    """A new store, whose address is written to `path`. A token tells it from other stores."""
    token = secrets.token_hex(8)
    opened = _store("localhost", 0, is_host=True, timeout=TRY)
    store = _prefixed(opened)
    store.set("token", token)
    make_folders(os.path.dirname(path))
    save(path, f"{socket.gethostname()} {opened.port} {token}\n".encode())
    return Meeting(store, is_host=True, address=path)


def _guest(path: str, launch: Launch, timeout: float) -> Meeting:
    """The store whose address is in the file `path`, which may still be that of an earlier run."""
    own = socket.gethostname()
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with suppress(OSError, ValueError, RuntimeError, ImportError):
            with open(path, encoding="ascii") as file:
                host, port, token = file.read().split()
            place = "localhost" if host == own else host, int(port)
            socket.create_connection(place, TRY).close()  # raises at once if nobody answers
            store = _reached(*place, timeout=TRY)
            if store.check(["token"]) and store.get("token").decode() == token:
                return Meeting(_reached(*place, timeout=timeout))
        time.sleep(PAUSE)
    raise ProcessLost(
        f"rank 0 of {launch.size} has not started within {timeout:.0f} s: {path} names no store "
        "that answers",
        hint="see its messages; if this process should run alone, add --single",
    )


def _store(host: str, port: int, is_host: bool, timeout: float) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: TCPStore = TCPStore(
        host,
        port,
        is_master=is_host,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    return store
