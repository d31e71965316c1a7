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
    """An optimizer in a folder of a model is read with it: no second one is asked for."""
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"):
        shutil.copytree(checkpoint, tmp_path / "state" / name)
    assert list(zckpt.read(tmp_path / "state").roots) == ["model", "model_1"]
