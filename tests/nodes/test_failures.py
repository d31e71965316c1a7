"""A process that dies, hangs or fails ends all: in a target that is whole, or in one error."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.copying.filling import TargetFile

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
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> tuple[list[Process], tuple[object, ...]]:
    """Three processes in the middle of a conversion, and its arguments.

    Each has written one portion; they go on when there is a file `go`.
    """
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    preparing = dict.fromkeys(range(3), lambda: stop_at_second_portion(tmp_path / "go"))
    processes = launch(3, *words, preparing=preparing, ZCKPT_TIMEOUT=4)
    wait_for_journals(tmp_path / "out.partial", 3)
    return processes, words


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.engines), 2])
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGSTOP, marks=pytest.mark.engines), signal.SIGKILL]
)
def test_a_process_that_does_not_answer(
    how: signal.Signals,
    rank: int,
    begun: tuple[list[Process], tuple[object, ...]],
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
) -> None:
    """One other process names it. When it is ended, --resume completes the target."""
    processes, words = begun
    processes[rank].send(how)
    (tmp_path / "go").touch()
    others = [process for process in processes if process is not processes[rank]]
    results = ended(others)
    assert [result.code for result in results] == [1, 1]
    errors = [result.err for result in results if "Error: " in result.err]
    if rank:
        (error,) = errors
        assert f"rank {rank} (" in error
        assert f"process {processes[rank].number}) has not answered for 4 s" in error
    else:  # which hosts the store here, so that the others cannot agree who says it
        assert all("connection to rank 0" in error for error in errors), errors
    assert all("--resume" in error for error in errors)
    assert not (tmp_path / "out").exists()
    if how == signal.SIGSTOP:
        refused = ended(launch(2, *words, "--resume"))
        assert {result.code for result in refused} == {1}
        assert "another run, which is writing there now" in refused[0].err
    processes[rank].send(signal.SIGKILL)
    processes[rank].wait()
    report = done(launch(2, *words, "--resume"))
    assert "an earlier run had written" in report.out
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


@pytest.mark.engines
def test_a_process_that_wakes_up_writes_nothing(
    begun: tuple[list[Process], tuple[object, ...]], tmp_path: Path
) -> None:
    processes, _ = begun
    processes[2].send(signal.SIGSTOP)
    (tmp_path / "go").touch()
    ended(processes[:2])
    before = files(tmp_path / "out.partial")
    processes[2].send(signal.SIGCONT)
    result = processes[2].wait()
    assert result.code == 1
    after = files(tmp_path / "out.partial")
    assert [name for name in before if before[name] != after[name]] in ([], ["journal-0002"])


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
    """The process that finds it says so, and nothing is left behind."""

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
    assert {path.name for path in tmp_path.iterdir()} - {"go"} == {"output"}


def test_a_source_that_one_node_cannot_read(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def prepare() -> None:
        from zckpt.core import fileio

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
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("srun", marks=pytest.mark.engines)])
@pytest.mark.parametrize("missing", [0, pytest.param(2, marks=pytest.mark.engines)])
def test_a_process_that_does_not_start(
    missing: int, launcher: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    ranks = range(1, 3) if missing == 0 else range(2)
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    results = ended(launch(3, *words, ranks=ranks, ZCKPT_TIMEOUT=2, launcher=launcher))
    assert {result.code for result in results} == {1}
    assert not (tmp_path / "out").exists()
    if missing:
        assert with_errors(results) == [0]
        assert "did not start within 2 s: rank 2" in results[0].err
    else:
        assert "rank 0" in results[0].err


def test_without_torch(tmp_path: Path) -> None:
    """A missing extra is one sentence that names the way without it."""
    environment = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch')")
        command = [sys.executable, "-m", "zckpt", "convert", EXAMPLE, tmp_path / "out"]
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "4 processes need torch" in ended.stderr
    assert "--part K/4" in ended.stderr
