"""Who takes part in a command: each rank once, all for the same command, one command at a time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from msgspec import Struct

import zckpt
from zckpt.cli import run
from zckpt.core import pooling
from zckpt.core.pieces import ElementReader
from zckpt.errors import Interrupted, ProcessLost, WrongOption
from zckpt.nodes import conversion, handover
from zckpt.nodes.calls import Calls
from zckpt.nodes.group import TIMEOUT, Group
from zckpt.nodes.joining import Joining
from zckpt.nodes.launch import Launch as Launched
from zckpt.nodes.meeting import meet
from zckpt.nodes.passes import LeaderPool
from zckpt.nodes.tcpstore import TcpStore

from ..conftest import Result
from ..test_resume import files
from .conftest import Process, free_port, stop_at_second_portion, until
from .test_conversion import COPYING, ONE_THREAD, SMALL, Launch, done, ended
from .test_failures import wait_for_journals, with_errors


@pytest.fixture
def agent() -> Iterator[dict[str, object]]:
    """The variables of a torchrun whose store is in this process, and outlives all ranks."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    yield {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store  # until then it answers


# -- commands that follow each other in one launch


def test_several_commands_of_one_script(
    sources: dict[str, Path], tmp_path: Path, launch: Launch, agent: dict[str, object]
) -> None:
    out = tmp_path / "out"
    done(launch(2, "convert", sources["zero-1"], out, *SMALL, **agent))
    assert "is consistent" in done(launch(2, "verify", out, *SMALL, **agent)).out
    assert [item.code for item in ended(launch(2, "convert", out, out, **agent))] == [2, 2]
    done(launch(2, "convert", out, tmp_path / "again", *SMALL, **agent))
    assert files(tmp_path / "again") == files(out)


def test_a_rank_that_missed_a_command(
    sources: dict[str, Path],
    launch: Launch,
    agent: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong option of one process ends its command; all meet in the next one."""
    monkeypatch.setattr(run, "PATIENCE", 0.1)
    first = launch(2, "verify", sources["dcp"], ranks=range(1), **agent, ZCKPT_TIMEOUT=1)
    second = launch(2, "verify", sources["dcp"], "--no-such-option", ranks=range(1, 2), **agent)
    assert [item.code for item in ended([*first, *second])] == [1, 2]
    done(launch(2, "stats", sources["dcp"], **agent))


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_store_of_an_earlier_command(
    launcher: str,
    sources: dict[str, Path],
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 hosts it until the slowest process has left; the others may begin the next one."""

    def leaves_late() -> None:
        leave = Group._leave

        def late(self: Group, has_failed: bool) -> None:
            self.wait(lambda: self.has("end"))
            (tmp_path / "ends").touch()
            until((tmp_path / "next").exists)
            time.sleep(0.3)
            leave(self, has_failed)

        Group._leave = late  # type: ignore[method-assign]

    monkeypatch.chdir(tmp_path)
    more = {"MASTER_PORT": free_port()} if launcher == "torchrun" else {}
    words = ("verify", sources["dcp"])
    old = launch(3, *words, preparing={2: leaves_late}, launcher=launcher, **more)
    until((tmp_path / "ends").exists)
    assert old[1].wait().code == 0
    words = ("stats", sources["dcp"])
    early = launch(3, *words, ranks=range(1, 2), launcher=launcher, **more)
    (tmp_path / "next").touch()
    done([old[0], old[2]])
    first = launch(3, *words, ranks=range(1), launcher=launcher, **more)
    done([*first, *early, *launch(3, *words, ranks=range(2, 3), launcher=launcher, **more)])


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_starts_after_the_end(
    fails: bool,
    launcher: str,
    sources: dict[str, Path],
    launch: Launch,
    agent: dict[str, object],
    tmp_path: Path,
) -> None:
    """Rank 0 needs no other process for a dry run, and not to find that there is no source."""
    source = tmp_path / "nothing" if fails else sources["dcp"]
    words = ("convert", source, tmp_path / "out", "--dry-run")
    more = agent if launcher == "torchrun" else {}
    (first,) = launch(2, *words, ranks=range(1), launcher=launcher, **more)
    if launcher == "torchrun":
        first.wait()
    else:  # rank 0 hosts the store, and waits some seconds for the other
        until((tmp_path / "out.srun").exists)
        time.sleep(0.5)
    (second,) = launch(2, *words, ranks=range(1, 2), launcher=launcher, **more)
    assert second.wait(10) == Result(int(fails), "", "")
    assert first.wait().code == int(fails)


# -- what processes that were started again go on with


@pytest.mark.parametrize("count", [0, 1])
def test_restarted_processes_continue(
    count: int, sources: dict[str, Path], tmp_path: Path, launch: Launch, agent: dict[str, object]
) -> None:
    """What this launch has begun, or completed. The agents of torchrun count restarts apart."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    processes = begun(launch, tmp_path, words, agent)
    for process in processes:
        process.send(signal.SIGKILL)
        process.wait()
    early = launch(2, *words, ranks=range(1, 2), **agent, TORCHELASTIC_RESTART_COUNT=count)
    time.sleep(0.3)  # until rank 0 starts again, only the command is there that was killed
    first = launch(2, *words, ranks=range(1), **agent)
    report = done([*first, *early])
    assert "an earlier run had written" in report.out
    report = done(launch(2, *words, **agent, TORCHELASTIC_RESTART_COUNT=2))
    assert "complete already" in report.out
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


@pytest.mark.parametrize("is_complete", [False, True])
def test_restarted_processes_do_not_continue_another_run(
    is_complete: bool,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    agent: dict[str, object],
) -> None:
    """torchrun repeats a command that was refused: it is refused again."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    if is_complete:
        done(launch(2, *words))
    else:
        for process in begun(launch, tmp_path, words, {}):
            process.send(signal.SIGKILL)
            process.wait()
    for count in range(3):
        results = ended(launch(2, *words, **agent, TORCHELASTIC_RESTART_COUNT=count))
        assert [item.code for item in results] == [1, 1]
        assert "exists" in results[0].err
    done(launch(2, *words, "--resume", **agent, TORCHELASTIC_RESTART_COUNT=3))


def begun(
    launch: Launch, tmp_path: Path, words: tuple[object, ...], more: dict[str, object]
) -> list[Process]:
    """Two processes in the middle of a conversion."""

    def wait() -> None:
        stop_at_second_portion(tmp_path / "go")

    processes = launch(2, *words, preparing={0: wait, 1: wait}, **more)
    wait_for_journals(tmp_path / "out.partial", 2)
    return processes


def test_a_command_that_rank_0_left_for_another() -> None:
    """A new rank 0 may open one while a process joins that of the rank 0 that was killed."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    client = TcpStore("localhost", store.port, "p", 5)
    calls = Calls(client, 5, ProcessLost)
    joining = Joining(Launched(1, 2, "torchrun"), ["verify"], 5, "", ProcessLost)
    calls.add("commands", 2)
    begun = time.monotonic()
    assert not joining._is_led(calls, 1, begun + 20)
    assert time.monotonic() - begun < 5
    calls.close()
    client.close()


# -- a rank that is there twice, or that was replaced


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """A function for a process that then waits in its first read for the file `go`."""
    monkeypatch.setattr(pooling, "BLOCK", 1 << 20)
    monkeypatch.setattr(run, "PATIENCE", 0.1)

    def prepare() -> None:
        read = ElementReader.read

        def wait(self: ElementReader, *rest: Any) -> None:
            (tmp_path / f"reads-{os.environ['RANK']}").touch()
            until((tmp_path / "go").exists)
            read(self, *rest)

        ElementReader.read = wait  # type: ignore[method-assign, assignment]

    return prepare


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("command", ["verify", "stats"])
def test_a_rank_that_is_started_twice(
    command: str,
    is_killed: bool,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    waiting: Callable[[], None],
    agent: dict[str, object],
) -> None:
    """The second process takes no blocks; without the first one there is no report."""
    words = (command, sources["zero-3"], *SMALL)
    preparing = {0: waiting, 1: waiting}
    processes = launch(2, *words, preparing=preparing, **agent, ZCKPT_TIMEOUT=3)
    until(lambda: len(list(tmp_path.glob("reads-*"))) == 2)
    if is_killed:
        processes[1].send(signal.SIGKILL)
        processes[1].wait()
    (second,) = ended(launch(2, *words, ranks=range(1, 2), **agent, ZCKPT_TIMEOUT=1))
    assert second.code == 1
    assert "this rank was started twice" in second.err
    if not is_killed:
        (third,) = ended(launch(2, *words, ranks=range(1), **agent, ZCKPT_TIMEOUT=2))
        assert third.code == 1
        assert "rank 0 was started twice" in third.err
    (tmp_path / "go").touch()
    if is_killed:
        first = processes[0].wait()
        assert first.code == 1
        assert "rank 1 (" in first.err
        assert not first.out
    else:
        done(processes)


class OneRank:
    """A group as rank 0 sees it; rank 1 has sent `result`, and the counters are in a dictionary."""

    size = 2

    def __init__(self, result: bytes) -> None:
        self.result = result
        self.counters: dict[str, int] = {}

    def send(self, key: str, data: bytes) -> None:
        pass

    def received(self, key: str) -> bytes:
        return self.result

    def next(self, key: str) -> int:
        self.counters[key] = self.counters.get(key, 0) + 1
        return self.counters[key] - 1

    def how_many(self, key: str) -> int:
        return self.counters[key]


class NoWork(Struct, frozen=True):
    manifests: tuple[()] = ()


@pytest.mark.parametrize("lost", [0, 1])
def test_blocks_of_which_nobody_hears_again(lost: int) -> None:
    """Tensors that nobody has read have no differences: they must not look as if equal."""
    group: Any = OneRank(handover.to_bytes((2, "what rank 1 has found")))
    pool = LeaderPool(group)
    blocks = pool.begin(NoWork())
    assert [blocks() for _ in range(3)] == [0, 1, 2]
    for _ in range(2 + lost):
        group.next("block/0")
    others = iter(pool.others())
    assert next(others) == "what rank 1 has found"
    if lost:
        with pytest.raises(ProcessLost, match="6 blocks were given to processes, but 5 came back"):
            next(others)
    else:
        assert list(others) == []


# -- processes that were started for something else


@pytest.mark.parametrize(
    ("words", "size", "message"),
    [
        (
            ("verify", "zero-1"),
            2,
            "rank 0 was started for zckpt .*, verify .*; rank 1 for .*verify",
        ),
        (("stats", "zero-3"), 2, "rank 1 for zckpt .*, stats "),
        (("verify", "zero-3", "--against", "dcp"), 2, "rank 1 for zckpt .*, verify "),
        (("verify", "zero-3"), 3, "in 2 processes; rank 1 for .*, in 3 processes"),
        (("convert", "zero-3", "out"), 2, "rank 1 for zckpt .*, convert "),
    ],
)
def test_other_arguments_of_one_process(
    words: tuple[str, ...],
    size: int,
    message: str,
    sources: dict[str, Path],
    launch: Launch,
    agent: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    first = launch(2, "verify", sources["zero-3"], ranks=range(1), **agent)
    paths = [sources.get(word, word) for word in words]
    results = ended([*first, *launch(size, *paths, ranks=range(1, 2), **agent)])
    assert [item.code for item in results] == [2, 2]
    assert re.search(message, results[1].err)
    assert with_errors(results) == [1]
    assert not results[0].out


@pytest.mark.parametrize("other", ["target", "folder"])
def test_another_target_of_one_process(
    other: str, sources: dict[str, Path], launch: Launch, agent: dict[str, object], tmp_path: Path
) -> None:
    def elsewhere() -> None:
        os.chdir("elsewhere")

    (tmp_path / "elsewhere").mkdir()
    words = ("convert", sources["dcp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        first = launch(2, *words, "a", ranks=range(1), **agent)
        target = "b" if other == "target" else "a"
        preparing = {} if other == "target" else {1: elsewhere}
        second = launch(2, *words, target, ranks=range(1, 2), preparing=preparing, **agent)
        results = ended([*first, *second])
    assert [item.code for item in results] == [2, 2]
    message = {"target": "rank 0 was started for zckpt", "folder": "rank 0 writes into"}
    assert message[other] in results[1].err
    assert not results[0].err
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "output"}
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_wrong_option_is_printed_by_rank_0(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait until their launcher ends them, which it does when rank 0 has ended."""
    monkeypatch.setattr(run, "PATIENCE", 30.0)
    first, second = launch(2, "convert", "a", "b", "--no-such-option")
    assert first.wait().code == 2
    assert "No such option" in first.printed()[1]
    assert not second.has_ended()
    second.send(signal.SIGTERM)
    assert second.wait() == Result(-signal.SIGTERM, "", "")


def test_a_wrong_option_of_one_process(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends it: it says what is wrong itself."""
    monkeypatch.setattr(run, "PATIENCE", 0.1)
    (process,) = launch(2, "convert", "a", "b", "--no-such-option", ranks=range(1, 2))
    assert process.wait().code == 2
    assert "No such option" in process.printed()[1]


def test_another_version_of_one_process(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object]
) -> None:
    """It might cut the work into other blocks."""

    def other() -> None:
        from zckpt.nodes import group

        group.__version__ = "0.0.1"  # type: ignore[attr-defined]

    results = ended(launch(2, "verify", sources["dcp"], preparing={1: other}, **agent))
    assert [item.code for item in results] == [2, 2]
    assert re.search(r"rank 0 was .* zckpt 0\.1.*; rank 1 for zckpt 0\.0\.1", results[1].err)


@pytest.mark.parametrize(("command", "resumes"), [("convert", True), ("verify", False)])
def test_the_next_step(
    command: str,
    resumes: bool,
    sources: dict[str, Path],
    launch: Launch,
    tmp_path: Path,
    waiting: Callable[[], None],
) -> None:
    """Only a command that writes has --resume."""
    words = [command, sources["dcp"], *([tmp_path / "out"] if command == "convert" else [])]
    preparing = {0: waiting, 1: waiting}
    processes = launch(2, *words, *SMALL, preparing=preparing, ZCKPT_TIMEOUT=2)
    until((tmp_path / "reads-1").exists)
    processes[1].send(signal.SIGKILL)
    processes[1].wait()
    (tmp_path / "go").touch()
    result = processes[0].wait()
    assert "has not answered" in result.err
    assert ("--resume" in result.err) is resumes


# -- variables with impossible values


@pytest.mark.parametrize(
    ("text", "seconds"), [("", TIMEOUT), ("1", 1.0), ("600", 600.0), ("1e6", 1e6)]
)
def test_timeouts(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCKPT_TIMEOUT", text)
    assert Group(Launched(0, 2, "srun"), ["verify"], None).timeout == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e10", "0.5", "x"])
def test_impossible_timeouts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCKPT_TIMEOUT", text)
    with pytest.raises(WrongOption, match=f"ZCKPT_TIMEOUT is {re.escape(text)}, which is not"):
        Group(Launched(0, 2, "srun"), ["verify"], None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("port", ["", "0", "65536", "99999", "-1", "x"])
def test_impossible_ports(rank: int, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(WrongOption, match=r"MASTER_PORT is .*, which is not a port"):
        meet(Launched(rank, 2, "torchrun"), None, 1)


@pytest.mark.parametrize("name", ["x" * 70 + ".example", "no..host"])
def test_impossible_hosts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", name)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ProcessLost, match=r"cannot be reached: .* is not the name of a host"):
        meet(Launched(1, 2, "torchrun"), None, 1)


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(WrongOption, match="MASTER_ADDR does not say"):
        meet(Launched(1, 2, "torchrun"), None, 1)


def test_a_port_that_is_taken(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object]
) -> None:
    """Rank 0 says it in one sentence; torch's own stack is not printed."""
    port = agent["MASTER_PORT"]
    (process,) = launch(2, "verify", sources["dcp"], ranks=range(1), MASTER_PORT=port)
    result = process.wait()
    assert result.code == 1
    assert result.err.startswith(f"Error: rank 0 at localhost:{port} cannot be reached: ")
    assert result.err.count("\n") == 2


# -- an interrupt of a process that waits for rank 0


@pytest.mark.parametrize("waits_for", ["comes", "received"])
def test_an_interrupt_while_rank_0_begins(waits_for: str) -> None:
    """Rank 0 may have begun the target, so that the message must be how to continue it."""

    class Interrupting:
        rank = 1

        def comes(self, key: str) -> bool:
            return bool(waits_for == "received" or interrupt())

        def received(self, key: str) -> bytes:
            raise KeyboardInterrupt(signal.SIGTERM)

    def interrupt() -> bool:
        raise KeyboardInterrupt(signal.SIGTERM)

    group: Any = Interrupting()
    with pytest.raises(Interrupted) as raised:
        conversion.take_part(group, "source", "target", COPYING)
    assert raised.value.args == (signal.SIGTERM,)
