"""Weights of a run whose optimizer files are lost: the model file of stages 0 to 2 has the module."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.errors import IncompleteCheckpoint

from ...conftest import EXAMPLE, ROOT
from ..equality import same_bits
from .conftest import Trained
from .test_grid import edit
from .test_tensor_ranks import RULES

LOST = "*_optim_states.pt"
SAID = "lacks optimizer files: the weights are the module's own"


def run_without(pattern: str, stage: int, tmp_path: Path) -> Path:
    """A run of three ranks without the files of this pattern, and without an optimizer in stage 0."""
    run = tmp_path / "run"
    zckpt.reshard(EXAMPLE, run, dp=3, stage=stage)
    if stage == 0:
        edit(next(run.rglob("mp_rank_00_model_states.pt")), lambda file: file.pop("optimizer"))
    for path in run.rglob(pattern):
        path.unlink()
    return run


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("pattern", [LOST, "*_rank_1_mp_rank_00_optim_states.pt"])
def test_the_module_has_the_weights(stage: int, pattern: str, tmp_path: Path) -> None:
    run = run_without(pattern, stage, tmp_path)
    report = zckpt.convert(run, tmp_path / "weights", weights_only=True)
    (said,) = report["warnings"]
    assert SAID in said
    compared = zckpt.verify(tmp_path / "weights", EXAMPLE, weights_only=True)
    assert compared["equal"]
    assert len(compared["rounded"]["a"]) == 5  # the 16-bit values, not the lost masters
    with pytest.raises(IncompleteCheckpoint):
        zckpt.convert(run, tmp_path / "whole")
    with pytest.raises(IncompleteCheckpoint):
        zckpt.read(run, nameless=True)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("pattern", [LOST, "*_rank_1_mp_rank_00_optim_states.pt"])
def test_stage_3_has_no_other_weights(pattern: str, tmp_path: Path) -> None:
    run = run_without(pattern, 3, tmp_path)
    with pytest.raises(IncompleteCheckpoint, match="optim"):
        zckpt.convert(run, tmp_path / "weights", weights_only=True)


@pytest.mark.parametrize("lost", ["mp_rank_00_model_states.pt", "*_model_states.pt"])
def test_a_lost_model_file_is_refused(lost: str, tmp_path: Path) -> None:
    run = run_without(LOST, 2, tmp_path)
    for path in run.rglob(lost):
        path.unlink()
    with pytest.raises(IncompleteCheckpoint):
        zckpt.convert(run, tmp_path / "weights", weights_only=True)


def test_layers_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    """They have the weights, but the files of stages say which are trained."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "data" / "zckpt-0.1-pp2_tp2" / "run", run)
    next(run.rglob("*mp_rank_03_optim_states.pt")).unlink()
    with pytest.raises(IncompleteCheckpoint, match="mp_rank_03_optim_states"):
        zckpt.convert(run, tmp_path / "weights", weights_only=True)


@pytest.mark.engines
@pytest.mark.first
def test_tensor_ranks(grid_trained: Trained, tmp_path: Path) -> None:
    """What the module of DeepSpeed's ranks had, joined by the rules."""
    root = grid_trained("tensor_tp2_dp2_z2")
    shutil.copytree(root / "run", tmp_path / "run")
    for path in (tmp_path / "run").rglob("*_mp_rank_01_optim_states.pt"):
        path.unlink()
    (tmp_path / "rules.txt").write_text(RULES)
    words: dict[str, Any] = {"tp_rules": str(tmp_path / "rules.txt"), "weights_only": True}
    report = zckpt.convert(tmp_path / "run", tmp_path / "weights", **words)
    assert any(SAID in line for line in report["warnings"])
    expected = torch.load(root / "oracle.pt", weights_only=False)["tensors"]
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    trained = [name for name in expected if name.endswith("/param")]
    assert trained
    for name in trained:
        assert same_bits(weights[name.removesuffix("/param")], expected[name]), name
