"""`verify` of several processes reports what one process reports; rank 0 alone does the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import proving
from zckpt.core.passes import pooling
from zckpt.core.passes.pieces import ElementReader
from zckpt.core.passes.pooling import claimed
from zckpt.core.passes.streaming import CHUNK
from zckpt.errors import IncompleteCheckpoint

from ..conftest import Result
from .conftest import until
from .test_conversion import SMALL, Launch, done, ended

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "BLOCK", 1 << 20)


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "seconds"}


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize(
    "paths", [["zero-3"], ["universal"], ["dcp"], ["zero-1", "--against", "dcp"]]
)
def test_the_report_of_one_process(
    paths: list[str],
    launcher: str,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    zckpt: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["verify", *(sources.get(name, name) for name in paths), *SMALL, "--json"]
    single = zckpt(*words)
    shared = done(launch(3, *words, launcher=launcher))
    assert without_times(shared.document) == without_times(single.document)
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun"])
@pytest.mark.parametrize(
    "words", [("stats", "zero-3"), ("diff", "zero-3", "dcp"), ("report", "zero-3")]
)
def test_rank_0_alone_gives_the_answer(
    words: tuple[str, ...],
    launcher: str,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    zckpt: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They need no place to meet. The others end at once, and --single asks each of them."""
    monkeypatch.chdir(tmp_path)
    command = [*(sources.get(word, word) for word in words), "--json"]
    more: dict[str, Any] = {"launcher": launcher, "MASTER_PORT": ""}

    def without_reading() -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("it was read")

        ElementReader.read = refuse  # type: ignore[method-assign]

    (other,) = launch(2, *command, ranks=range(1, 2), preparing={1: without_reading}, **more)
    assert other.wait() == Result(0, "", "")
    (first,) = launch(2, *command, ranks=range(1), **more)
    (single,) = launch(2, *command, "--single", ranks=range(1, 2), **more)
    expected = without_times(zckpt(*command).document)
    assert [without_times(each.wait().document) for each in (first, single)] == [expected] * 2


@pytest.fixture
def damaged(sources: dict[str, Path], tmp_path: Path) -> Path:
    """A universal checkpoint with a flipped bit in each file."""
    path = Path(shutil.copytree(sources["universal"], tmp_path / "damaged"))
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    return path


def test_what_any_process_finds_is_reported(
    damaged: Path, launch: Launch, zckpt: Command, sources: dict[str, Path]
) -> None:
    words = ("verify", damaged, *SMALL, "--json")
    results = ended(launch(4, *words))
    assert [result.code for result in results] == [3, 0, 0, 0]
    single = zckpt(*words)
    for key in ("problems", "differences"):
        assert sorted(map(str, results[0].document[key])) == sorted(map(str, single.document[key]))
    words = ("verify", damaged, "--against", sources["universal"], *SMALL, "--json")
    first = ended(launch(2, *words))[0].document
    assert first["differences"] == zckpt(*words).document["differences"]


def test_a_proof_of_several_processes(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    done(launch(2, "verify", sources["zero-3"], *SMALL, "--save-proof", tmp_path / "proof"))
    assert zckpt.verify(sources["dcp"], tmp_path / "proof")["equal"]


def test_all_processes_read(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    """Every process waits in its first read until all have come there."""

    def noting() -> None:
        read = ElementReader.read

        def noted(self: ElementReader, *rest: Any) -> Any:
            (tmp_path / f"read-{os.environ['RANK']}").touch()
            until(lambda: len(list(tmp_path.glob("read-*"))) == 3)
            return read(self, *rest)

        ElementReader.read = noted  # type: ignore[method-assign]

    preparing = dict.fromkeys(range(3), noting)
    done(launch(3, "verify", sources["zero-3"], *SMALL, preparing=preparing))
    assert len(list(tmp_path.glob("read-*"))) == 3


def test_an_error_of_one_process(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    def refusing() -> None:
        from zckpt.core.storage import fileio

        def refuse(*_: object) -> None:
            (tmp_path / "go").touch()
            raise OSError(5, "Input/output error", "a.pt")

        fileio.Reader.read = refuse  # type: ignore[method-assign, assignment]

    def waiting() -> None:
        read = ElementReader.read

        def wait(self: ElementReader, *rest: Any) -> Any:
            until((tmp_path / "go").exists)
            return read(self, *rest)

        ElementReader.read = wait  # type: ignore[method-assign]

    preparing = {0: waiting, 1: refusing}
    results = ended(launch(2, "verify", sources["dcp"], *SMALL, preparing=preparing))
    assert [result.code for result in results] == [1, 1]
    assert "a.pt: Input/output error" in results[1].err
    assert not results[0].err


def test_a_checkpoint_that_lacks_a_file(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """All processes find it while they read; rank 0 reports it as one process does."""
    path = Path(shutil.copytree(sources["zero-3"], tmp_path / "lacking"))
    next(path.rglob("*optim_states.pt")).unlink()
    results = ended(launch(3, "verify", path, "--json"))
    assert [result.code for result in results] == [3, 0, 0]
    assert results[0].document["problems"][0]["error"] == "IncompleteCheckpoint"
    assert not "".join(result.out + result.err for result in results[1:])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_node_lacks(rank: int, sources: dict[str, Path], launch: Launch) -> None:
    """Rank 0 reports it if it is its own; else no process waits for the one that cannot read."""

    def lacking() -> None:
        def read(*_: object, **__: object) -> None:
            raise IncompleteCheckpoint("missing-file", "a.pt is missing")

        proving.read = read  # type: ignore[assignment]

    first, second = ended(launch(2, "verify", sources["dcp"], preparing={rank: lacking}))
    assert second.code == 2
    if rank:
        assert first.code == 2
        assert "rank 0 has not this problem: a.pt is missing" in second.err
        assert not first.err
    else:
        assert first.code == 3
        assert "rank 0 carries out another command: 'a problem'" in second.err


def test_processes_that_cannot_meet_do_not_share(sources: dict[str, Path], launch: Launch) -> None:
    words = ("verify", sources["universal"])
    (process,) = launch(2, *words, launcher="srun", ranks=range(1), MASTER_PORT="")
    result = process.wait()
    assert result.code == 2
    assert "MASTER_ADDR and MASTER_PORT" in result.err
    assert "--single" in result.err
    (process,) = launch(
        2, *words, "--single", "-q", launcher="srun", ranks=range(1), MASTER_PORT=""
    )
    assert process.wait().code == 0


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_blocks_are_claimed_once(processes: int) -> None:
    """Whoever is faster, every task is carried out by one process; progress counts all of them."""
    tasks = [(number, 1 + number % 7 * 100_000) for number in range(200)]
    counter = iter(range(10**6))
    of_others: list[list[int]] = [[] for _ in range(processes)]
    running = [
        claimed(tasks, lambda task: task[1], lambda: next(counter), of_others[number].append)
        for number in range(processes)
    ]
    seen: list[int] = []
    own = [0] * processes
    for place in range(10**4):
        for number in [place % processes] * (1 + place % 3):
            for task in [next(running[number], None)]:
                if task:
                    seen.append(task[0])
                    own[number] += task[1]
    assert sorted(seen) == list(range(200))
    whole = sum(size for _, size in tasks)
    assert [mine + sum(other) for mine, other in zip(own, of_others, strict=True)] == (
        [whole] * processes
    )
    assert CHUNK
