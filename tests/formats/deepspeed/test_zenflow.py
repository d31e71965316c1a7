"""ZenFlow of real DeepSpeed: what its files have, what its engine resumes from, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import UnsupportedCheckpoint

from ...conftest import texts
from ...engines import deepspeed
from ...engines.cases import Case
from ..equality import assert_is_what_the_engine_held, same_bits

Trained = Callable[[Case], Path]
ZENFLOW = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "zero_optimization": {
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {
            "topk_ratio": 0.2,
            "select_strategy": "step",
            "select_interval": 2,
            "update_interval": 2,
            "full_warm_up_rounds": 0,
            "overlap_step": False,
        },
    },
}
# ZenFlow 0.19.8 fails for weights of three dimensions
CASES = {
    stage: Case(
        f"z{stage}_dp2_zenflow",
        "zenflow",
        stage,
        2,
        optimizer="config",
        model="matrices",
        groups=1,
        steps=5,
        config=ZENFLOW,
    )
    for stage in (1, 2)
}


@pytest.mark.engines
@pytest.mark.parametrize(("stage", "dp"), [(1, 3), (2, 1)])
def test_zenflow_for_another_dp(stage: int, dp: int, trained: Trained, tmp_path: Path) -> None:
    """Masters and moments; the engine makes the weights of the masters, as from its own files."""
    case = CASES[stage]
    root = trained(case)
    held = torch.load(root / "oracle.pt", weights_only=False)
    report = zckpt.convert(root / "run", tmp_path / "universal")
    assert ["ZenFlow" in line for line in texts(report["warnings"])] == [True]
    assert_is_what_the_engine_held(tmp_path / "universal", held)
    stale = [
        name
        for name in held["trainable"]
        if not same_bits(
            held["tensors"][f"{name}/master"].bfloat16(), held["tensors"][f"{name}/param"]
        )
    ]
    assert stale
    found = [line["tensor"] for line in zckpt.verify(root / "run")["differences"]]
    assert sorted(found) == sorted(f"{name}/param" for name in stale)
    zckpt.reshard(root / "run", tmp_path / "run", dp=dp)
    own = deepspeed.resume(case, root / "run", tmp_path / "own")
    ours = deepspeed.resume(case, tmp_path / "run", tmp_path / "ours", dp=dp)
    assert own["tensors"].keys() == ours["tensors"].keys() == held["tensors"].keys()
    assert [n for n in own["tensors"] if not same_bits(own["tensors"][n], ours["tensors"][n])] == []
    states = [name for name in held["tensors"] if not name.endswith("/param")]
    assert [n for n in states if not same_bits(held["tensors"][n], ours["tensors"][n])] == []
    assert ours["steps"] == held["steps"]
    assert ours["losses"][0] == pytest.approx(own["losses"][0], rel=0, abs=2e-3)


def say(run: Path, **changes: Any) -> None:
    """Lets a run say that ZenFlow wrote it."""
    for path in run.glob("*/*_states.pt"):
        state = torch.load(path, weights_only=False)
        zero = state["ds_config"]["zero_optimization"]
        zero |= {"zenflow": {"topk_ratio": 0.1}, **changes}
        torch.save(state, path)


def test_masters_of_zenflow_are_older(example: Path) -> None:
    assert not any("ZenFlow" in line for line in texts(zckpt.read(example).notices.warnings))
    say(example)
    warnings = zckpt.read(example).notices.warnings
    assert ["older than the weights of the module" in line for line in texts(warnings)] == [True]


def test_zenflow_with_transposed_matrices_is_refused(example: Path, tmp_path: Path) -> None:
    say(example, stage=3)
    with pytest.raises(UnsupportedCheckpoint, match="ZenFlow in ZeRO stage 3"):
        zckpt.convert(example, tmp_path / "out")
    say(example, stage=2)
    for path in example.glob("*/*_states.pt"):
        state = torch.load(path, weights_only=False)
        for values in (state, state.get("optimizer_state_dict") or {}):
            values["ds_version"] = "0.19.6"
        torch.save(state, path)
    with pytest.raises(UnsupportedCheckpoint, match=r"ZenFlow of DeepSpeed 0\.19\.6"):
        zckpt.convert(example, tmp_path / "out")
    assert not (tmp_path / "out").exists()
