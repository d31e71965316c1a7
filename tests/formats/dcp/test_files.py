"""Which folders make a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zckpt
from zckpt import errors


def test_several_steps_have_to_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    for step in (5, 10):
        shutil.copytree(checkpoint, tmp_path / "checkpoint" / f"step-{step}")
    with pytest.raises(errors.AmbiguousCheckpoint, match="step-5, step-10"):
        zckpt.read(tmp_path / "checkpoint")
    assert zckpt.read(tmp_path / "checkpoint", tag="step-5").step == 3
    shutil.rmtree(tmp_path / "checkpoint" / "step-10")
    assert zckpt.read(tmp_path / "checkpoint").step == 3


def test_several_models_of_accelerate(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0"):
        shutil.copytree(checkpoint, tmp_path / "state" / name)
    with pytest.raises(errors.UnsupportedCheckpoint, match="pytorch_model_fsdp_1"):
        zckpt.read(tmp_path / "state")
