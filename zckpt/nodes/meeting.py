"""Where do the processes of a launch meet?

    torchrun         its agents have a store, for which torch.distributed.rendezvous knows the way
    MASTER_ADDR set  rank 0 opens a store there, as programs of torch.distributed do
    neither          rank 0 opens a store on any free port, and writes the address into a file
                     beside the target, which all nodes see

Nothing else of torch.distributed is used: no process group, and no tensor passes here.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from ..copying.staging import make_folders, save
from ..errors import MissingExtra, ProcessLost, WrongOption
from .launch import Launch, restarts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

TRY = 5.0  # seconds for one attempt to reach an address, which may be of an earlier run


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store of a launch; whether it ends with this process; the file with its address."""

    store: Store
    is_host: bool = False
    address: str | None = None

    def close(self) -> None:
        if self.address is not None:
            with suppress(OSError):
                os.unlink(self.address)


def meet(launch: Launch, beside: str | None, timeout: float) -> Meeting:
    """Where all processes of a launch meet; `beside` is a path on a filesystem that all share.

    Raises MissingExtra without torch, ProcessLost if the store is not there in `timeout` seconds.
    """
    # else torch prints a stack if a process ends before another one, which then says what happened
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingExtra(
            f"{launch.size} processes need torch to share one command",
            hint="install it: pip install 'zckpt[torch]'\n"
            f"or give each process a --part K/{launch.size}, which needs no torch",
        ) from error
    if "TORCHELASTIC_RUN_ID" in os.environ:
        meeting = Meeting(_of_agents(timeout))
    elif "MASTER_ADDR" in os.environ:
        meeting = Meeting(_at_master(launch, timeout), launch.rank == 0)
    elif beside is not None:
        path = f"{os.path.abspath(beside)}.{launch.name or launch.launcher}"
        meeting = _host(path) if launch.rank == 0 else _guest(path, launch, timeout)
    else:
        raise WrongOption(
            "MASTER_ADDR does not say where the processes meet",
            hint="set MASTER_ADDR and MASTER_PORT, use torchrun, or add --single",
        )
    return replace(meeting, store=PrefixStore(f"zckpt/{restarts()}", meeting.store))


def _of_agents(timeout: float) -> Store:
    from torch.distributed.rendezvous import rendezvous

    try:
        store: Store
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise _unreachable("torchrun's store", error) from error
    return store


def _at_master(launch: Launch, timeout: float) -> Store:
    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "29500")
    if not port.isdecimal():
        raise WrongOption(f"MASTER_PORT is {port}, which is not a number")
    try:
        return _store(host, int(port), launch.rank == 0, timeout)
    except RuntimeError as error:
        raise _unreachable(f"rank 0 at {host}:{port}", error) from error


def _host(path: str) -> Meeting:
    """A new store, whose address is written to `path`. A token tells it from other stores."""
    token = secrets.token_hex(8)
    store = _store("localhost", 0, is_host=True, timeout=TRY)
    store.set("token", token)
    make_folders(os.path.dirname(path))
    save(path, f"{socket.gethostname()} {store.port} {token}\n".encode())
    return Meeting(store, is_host=True, address=path)


def _guest(path: str, launch: Launch, timeout: float) -> Meeting:
    """The store whose address is in the file `path`, which may still be that of an earlier run."""
    own = socket.gethostname()
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with suppress(OSError, ValueError, RuntimeError):
            with open(path, encoding="ascii") as file:
                host, port, token = file.read().split()
            place = "localhost" if host == own else host, int(port)
            socket.create_connection(place, TRY).close()  # torch would print that nobody answers
            store = _store(*place, is_host=False, timeout=TRY)
            if store.check(["token"]) and store.get("token").decode() == token:
                return Meeting(store)
        time.sleep(0.1)
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


def _unreachable(what: str, error: Exception) -> ProcessLost:
    return ProcessLost(
        f"{what} cannot be reached: {str(error).splitlines()[0]}",
        hint="see the messages of rank 0; if this process should run alone, add --single",
    )
