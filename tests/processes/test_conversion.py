"""All processes of a launch write one target, which is the target of a single run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.copying import filling
from zckpt.copying.journal import Journal, Region
from zckpt.core.passes.resources import Copying

from ..conftest import Result
from ..test_resume import files
from .conftest import Process, until

Launch = Callable[..., list[Process]]
SMALL = ("-j", 2, "--memory", "4MiB")  # chunks and regions of 1 MiB
ONE_THREAD = ("-j", 1, "--memory", "2MiB")  # the same
COPYING = Copying(2, 4 << 20)
TARGETS: dict[str, tuple[list[object], dict[str, Any]]] = {
    "universal": ([], {}),
    "bf16": (["--dtype", "bf16"], {"dtype": "bf16"}),
    "zero-2": (
        ["--to", "deepspeed", "--dp", 3, "--stage", 2],
        {"to": "deepspeed", "dp": 3, "stage": 2},
    ),
    "zero-3": (
        ["--to", "deepspeed", "--dp", 2, "--stage", 3],
        {"to": "deepspeed", "dp": 2, "stage": 3},
    ),
    "dcp": (["--to", "dcp", "--dp", 3], {"to": "dcp", "dp": 3}),
    "gathered": (["--to", "gathered"], {"to": "gathered"}),
}


def ended(processes: list[Process]) -> list[Result]:
    return [process.wait() for process in processes]


def done(processes: list[Process]) -> Result:
    """The report of rank 0; the others print nothing."""
    first, *others = ended(processes)
    assert first.code == 0, (first, others)
    assert {(item.code, item.out, item.err) for item in others} == {(0, "", "")}
    return first


@pytest.mark.parametrize(
    ("source", "target", "size"),
    [
        ("universal", "zero-3", 2),
        ("zero-1", "dcp", 3),
        ("zero-3", "universal", 4),
        ("dcp", "universal", 2),
        ("dcp", "bf16", 2),
        ("zero-3", "gathered", 2),
        ("zero-1", "zero-2", 4),
    ],
)
def test_the_target_of_a_single_run(
    source: str, target: str, size: int, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    words, options = TARGETS[target]
    path = sources[source]
    zckpt.convert(path, tmp_path / "single", copying=COPYING, **options)
    report = done(launch(size, "convert", path, tmp_path / "shared", *words, *SMALL, "--json"))
    assert report.document["tensors"]
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "shared", "single"]


def test_all_processes_write(
    sources: dict[str, Path], tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process leaves a line for each portion that it opens, and waits for the others."""
    opened = filling.TargetFile.open

    def noted(self: filling.TargetFile, io: str) -> None:
        with open(tmp_path / "opened", "a") as file:
            file.write(f"{os.environ['RANK']}\n")
        until(lambda: len(set((tmp_path / "opened").read_text().split())) == 3)
        opened(self, io)

    monkeypatch.setattr(filling.TargetFile, "open", noted)
    done(launch(3, "convert", sources["zero-3"], tmp_path / "out", *SMALL))
    ranks = (tmp_path / "opened").read_text().split()
    assert set(ranks) == {"0", "1", "2"}
    assert len(ranks) == 9  # each portion once


def test_files_beside_the_checkpoint_are_shared(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """Its 5 regions are handed out among those of tensors; every process notes some."""
    run = Path(shutil.copytree(sources["zero-3"], tmp_path / "run"))
    (run / "trainer_state.json").write_text('{"global_step": 1}')
    (run / "tokenizer.json").write_bytes(os.urandom(5 << 20))
    zckpt.convert(run, tmp_path / "single", copying=COPYING)
    keep_journals = {rank: kept_journal(tmp_path / f"kept-{rank}") for rank in range(3)}
    done(launch(3, "convert", run, tmp_path / "shared", *ONE_THREAD, preparing=keep_journals))
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    noted = [(tmp_path / f"kept-{rank}").read_text().split() for rank in range(3)]
    assert sum(own.count(".zckpt/siblings/tokenizer.json") for own in noted) == 5


def kept_journal(path: Path) -> Callable[[], None]:
    """A function that makes a process leave the files of the regions that it has noted."""

    def prepare() -> None:
        path.touch()
        add = Journal.add

        def noted(self: Journal, region: Region) -> None:
            with path.open("a") as file:
                file.write(f"{region.file}\n")
            until(lambda: all(each.stat().st_size for each in path.parent.glob("kept-*")))
            add(self, region)

        Journal.add = noted  # type: ignore[method-assign]

    return prepare


@pytest.fixture
def mixed(sources: dict[str, Path], tmp_path: Path) -> Path:
    """Files of ONNX Runtime in mixed precision: all elements of masters are compared."""
    zckpt.convert(
        sources["zero-1"], tmp_path / "ort", to="onnxruntime", dp=2, dialect="l2", dtype="bf16"
    )
    return tmp_path / "ort"


def test_masters_are_compared_by_all(mixed: Path, tmp_path: Path, launch: Launch) -> None:
    zckpt.convert(mixed, tmp_path / "single", copying=COPYING)
    keep_journals = {rank: kept_journal(tmp_path / f"kept-{rank}") for rank in range(3)}
    done(launch(3, "convert", mixed, tmp_path / "shared", *ONE_THREAD, preparing=keep_journals))
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    noted = [(tmp_path / f"kept-{rank}").read_text().split() for rank in range(3)]
    assert sum(own.count("masters/") for own in noted) == 4


@pytest.mark.parametrize("accepted", [False, True])
def test_a_wrong_master_that_any_process_finds(
    accepted: bool, mixed: Path, tmp_path: Path, launch: Launch
) -> None:
    path = mixed / "ORT_checkpoint.ZeRO.1.1.ort.pt"
    saved = torch.load(path)
    saved["model"]["fc.weight"][200, 5] += 0.25
    torch.save(saved, path)
    words = ["convert", mixed, tmp_path / "out", *SMALL, "--json"]
    results = ended(launch(3, *words, *(["--accept-weights"] if accepted else [])))
    assert {item.code for item in results} == {0 if accepted else 1}
    assert (tmp_path / "out").exists() == accepted
    (said,) = [item for item in results if item.out]
    if accepted:
        messages = [line["message"] for line in said.document["warnings"]]
        (message,) = [message for message in messages if "is not its rounded master" in message]
    else:
        message = said.document["message"]
    assert "ort is not its rounded master: fc.weight" in message
    assert "The masters are in ORT_checkpoint.ZeRO.1.1.ort.pt" in message


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_launchers_with_an_address(
    launcher: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """The folder of the target need not be there."""
    out = tmp_path / "new" / "folder" / "out"
    done(launch(3, "convert", sources["dcp"], out, *SMALL, launcher=launcher))
    assert zckpt.verify(out, sources["dcp"])["equal"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_processes_that_cannot_meet_write_parts(
    launcher: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    out = tmp_path / "out"
    words = ("convert", sources["dcp"], out, *SMALL)
    results = ended(launch(3, *words, launcher=launcher, MASTER_PORT=""))
    assert [item.code for item in results] == [0, 0, 0], results
    said = [item.out for item in results]
    assert sum("23 tensors" in text or "universal checkpoint" in text for text in said) == 1
    assert zckpt.verify(out, sources["dcp"])["equal"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun"])
def test_part_auto(launcher: str, sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    """The launcher's variables say which part this is; an address makes no difference."""
    out = tmp_path / "out"
    words = ("convert", sources["dcp"], out, *SMALL, "--part", "auto", "--json")
    for rank in (1, 0):
        (process,) = launch(2, *words, launcher=launcher, ranks=range(rank, rank + 1))
        report = process.wait().document
        assert report["part"] == f"{rank + 1}/2"
        assert report.get("waits_for_parts", False) == (rank == 1)
    assert zckpt.verify(out, sources["dcp"])["equal"]


def test_part_auto_without_a_launcher(
    sources: dict[str, Path], tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    ended = zckpt("convert", sources["dcp"], tmp_path / "out", "--part", "auto")
    assert ended.code == 2
    assert "--part auto needs a launcher that sets" in ended.err
    assert "OMPI_COMM_WORLD_RANK" in ended.err


def test_reshard(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    zckpt.reshard(sources["zero-1"], tmp_path / "single", dp=3, stage=3, copying=COPYING)
    words = ("reshard", sources["zero-1"], tmp_path / "shared", "--dp", 3, "--stage", 3)
    done(launch(2, *words, *SMALL))
    assert files(tmp_path / "shared") == files(tmp_path / "single")


def test_a_dry_run_writes_nothing(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    report = done(launch(2, "convert", sources["dcp"], tmp_path / "out", "--dry-run"))
    assert "would be" in report.out
    assert not (tmp_path / "out").exists()


def test_single_opts_out(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    (process,) = launch(
        2, "convert", sources["dcp"], tmp_path / "out", "--single", ranks=range(1, 2)
    )
    assert process.wait().code == 0
    zckpt.verify(tmp_path / "out", sources["dcp"])


def test_one_process_prints_an_error(tmp_path: Path, launch: Launch) -> None:
    """All find it; the first one prints it, and all end with its exit code."""
    results = ended(launch(3, "convert", tmp_path / "nothing", tmp_path / "out", "--json"))
    assert [item.code for item in results] == [1, 1, 1]
    (said,) = [item for item in results if item.out]
    assert said.document["error"] == "NotACheckpoint"
    assert not "".join(item.err for item in results)


def test_an_existing_target(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    results = ended(launch(2, "convert", sources["dcp"], tmp_path / "out"))
    assert [item.code for item in results] == [1, 1]
    assert "exists" in results[0].err
    assert not results[1].err
