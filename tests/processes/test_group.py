"""Who takes part in a command: each rank once, all for the same command, one command at a time."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zckpt
from zckpt.core.passes import pooling
from zckpt.core.passes.pieces import ElementReader
from zckpt.errors import ProcessLost, WrongOption
from zckpt.processes import group as groups
from zckpt.processes import sharing
from zckpt.processes.group import Group
from zckpt.processes.launcher import Launch as Launched

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
    """The store outlives them; the same command twice shares nothing with its first run."""
    out = tmp_path / "out"
    done(launch(2, "convert", sources["zero-1"], out, *SMALL, **agent))
    for _ in range(2):
        assert "is consistent" in done(launch(2, "verify", out, *SMALL, **agent)).out
    assert [item.code for item in ended(launch(2, "convert", out, out, **agent))] == [2, 2]
    done(launch(2, "convert", out, tmp_path / "again", *SMALL, **agent))
    assert files(tmp_path / "again") == files(out)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_store_of_an_earlier_command(
    launcher: str, sources: dict[str, Path], launch: Launch, tmp_path: Path
) -> None:
    """Rank 0 hosts it until the slowest process has left; the others may begin the next one."""

    def leaves_late() -> None:
        leave = Group.__exit__

        def late(self: Group, *error: Any) -> None:
            (tmp_path / "ends").touch()
            until((tmp_path / "next").exists)
            time.sleep(0.3)
            leave(self, *error)

        Group.__exit__ = late  # type: ignore[method-assign, assignment]

    def leaves_early() -> None:
        groups.LEAVING = 0.5

    more: dict[str, Any] = {"launcher": launcher, "MASTER_PORT": free_port()}
    old = launch(3, "verify", sources["dcp"], preparing={1: leaves_early, 2: leaves_late}, **more)
    until((tmp_path / "ends").exists)
    assert old[1].wait().code == 0
    words = ("verify", sources["dcp"], "--tensors", "*")
    early = launch(3, *words, ranks=range(1, 2), **more)
    (tmp_path / "next").touch()
    done([old[0], old[2]])
    first = launch(3, *words, ranks=range(1), **more)
    done([*first, *early, *launch(3, *words, ranks=range(2, 3), **more)])


# -- what processes that were started again go on with


def begun(
    launch: Launch, tmp_path: Path, words: tuple[object, ...], more: dict[str, object]
) -> list[Process]:
    """Two processes in the middle of a conversion."""

    def wait() -> None:
        stop_at_second_portion(tmp_path / "go")

    processes = launch(2, *words, preparing={0: wait, 1: wait}, **more)
    wait_for_journals(tmp_path / "out.partial", 2)
    return processes


@pytest.mark.parametrize("count", [0, 1])
def test_restarted_processes_continue(
    count: int, sources: dict[str, Path], tmp_path: Path, launch: Launch, agent: dict[str, object]
) -> None:
    """What this launch has begun, or completed. The agents of torchrun count restarts apart."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    for process in begun(launch, tmp_path, words, agent):
        process.send(signal.SIGKILL)
        process.wait()
    early = launch(2, *words, ranks=range(1, 2), **agent, TORCHELASTIC_RESTART_COUNT=count)
    time.sleep(0.3)  # until rank 0 starts again, only the group is there that was killed
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


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("command", ["verify", "convert"])
def test_a_rank_that_is_started_again_alone(
    command: str,
    is_killed: bool,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    agent: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second process takes nothing, and rank 0 does not wait for it: all end with an error."""

    def waiting() -> None:
        read = ElementReader.read

        def wait(self: ElementReader, *rest: Any) -> Any:
            rank = os.environ["RANK"]
            (tmp_path / f"reads-{rank}").touch()
            until((tmp_path / ("go" if rank == "1" or is_killed else "reads-1")).exists)
            return read(self, *rest)

        ElementReader.read = wait  # type: ignore[method-assign]

    monkeypatch.setattr(pooling, "BLOCK", 1 << 20)
    words = (command, sources["zero-3"], *SMALL)
    words += (tmp_path / "out",) if command == "convert" else ()
    processes = launch(2, *words, preparing={0: waiting, 1: waiting}, **agent)
    until((tmp_path / "reads-1").exists)
    if is_killed:
        processes[1].send(signal.SIGKILL)
        processes[1].wait()
    (second,) = launch(2, *words, ranks=range(1, 2), **agent)
    if is_killed:
        (tmp_path / "go").touch()
    first = processes[0].wait()
    assert first.code == 1
    assert "rank 1 was started again" in first.err
    assert not first.out
    assert not second.has_ended()  # a launcher ends it
    if not is_killed:
        (tmp_path / "go").touch()
        assert processes[1].wait() == Result(1, "", "")


def test_a_rank_that_is_started_twice(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object]
) -> None:
    """While another rank has not started yet, and rank 0 waits for it."""
    words = ("verify", sources["dcp"])
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        "zckpt",
        dist.TCPStore("localhost", int(str(agent["MASTER_PORT"]))),  # type: ignore[attr-defined]
    )
    processes = launch(3, *words, ranks=range(2), **agent)
    word = store.get("arrived/1").decode()  # waits for it
    name = store.get(f"led/{word}").decode()
    until(lambda: store.check([f"{name}/here/1"]))
    (second,) = launch(3, *words, ranks=range(1, 2), **agent)
    result = second.wait()
    assert result.code == 2
    assert "rank 1 was started twice" in result.err
    assert not any(process.has_ended() for process in processes)  # their launcher ends them


class Counting(sharing.Processes):
    """Rank 0 of two, whose counter others have raised `lost` times more than they say."""

    lost = 0

    def gather(self, value: Any) -> Iterator[tuple[int, Any]]:
        self.store.add(f"{self._name}{self._asked}", self.lost)
        return super().gather(value)


@pytest.mark.parametrize("lost", [0, 2])
def test_blocks_of_which_nobody_hears_again(
    lost: int, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that nobody has read have no differences: they must not look as if equal."""
    monkeypatch.setattr(Counting, "lost", lost)
    with Counting(Launched(0, 1)) as processes:
        if not lost:
            assert zckpt.verify(example, sharing=processes)["equal"]
            return
        with pytest.raises(
            ProcessLost, match=r"3 blocks of tasks were assigned .* but 1 came back"
        ):
            zckpt.verify(example, sharing=processes)


# -- processes that were started for something else


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "zero-1"), "rank 0 has other files, options, or another version"),
        (("verify", "zero-3", "--against", "dcp"), "rank 0 has other files, options"),
        (("verify", "zero-3", "--tensors", "*/exp_avg"), "rank 0 has other files, options"),
        (("convert", "zero-3", "out"), "rank 0 has another command"),
    ],
)
def test_other_arguments_of_one_process(
    words: tuple[str, ...],
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
    results = ended([*first, *launch(2, *paths, ranks=range(1, 2), **agent)])
    assert [item.code for item in results] == [2, 2]
    assert "rank 0 and rank 1 were not started with the same command" in results[1].err
    assert message in results[1].err
    assert with_errors(results) == [1]
    assert not results[0].out


def test_a_pass_beside_a_conversion(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object], tmp_path: Path
) -> None:
    first = launch(2, "convert", sources["dcp"], tmp_path / "out", ranks=range(1), **agent)
    results = ended([*first, *launch(2, "verify", sources["dcp"], ranks=range(1, 2), **agent)])
    assert [item.code for item in results] == [2, 2]
    assert "rank 0 carries out another command" in results[1].err


@pytest.mark.parametrize("other", ["target", "folder", "source", "options"])
def test_another_conversion_of_one_process(
    other: str, sources: dict[str, Path], launch: Launch, agent: dict[str, object], tmp_path: Path
) -> None:
    def elsewhere() -> None:
        os.chdir("elsewhere")

    (tmp_path / "elsewhere").mkdir()
    words = [sources["dcp"], "a"]
    second, preparing, says = {
        "target": ([words[0], "b"], None, "rank 0 has another target"),
        "folder": (words, elsewhere, "rank 0 has another target"),
        "source": ([sources["zero-1"], "a"], None, "rank 0 has another source"),
        "options": ([*words, "--dtype", "bf16"], None, "rank 0 has other options"),
    }[other]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        first = launch(2, "convert", *words, ranks=range(1), **agent)
        prepared = {1: preparing} if preparing else {}
        last = launch(2, "convert", *second, ranks=range(1, 2), preparing=prepared, **agent)
        results = ended([*first, *last])
    assert results[1].code == 2
    assert says in results[1].err
    assert with_errors(results) == [1]
    names = {path.name for path in tmp_path.iterdir()} - {"a.partial"}
    assert names == {"elsewhere", "output"}
    assert not any((tmp_path / "elsewhere").iterdir())


def test_another_version_of_one_process(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object]
) -> None:
    """It might cut the work into other blocks."""

    def other() -> None:
        sharing.__version__ = "0.0.1"  # type: ignore[attr-defined]

    results = ended(launch(2, "verify", sources["dcp"], preparing={1: other}, **agent))
    assert [item.code for item in results] == [2, 2]
    assert "or another version" in results[1].err


# -- waiting


def test_a_store_that_does_not_answer(
    sources: dict[str, Path], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has the port: the process says for what it waits, and a signal ends it."""
    monkeypatch.setattr(groups, "PATIENCE", 0.3)
    with socket.create_server(("localhost", 0)) as silent:
        port = silent.getsockname()[1]
        (process,) = launch(2, "verify", sources["dcp"], ranks=range(1, 2), MASTER_PORT=port)
        until(lambda: f"rank 1 waits for the store at localhost:{port}" in process.printed()[1])
        process.send(signal.SIGTERM)
        assert process.wait(5).code == 143


def test_a_port_that_is_taken(
    sources: dict[str, Path], launch: Launch, agent: dict[str, object]
) -> None:
    """Rank 0 says it in one sentence; torch's own stack is not printed."""
    port = agent["MASTER_PORT"]
    (process,) = launch(2, "verify", sources["dcp"], ranks=range(1), MASTER_PORT=port)
    result = process.wait()
    assert result.code == 1
    assert result.err.startswith(f"Error: rank 0 cannot open a store at localhost:{port}: ")
    assert "--single" in result.err
    assert result.err.count("\n") == 2


def test_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongOption, match="MASTER_ADDR and MASTER_PORT do not say"):
        Group(Launched(1, 2)).__enter__()


# -- from Python


def test_a_group_of_one_process(sources: dict[str, Path], tmp_path: Path) -> None:
    with zckpt.group() as processes:
        assert (processes.rank, processes.size) == (0, 1)
        assert processes.share({"a": [1]}) == {"a": [1]}
        assert [*processes.gather("x")] == []
        count = processes.counter()
        assert [count(), count()] == [0, 1]
        report = zckpt.convert(
            sources["zero-1"], tmp_path / "out", sharing=processes, copying=COPYING
        )
        assert report["tensors"]
        assert zckpt.verify(tmp_path / "out", sharing=processes)["equal"]
    zckpt.convert(sources["zero-1"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_progress_counts_what_others_write(sources: dict[str, Path], tmp_path: Path) -> None:
    """The others write half of the regions; rank 0 counts as many bytes as a single process."""

    class Half(sharing.Processes):
        """Every second number of a counter goes to another process, which writes nothing."""

        def counter(self) -> Callable[[], int]:
            count = super().counter()
            return lambda: count() + 1 and count()

    counted: list[int] = []
    single: list[int] = []
    path = tmp_path / "single"
    zckpt.convert(sources["zero-3"], path, copying=COPYING, begin=lambda _: single.append)
    with (
        pytest.raises(ProcessLost, match=r"parts of .* are missing"),
        Half(Launched(0, 1)) as processes,
    ):
        zckpt.convert(
            sources["zero-3"],
            tmp_path / "out",
            sharing=processes,
            copying=COPYING,
            begin=lambda _: counted.append,
        )
    assert sum(counted) == sum(single)
    assert len(counted) > 4


def test_what_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """After some time."""
    process = Group(Launched(0, 3))
    process._patience()("rank 0 waits for rank 1")
    assert not capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PATIENCE", -1.0)
        patience = process._patience()
    for _ in range(2):
        patience("rank 0 waits for rank 1")
    said = "rank 0 waits for rank 1; if this process .* add --single\n"
    assert re.fullmatch(said, capsys.readouterr().err)
