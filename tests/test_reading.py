"""How a path becomes a manifest: files that were not written with the others are named."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt as package
from zckpt.copying import convert

from .conftest import EXAMPLE, ROOT, Result

Run = Callable[..., Result]
DATA = ROOT / "tests" / "data"
HOUR = 3600.0
ORT = DATA / "onnxruntime" / "legacy-post5478__fp16__adam__dp3"
SAVES = {
    "dcp": (DATA / "fsdp2-2.13.0-w2", "__0_0.distcp"),
    "torch_dist": (DATA / "megatron-0.16.1-tp2", "__1_0.distcp"),
    "fsdp_dtensor": (DATA / "megatron-0.16.1-fsdp", "__1_0.distcp"),
    "mp_rank": (DATA / "megatron-0.16.1-legacy-tp2", "mp_rank_01/model_optim_rng.pt"),
    "deepspeed": (EXAMPLE, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "onnxruntime": (ORT, "ORT_checkpoint.ZeRO.1.2.ort.pt"),
}
WITH_LAST = ("dcp", "torch_dist", "fsdp_dtensor")  # a file is written when all ranks have ended


def copied(source: Path, target: Path) -> Path:
    """A copy whose files are an hour old."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        shift(path)
    return target


def shift(path: Path, hours: float = -1) -> None:
    """Gives a file a time so many hours from now."""
    os.utime(path, (time.time() + hours * HOUR,) * 2)


def named(run: Path, zckpt: Run) -> set[str]:
    """The files that convert warns of, and verify too."""
    shutil.rmtree(run.parent / "out", ignore_errors=True)
    converted, verified = zckpt("convert", run, run.parent / "out"), zckpt("verify", run)
    assert (converted.code, verified.code) == (0, 0)
    texts = converted.err, verified.err
    first, second = ({*re.findall(r"(\S+): written more than", text)} for text in texts)
    assert first == second
    return {os.path.relpath(path, run) for path in first}


@pytest.mark.parametrize("kind", SAVES)
def test_a_file_that_was_not_written_with_the_others(kind: str, tmp_path: Path, zckpt: Run) -> None:
    source, name = SAVES[kind]
    run = copied(source, tmp_path / "run")
    (file,) = run.rglob(name)
    name = str(file.relative_to(run))
    assert named(run, zckpt) == set()
    shift(file, -2)
    assert named(run, zckpt) == {name}
    shift(file, 0)
    assert named(run, zckpt) == ({name} if kind in WITH_LAST else set())


def test_files_of_ranks_beside_whole_ones(tmp_path: Path, zckpt: Run) -> None:
    """A whole file is written by one rank, at its own time."""
    run = tmp_path / "run"
    run.mkdir()
    names = [f"model_rank_{rank}.pt" for rank in range(3)]
    for name in names:
        torch.save({"a": torch.ones(3)}, run / name)
    group = {"lr": 0.1, "params": ["a"]}
    optimizer = {"state": {"a": {"exp_avg": torch.ones(3)}}, "param_groups": [group]}
    torch.save(optimizer, run / "optim.pt")
    shift(run / "optim.pt")
    assert named(run, zckpt) == set()
    shift(run / names[1])
    assert named(run, zckpt) == {names[1]}


def test_each_folder_has_its_own_time(tmp_path: Path, zckpt: Run) -> None:
    """Accelerate saves the model, then the optimizer, which may take longer."""
    run, weight = tmp_path / "run", torch.ones(64)
    group = {"lr": 0.1, "params": ["a"]}
    optimizer = {"state": {"a": {"exp_avg": weight + 1}}, "param_groups": [group]}
    folders = {"pytorch_model_fsdp_0": {"model": {"a": weight, "b": weight * 2}}}
    folders |= {"optimizer_0": {"optimizer": optimizer}}
    for folder, state in folders.items():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(run / folder, thread_count=2))
    for path in (run / "pytorch_model_fsdp_0").iterdir():
        shift(path)
    assert named(run, zckpt) == set()
    shift(run / "pytorch_model_fsdp_0" / "__0_0.distcp", 0)
    assert named(run, zckpt) == {"pytorch_model_fsdp_0/__0_0.distcp"}


def test_a_target_is_of_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its copy takes."""
    copy = convert.copy

    def slow(pairs: Any, source: Any, shells: Any, *arguments: Any) -> Any:
        outcome = copy(pairs, source, shells, *arguments)
        for file in shells.files.paths:
            shift(Path(file))
        return outcome

    monkeypatch.setattr(convert, "copy", slow)
    package.convert(EXAMPLE, tmp_path / "out", to="dcp", dp=4)
    files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert {path.name for path in files} == {".metadata", "__0_0.distcp"}
    assert all(path.stat().st_mtime > time.time() - 600 for path in files)
