"""A store of torch.distributed without torch: it says what torch's own client says."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zckpt.errors import ProcessLost
from zckpt.nodes import meeting
from zckpt.nodes.launch import Launch
from zckpt.nodes.tcpstore import OtherProtocol, TcpStore

from ..conftest import ROOT
from .conftest import free_port


def opened(use_libuv: bool = True) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv
    )


@pytest.mark.parametrize("use_libuv", [True, False])
def test_both_clients_see_the_same(use_libuv: bool) -> None:
    store = opened(use_libuv)
    torchs = dist.PrefixStore("zckpt/0", store)  # type: ignore[attr-defined]
    ours = TcpStore("localhost", store.port, "zckpt/0", 5)
    large = bytes(range(256)) * (1 << 14)  # 4 MiB, as much as Group sends at once
    for writer, reader in ((ours, torchs), (torchs, ours)):
        for value in (b"", b"\0\xff", large):
            writer.set("key", value)
            writer.add("n", 0)  # `set` gets no answer; this one comes after it
            assert reader.get("key") == value
    ours.set("text", "\N{SNOWMAN}")
    assert torchs.get("text").decode() == "\N{SNOWMAN}"
    assert [ours.add("n", 5), torchs.add("n", -7), ours.add("n", 0)] == [5, -2, -2]
    assert ours.check(["key", "text"])
    assert not ours.check(["key", "not there"])
    assert not store.check(["key"])  # the prefix


def test_counters_of_many_connections() -> None:
    store = opened()
    clients = [TcpStore("localhost", store.port, "p", 5) for _ in range(8)]
    seen: list[int] = []

    def count(client: TcpStore) -> None:
        seen.extend([client.add("n", 1) for _ in range(100)])

    threads = [threading.Thread(target=count, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [*range(1, 801)]


class Strange:
    """A server that answers every connection by `answer`."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self._socket = socket.create_server(("localhost", 0))
        self.port = self._socket.getsockname()[1]
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self._answer(connection)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n"),
    ],
    ids=["closes", "another program"],
)
def test_another_protocol(answer: Callable[[socket.socket], object]) -> None:
    with pytest.raises(OtherProtocol):
        TcpStore("localhost", Strange(answer).port, "p", 5)


def test_torch_itself_speaks_to_a_store_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers torch's client alone."""
    store = opened()
    monkeypatch.setattr("zckpt.nodes.tcpstore.MAGIC", 1)
    for name, value in agents_store(store).items():
        monkeypatch.setenv(name, value)
    met = meeting.meet(Launch(1, 2, "torchrun"), None, 5)
    assert not isinstance(met.store, TcpStore)
    met.store.set("a", "1")
    assert store.get("zckpt/a") == b"1"


def test_nobody_listens() -> None:
    with pytest.raises(RuntimeError, match="refused"):
        TcpStore("localhost", free_port(), "p", 0.2)


def store_that_answers(data: bytes) -> TcpStore:
    """A store that passes the check, answers the next message, and ends the connection."""

    def answer(connection: socket.socket) -> None:
        first = connection.recv(1 << 10)
        connection.sendall(first[-4:])  # the number of the first message
        connection.recv(1 << 10)
        connection.sendall(data)
        connection.close()

    return TcpStore("localhost", Strange(answer).port, "p", 5)


def test_the_connection_ends() -> None:
    with pytest.raises(RuntimeError, match="ended the connection"):
        store_that_answers(b"").add("n", 1)


@pytest.mark.parametrize("length", [-5, (8 << 20) + 1, 1 << 60])
def test_a_value_of_an_impossible_length(length: int) -> None:
    with pytest.raises(RuntimeError, match=f"{length} bytes"):
        store_that_answers(struct.pack("<q", length) + b"x").get("key")


def test_a_value_that_is_cut() -> None:
    with pytest.raises(RuntimeError, match="ended the connection"):
        store_that_answers(struct.pack("<q", 8 << 20) + b"x").get("key")


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own client would wait for it without end."""
    silent = socket.create_server(("localhost", 0))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
    with pytest.raises(ProcessLost, match="cannot be reached: no answer within 1 s"):
        meeting.meet(Launch(1, 2, "torchrun"), None, 1)
    silent.close()


def test_a_stale_address_of_another_program_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may write a new address soon; a process without torch waits for it too."""
    server = Strange(lambda connection: connection.close())
    (tmp_path / "out.srun").write_text(f"{socket.gethostname()} {server.port} 00\n")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def lacks_torch(*_: Any, **__: Any) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr(meeting, "_store", lacks_torch)
    with pytest.raises(ProcessLost, match="has not started within 1 s"):
        meeting.meet(Launch(1, 2, "srun"), str(tmp_path / "out"), 1)


def agents_store(store: Any) -> dict[str, str]:
    """What torchrun tells its processes of its store."""
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_a_process_of_torchrun_does_not_import_torch() -> None:
    store = opened()
    script = (
        "import sys; from zckpt.nodes.launch import Launch; from zckpt.nodes.group import Group\n"
        "with Group(Launch(0, 1, 'torchrun'), ['stats'], None) as group: group.publish('key', 1)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    environment = {"PYTHONPATH": str(ROOT), **agents_store(store)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert store.get("zckpt/0/key") == b"1"
