"""A process that dies, hangs or fails ends all: in a target that is whole, or in one error."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.copying.filling import TargetFile
from zckpt.processes import group

from ..conftest import EXAMPLE, ROOT, Result
from ..test_resume import MIB, files
from .conftest import Process, stop_at_second_portion, until
from .test_conversion import COPYING, ONE_THREAD, SMALL, Launch, done, ended


def wait_for_journals(folder: Path, processes: int = 1) -> None:
    """Waits until the journal of every process has a region."""

    def are_there() -> bool:
        journals = [path.read_bytes() for path in folder.glob("journal*")]
        return sum(data.count(b"\n") > 1 for data in journals) >= processes

    until(are_there)


def with_errors(results: list[Result]) -> list[int]:
    """The ranks that have printed an error."""
    return [rank for rank, result in enumerate(results) if "Error: " in result.err]


@pytest.fixture
def begun(
    sources: dict[str, Path], tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Process], tuple[object, ...]]:
    """Three processes in the middle of a conversion, and its arguments.

    Each has written one portion; they go on when there is a file `go`.
    """
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    preparing = dict.fromkeys(range(3), lambda: stop_at_second_portion(tmp_path / "go"))
    with monkeypatch.context() as patch:
        patch.setattr(group, "PATIENCE", 0.5)
        patch.setattr(group, "LEAVING", 3.0)
        processes = launch(3, *words, preparing=preparing)
    wait_for_journals(tmp_path / "out.partial", 3)
    return processes, words


def test_a_killed_process(
    begun: tuple[list[Process], tuple[object, ...]],
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
) -> None:
    """Rank 0 says for whom it waits, until a launcher ends it; --resume completes the target."""
    processes, words = begun
    processes[2].send(signal.SIGKILL)
    processes[2].wait()
    (tmp_path / "go").touch()
    until(lambda: "rank 0 waits for rank 2" in processes[0].printed()[1])
    until(lambda: "rank 1 waits for rank 0" in processes[1].printed()[1])
    for process in processes[:2]:
        process.send(signal.SIGTERM)
    results = ended(processes[:2])
    assert [result.code for result in results] == [143, 143]
    (rank,) = with_errors(results)
    assert "continue with: zckpt convert" in results[rank].err
    assert not (tmp_path / "out").exists()
    report = done(launch(2, *words, "--resume"))
    assert "an earlier run had written" in report.out
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_a_killed_process_that_hosts_the_store(
    begun: tuple[list[Process], tuple[object, ...]], tmp_path: Path, launch: Launch
) -> None:
    processes, words = begun
    processes[0].send(signal.SIGKILL)
    processes[0].wait()
    (tmp_path / "go").touch()
    results = ended(processes[1:])
    assert [result.code for result in results] == [1, 1]
    for result in results:
        assert "Error: the store of this launch is gone: " in result.err
        assert "--resume" in result.err
    done(launch(2, *words, "--resume"))


def test_a_stopped_process_goes_on(
    begun: tuple[list[Process], tuple[object, ...]], sources: dict[str, Path], tmp_path: Path
) -> None:
    """However long it was stopped: nobody gives it up."""
    processes, _ = begun
    processes[2].send(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: "rank 0 waits for rank 2" in processes[0].printed()[1])
    processes[2].send(signal.SIGCONT)
    results = ended(processes)
    assert [result.code for result in results] == [0, 0, 0]
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_an_interrupt_of_all(
    begun: tuple[list[Process], tuple[object, ...]], tmp_path: Path, launch: Launch
) -> None:
    """As a launcher ends all: one process says how to go on."""
    processes, words = begun
    for process in processes:
        process.send(signal.SIGTERM)
    (tmp_path / "go").touch()
    results = ended(processes)
    assert [result.code for result in results] == [143] * 3
    (rank,) = with_errors(results)
    assert "Hint: continue with: zckpt convert" in results[rank].err
    done(launch(2, *words, "--resume"))


def test_one_process_continues_what_several_have_begun(
    begun: tuple[list[Process], tuple[object, ...]],
    tmp_path: Path,
    zckpt: Callable[..., Result],
) -> None:
    processes, words = begun
    for process in processes:
        process.send(signal.SIGKILL)
        process.wait()
    ended = zckpt(*words, "--resume")
    assert "an earlier run had written" in ended.out
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(rank: int, sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    """The process that finds it says so, and what all have written is kept."""

    def limit() -> None:
        opened = TargetFile.open

        def tell(self: TargetFile, *rest: Any) -> None:
            (tmp_path / "go").touch()
            opened(self, *rest)

        TargetFile.open = tell  # type: ignore[method-assign]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 4, MIB // 4))  # less than a portion

    def others() -> None:
        stop_at_second_portion(tmp_path / "go")

    preparing = {number: limit if number == rank else others for number in range(3)}
    results = ended(
        launch(3, "convert", sources["zero-3"], tmp_path / "out", *SMALL, preparing=preparing)
    )
    assert [result.code for result in results] == [1] * 3
    assert with_errors(results) == [rank]
    assert "is full" in results[rank].err
    if rank:  # rank 0 fails before others write
        assert f"{tmp_path / 'out.partial'} is still there: add --resume" in results[rank].err
    assert (tmp_path / "out.partial").exists() == bool(rank)
    done(launch(3, "convert", sources["zero-3"], tmp_path / "out", *SMALL, "--resume"))


def test_a_source_that_one_node_cannot_read(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def prepare() -> None:
        from zckpt.core.storage import fileio

        def refuse(*_: object) -> None:
            (tmp_path / "go").touch()
            raise OSError(errno.EIO, os.strerror(errno.EIO), "a.pt")

        fileio.Reader.read = refuse  # type: ignore[method-assign, assignment]

    preparing = {0: lambda: stop_at_second_portion(tmp_path / "go"), 1: prepare}
    results = ended(
        launch(2, "convert", sources["zero-3"], tmp_path / "out", *SMALL, preparing=preparing)
    )
    assert [result.code for result in results] == [1, 1]
    assert with_errors(results) == [1]
    assert "a.pt: Input/output error" in results[1].err
    done(launch(2, "convert", sources["zero-3"], tmp_path / "out", *SMALL, "--resume"))


@pytest.mark.parametrize("missing", [0, 2])
def test_a_process_that_does_not_start(
    missing: int,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others say whom they miss, and how a process runs alone; a signal ends them."""
    monkeypatch.setattr(group, "PATIENCE", 0.5)
    ranks = range(1, 3) if missing == 0 else range(2)
    processes = launch(3, "convert", sources["dcp"], tmp_path / "out", *SMALL, ranks=ranks)
    says = "rank 1 waits for the store at localhost:" if missing == 0 else "rank 0 waits for rank 2"
    speaker = processes[0].printed
    until(lambda: says in speaker()[1])
    assert "if this process should run alone, end it and add --single" in speaker()[1]
    for process in processes:
        process.send(signal.SIGTERM)
    assert {result.code for result in ended(processes)} == {143}
    assert not list(tmp_path.glob("out*"))[1:]


@pytest.mark.parametrize("has_address", [False, True])
def test_without_torch(has_address: bool, tmp_path: Path) -> None:
    """A missing extra is one sentence that names the way without it; parts need none."""
    environment = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    if has_address:
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch')")
        command = [sys.executable, "-m", "zckpt", "convert", EXAMPLE, tmp_path / "out"]
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        ended = subprocess.run(command, capture_output=True, text=True)
    if not has_address:
        assert ended.returncode == 0
        assert "part 1/4 is written" in ended.stdout
        return
    assert ended.returncode == 1
    assert "4 processes need torch" in ended.stderr
    assert "pip install 'zckpt[torch]'" in ended.stderr
    assert "--part K/4" in ended.stderr


def test_verify_without_torch_has_no_parts(tmp_path: Path) -> None:
    """Its hint names --single, which works."""
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch')")
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "zckpt", "verify", str(EXAMPLE)]
    run = partial(subprocess.run, env=os.environ | environment, capture_output=True, text=True)
    ended = run(command)
    assert ended.returncode == 1
    assert "--single" in ended.stderr
    assert "--part" not in ended.stderr
    assert run([*command, "--single"]).returncode == 0
