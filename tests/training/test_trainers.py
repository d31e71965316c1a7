"""The files of a trainer: what is said if the one without which it cannot resume is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import zckpt as package

from ..conftest import EXAMPLE, ROOT, Result, texts

Program = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
SAID = "trainer_state.json is missing, without which the program cannot resume"


def test_a_trainer_without_its_state(tmp_path: Path, zckpt: Program) -> None:
    run = Path(shutil.copytree(TRAINER, tmp_path / "run"))
    assert not any(SAID in line for line in texts(package.inspect(package.read(run))["problems"]))
    (run / "trainer_state.json").unlink()
    for command in (("inspect", run), ("reshard", run, tmp_path / "new", "--dp", "1")):
        done = zckpt(*command)
        assert (done.code, done.err.count(SAID)) == (0, 1)
    package.convert(run, tmp_path / "universal")
    assert zckpt("inspect", tmp_path / "universal").err.count(SAID) == 1


def test_other_directories_need_none(tmp_path: Path) -> None:
    """A model that was saved at the end has training_args.bin, and nothing resumes from it."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    for path in (tmp_path, EXAMPLE):
        assert not any(
            SAID in line for line in texts(package.inspect(package.read(path))["problems"])
        )
