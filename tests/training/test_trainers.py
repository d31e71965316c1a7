"""The files of a trainer: what is said if the one without which it cannot resume is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt as package

from ..conftest import EXAMPLE, ROOT, Result, texts

Program = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
SAID = "its trainer_state.json is not there"


def test_a_trainer_without_its_state(tmp_path: Path, zckpt: Program) -> None:
    run = Path(shutil.copytree(TRAINER, tmp_path / "run"))
    assert not any(SAID in line for line in texts(package.read(run).warnings))
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
        assert not any(SAID in line for line in texts(package.read(path).warnings))


@pytest.mark.parametrize("name", ["rng_state.pth", "rng_state_3.pth", "training_args.bin"])
def test_files_of_torch_save(name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert not any(SAID in line for line in texts(package.read(tmp_path).warnings))
    torch.save({}, tmp_path / name)
    assert any(f"saved {name}" in line for line in texts(package.read(tmp_path).warnings))
    (tmp_path / "trainer_state.json").write_text("{}")
    assert not any(SAID in line for line in texts(package.read(tmp_path).warnings))
