"""Commands whose target is on a filesystem without locks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.copying.sharing import Part
from zckpt.errors import WrongOption
from zckpt.processes.sharing import Processes

from ..conftest import Result
from ..test_resume import files
from .conftest import Process, Start, stop_at_second_portion, until
from .test_conversion import COPYING, ONE_THREAD, SMALL, Launch, done, ended

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def locks(no_locks: None) -> None:
    """There are none in all tests of this module."""


def journals(folder: Path) -> list[Path]:
    return [*folder.glob("out.*.partial/journal")]


def test_one_of_many_commands_writes_the_target(
    sources: dict[str, Path], tmp_path: Path, start: Start
) -> None:
    """The others end with TargetExists, and leave nothing."""
    words = ("convert", sources["dcp"], tmp_path / "out", *ONE_THREAD, "--json")
    wait = {"environment": {}, "prepare": lambda: stop_at_second_portion(tmp_path / "go")}
    jobs = [start(*words, **wait) for _ in range(8)]
    until(lambda: len(journals(tmp_path)) == len(jobs))
    (tmp_path / "go").touch()
    results = [job.wait() for job in jobs]
    assert sorted(result.code for result in results) == [0] + [1] * 7, results
    for result in results:
        assert result.code == 0 or result.document["error"] == "TargetExists"
    package.convert(sources["dcp"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "single", "output", "go"}


@pytest.mark.parametrize("option", [["--part", "1/2"], ["--resume"]])
@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_needs_locks_is_refused(
    command: str, option: list[str], sources: dict[str, Path], tmp_path: Path, zckpt: Command
) -> None:
    result = zckpt(command, sources["universal"], tmp_path / "new" / "out", *option)
    assert result.code == 2
    assert f"{option[0]} needs locks" in result.err
    assert f"{tmp_path / 'new' / 'out'} has none" in result.err
    assert not [*tmp_path.iterdir()]


def test_what_needs_locks_is_refused_in_python(sources: dict[str, Path], tmp_path: Path) -> None:
    words: list[dict[str, Any]] = [{"resume": True}, {"sharing": Part(1, 2)}]
    for more in words:
        with pytest.raises(WrongOption, match="needs locks"):
            package.convert(sources["dcp"], tmp_path / "out", **more)
    assert not [*tmp_path.iterdir()]


def test_checkpoints_of_a_run_are_refused(example: Path, tmp_path: Path, zckpt: Command) -> None:
    words = ("reshard", example, tmp_path / "out", "--dp", 2, "--checkpoints", "all")
    assert "--resume needs locks" in zckpt(*words, "--resume").err


def test_processes_that_cannot_meet_are_refused(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    for result in ended(launch(2, *words, launcher="srun", MASTER_PORT="")):
        assert result.code == 2
        assert "--part needs locks" in result.err


def test_a_complete_target_needs_no_locks(
    sources: dict[str, Path], tmp_path: Path, zckpt: Command
) -> None:
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    assert zckpt(*words).code == 0
    assert "complete already" in zckpt(*words, "--resume").out
    assert zckpt(*words).code == 1


def test_what_a_run_with_locks_has_begun(
    sources: dict[str, Path], tmp_path: Path, start: Start, zckpt: Command
) -> None:
    """It is left alone, and named."""
    partial = tmp_path / "out.partial"
    (partial / "out").mkdir(parents=True)
    (partial / "journal").write_text("")
    result = zckpt("convert", sources["dcp"], tmp_path / "out", *SMALL)
    assert result.code == 0
    assert f"rm -r {partial}" in result.err
    assert partial.exists()


def test_all_processes_write_into_the_directory_of_rank_0(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    wait = dict.fromkeys(range(3), lambda: stop_at_second_portion(tmp_path / "go"))
    processes = launch(3, *words, preparing=wait)
    until(lambda: len([*tmp_path.glob("out.*.partial/journal-*")]) == 2)
    assert len(journals(tmp_path)) == 1
    (tmp_path / "go").touch()
    done(processes)
    package.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")
    assert not [*tmp_path.glob("*.partial")]


def test_processes_do_not_go_on(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL, "--resume")
    results = ended(launch(2, *words))
    assert [result.code for result in results] == [2, 2]
    assert sum("--resume needs locks" in result.err for result in results) == 1


def test_restarted_processes_begin_anew(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """Without locks they cannot continue their own run, and nobody has typed --resume."""

    def restarted() -> None:
        Processes.continues = lambda *_: True  # type: ignore[method-assign]

    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    done(launch(2, *words, preparing={0: restarted}))
    assert package.verify(tmp_path / "out", sources["dcp"])["equal"]


def test_two_launches(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    wait = dict.fromkeys(range(2), lambda: stop_at_second_portion(tmp_path / "go"))
    launches: list[list[Process]] = [launch(2, *words, preparing=wait) for _ in range(2)]
    until(lambda: len([*tmp_path.glob("out.*.partial/journal-*")]) == 2)
    (tmp_path / "go").touch()
    codes = [[result.code for result in ended(processes)] for processes in launches]
    assert sorted(codes) == [[0, 0], [1, 1]]
    package.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")
    assert not [*tmp_path.glob("*.partial")]


def test_a_killed_launch_is_not_continued(
    sources: dict[str, Path], tmp_path: Path, launch: Launch, zckpt: Command
) -> None:
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    wait = dict.fromkeys(range(2), lambda: stop_at_second_portion(tmp_path / "go"))
    processes = launch(2, *words, preparing=wait)
    until(lambda: [*tmp_path.glob("out.*.partial/out/*")])
    for process in processes:
        process.send(signal.SIGKILL)
    ended(processes)
    (begun,) = tmp_path.glob("*.partial")
    result = zckpt(*words)
    assert result.code == 0
    assert f"{begun} was removed" in result.err
    assert not [*tmp_path.glob("*.partial")]
