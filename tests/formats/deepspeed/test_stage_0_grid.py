"""Runs of several tensor ranks without ZeRO: read, and written for other sizes and stages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
)

from ...engines import grids
from ...engines.grids import CASES, GridCase
from ..equality import same_bits
from .conftest import Trained
from .test_grid import edit
from .test_tensor_ranks import resumes

pytestmark = pytest.mark.engines
first = pytest.mark.first
PLAIN = "tensor_tp2_dp2_z0"
FP32 = "tensor_tp2_dp1_z0_fp32"
LLAMA = "llama_tp2_dp1_z0"


@pytest.mark.parametrize(
    ("name", "tp", "dp", "stage"),
    [
        pytest.param(PLAIN, None, 3, None, marks=first),
        (PLAIN, 1, 2, None),
        (PLAIN, None, 1, 1),
        (PLAIN, None, 2, 3),
        (PLAIN, 1, 1, 2),
        ("tensor_tp2_dp2", None, 1, 0),
        ("tensor_tp2_dp2_z3", 1, 2, 0),
        (LLAMA, None, 2, None),
        (LLAMA, 1, 1, None),
        ("llama_tp2_dp2", None, 1, 0),
    ],
)
def test_the_engine_resumes(
    name: str, tp: int | None, dp: int, stage: int | None, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(name)
    report = zckpt.reshard(root / "run", tmp_path / "run", tp=tp, dp=dp, stage=stage)
    at = CASES[name].stage if stage is None else stage
    assert f"ZeRO stage {at}" in report["about"]
    assert zckpt.verify(tmp_path / "run", against=root / "run")["equal"]
    resumes(root, tmp_path / "run", tp or 2, dp, tmp_path, stage)


@pytest.mark.parametrize("tp", [None, 1])
def test_names_of_an_fp32_run(tp: int | None, grid_trained: Trained, tmp_path: Path) -> None:
    """Torch's own optimizer knows its parameters by number; all tensor ranks have one order."""
    root = grid_trained(FP32)
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    with pytest.raises(MissingData, match="the order of the module does not tell apart"):
        zckpt.convert(root / "run", tmp_path / "out")
    names = oracle["listed"]
    zckpt.convert(root / "run", tmp_path / "universal", param_names=names)
    manifest = zckpt.read(tmp_path / "universal")
    tensors = oracle["tensors"]
    assert {n for n in tensors if not n.endswith("/param")} <= manifest.entries.keys()
    for name in manifest.entries.keys() & tensors.keys():
        assert same_bits(zckpt.load(tmp_path / "universal", name), tensors[name]), name
    zckpt.reshard(root / "run", tmp_path / "run", tp=tp, param_names=names)
    resumes(root, tmp_path / "run", tp or 2, 1, tmp_path, None)


@first
def test_faults(grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained(PLAIN) / "run"
    with pytest.raises(MissingData, match="without ZeRO"):
        zckpt.verify(run, against=run, gather=True, device="cpu")
    lost = Path(shutil.copytree(run, tmp_path / "lost"))
    (path,) = lost.glob("*/mp_rank_01_*")
    path.unlink()
    with pytest.raises(IncompleteCheckpoint, match="1 of 2 model ranks"):
        zckpt.convert(lost, tmp_path / "out")
    drifted = Path(shutil.copytree(run, tmp_path / "drifted"))
    (path,) = drifted.glob("*/mp_rank_01_*")

    def drift(value: Any) -> None:
        for state in value["optimizer"]["optimizer_state_dict"]["state"].values():
            state["exp_avg"] += 1

    edit(path, drift)
    with pytest.raises(InconsistentCheckpoint, match="hold different copies"):
        zckpt.convert(drifted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_pipelines_are_refused(dtype: str, tmp_path: Path) -> None:
    config = grids.SCALE if dtype == "fp16" else {}
    case = GridCase("pipe", "pipe", pp=2, stage=0, dtype=dtype, info=False, config=config)
    run = grids.train(case, tmp_path / "pipe")
    with pytest.raises(UnsupportedCheckpoint, match="a pipeline in ZeRO stage 0"):
        zckpt.convert(run, tmp_path / "out")
