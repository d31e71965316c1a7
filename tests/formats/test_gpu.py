"""Engines that train on one GPU: zckpt reads what they saved, and they load what it writes.

One rank uses NCCL. Two ranks share the GPU, which NCCL refuses, so they use gloo. What is written
for other ranks or another stage is loaded there, then written back, and loaded where it came from:
the losses that follow are those of the run that went on, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

from ..engines import deepspeed, resumed, torch_engine
from ..engines.cases import CASES, DYNAMIC_SCALE, FUSED, Case
from ..engines.torch_cases import CASES as TORCH
from .deepspeed.test_stage_0 import names_of_optimizer
from .deepspeed.test_stage_0_write import assert_same_state
from .equality import (
    assert_is_what_the_engine_held,
    assert_is_what_torch_held,
    assert_same_run,
)

pytestmark = pytest.mark.gpu
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "betas": [0.8, 0.95]}}}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """ENGINE_DEVICE=cpu tries these tests without a GPU, but for optimizers that need one."""
    name = os.environ.get("ENGINE_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    monkeypatch.setenv("ENGINE_DEVICE", name)
    return name


def deepspeed_cases() -> Iterator[Case]:
    for dp in (1, 2):
        for stage in range(4):
            place = f"z{stage}_dp{dp}"
            yield Case(f"{place}_bf16", "gpu", stage, dp)
            yield Case(f"{place}_fp16", "gpu", stage, dp, "fp16", config=DYNAMIC_SCALE)
            yield Case(f"{place}_fused_adam", "gpu", stage, dp, optimizer=FUSED)
    for dtype, config in (("fp32", {}), ("fp16", DYNAMIC_SCALE)):
        config = {**LAMB, **config}
        yield Case(f"z0_dp1_lamb_{dtype}", "gpu", 0, 1, dtype, optimizer="config", config=config)
    for dp in (1, 2):
        yield Case(f"z0_dp{dp}_lamb_bf16", "gpu", 0, dp, optimizer="deepspeed fused lamb")


@pytest.mark.parametrize("case", [*deepspeed_cases()], ids=lambda case: case.name)
def test_deepspeed(case: Case, device: str, tmp_path: Path) -> None:
    run = deepspeed.train(case, tmp_path)
    before = torch.load(tmp_path / "oracle.pt", weights_only=False)
    nameless = case.stage == 0 and case.dtype == "fp32"
    names = {"param_names": names_of_optimizer(case)} if nameless else {}
    zckpt.convert(run, tmp_path / "universal", **names)
    assert_is_what_the_engine_held(tmp_path / "universal", before)

    stage = 0 if "lamb" in case.name else (case.stage + 1) % 4
    there, back = tmp_path / "there", tmp_path / "back"
    zckpt.reshard(run, there, dp=1, stage=stage, **names)
    after = deepspeed.resume(case, there, tmp_path, dp=1, stage=stage)
    assert_same_state(before, after, groups=True)
    # without ZeRO, DeepSpeed 0.19.8 computes fp16 otherwise: docs/deepspeed.md
    near = 1 if case.dtype == "fp16" and 0 in (stage, case.stage) and stage != case.stage else 5
    assert after["losses"][:near] == pytest.approx(before["losses"][:near], rel=0, abs=1e-2)

    zckpt.reshard(there, back, dp=case.dp, stage=case.stage, **names)
    after = deepspeed.resume(case, back, tmp_path)
    assert_same_state(before, after, groups=True)
    assert after["losses"] == before["losses"]
    how = names if nameless else {"gather": True, "device": device}
    for one, other in ((run, there), (there, back), (run, tmp_path / "universal")):
        report = zckpt.verify(one, other, **how)
        assert report["equal"], report
        assert nameless or report["device"] == device


LAYOUTS = ("dcp", "flat", "raw", "bf16", "torch_fused_adamw", "capturable", "local")


@pytest.mark.parametrize(
    ("name", "world"), [*((name, world) for name in LAYOUTS for world in (1, 2)), ("full", 1)]
)  # torch would gather a full state dict over gloo, as torch_oracle.whole must not
def test_fsdp2(name: str, world: int, device: str, tmp_path: Path) -> None:
    case = TORCH.get(f"fsdp2_{name}") or dataclasses.replace(
        TORCH["fsdp2_dcp"], optimizer="capturable adamw"
    )
    run = torch_engine.train(case, world, tmp_path)
    before = torch.load(tmp_path / "oracle.pt", weights_only=False)
    by_number = case.layout in ("raw", "ranks")
    members = [name for group in before["groups"] for name in group["params"]]
    names = {"param_names": members} if by_number else {}
    zckpt.convert(run, tmp_path / "universal", **names)
    assert_is_what_torch_held(tmp_path / "universal", before)

    layout = case.layout if case.layout in ("flat", "raw") else "nested"
    there, back = tmp_path / "there", tmp_path / "back"
    zckpt.convert(run, there, to="dcp", dp=3 - world, **names)
    zckpt.reshard(there, back, dp=world, **names)
    after = torch_engine.resume("fsdp2", there, 1, tmp_path, case=case, layout=layout)
    if case.dtype == "bf16" and world == 2:  # gradients are rounded otherwise
        assert after["losses"] == pytest.approx(before["losses"], rel=0, abs=0.05)
        after["losses"] = before["losses"]
    assert_same_run(before, after)
    after = torch_engine.resume("fsdp2", back, world, tmp_path, case=case, layout=layout)
    assert_same_run(before, after)
    assert after["losses"] == before["losses"]
    for target in (there, back, tmp_path / "universal"):
        report = zckpt.verify(run, target, gather=True, device=device, **names)
        assert report["equal"], report
        assert report["device"] == device


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_in_fsdp2(stage: int, dp: int, tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[f"z{stage}_dp2_as_torch"], dp=dp)
    run = deepspeed.train(case, tmp_path)
    before = torch.load(tmp_path / "oracle.pt", weights_only=False)
    zckpt.convert(run, tmp_path / "dcp", to="dcp", dp=2)
    as_torch: Any = TORCH["fsdp2_as_deepspeed"]
    after = torch_engine.resume("fsdp2", tmp_path / "dcp", 1, tmp_path, case=as_torch)
    assert_same_run(before, after, across=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_resume(stage: int, tmp_path: Path) -> None:
    """A training of two ranks is killed, and goes on with one, which loads what zckpt wrote."""
    program = resumed.Program(f"zero-{stage}", "zero", stage)
    runs = [tmp_path / name / "run" for name in ("whole", "killed")]
    for run in runs:
        run.parent.mkdir()
    whole = resumed.start(program, runs[0], 2)
    resumed.start(program, runs[1], 2, kill="step")
    again = resumed.start(program, runs[1], 1)
    assert again.report["written"]
    expected = {step: loss for step, loss in whole.losses.items() if step >= 4}
    assert again.losses == pytest.approx(expected, rel=1e-5)
