"""Hyper-parameters that each rank's optimizer has estimated of its own, as Prodigy's `d`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.optimizer_states import states_in
from zckpt.formats.deepspeed_states.estimates import stated_estimates

from ...conftest import ROOT, Result
from ...engines import deepspeed
from ...engines.cases import Case

Program = Callable[..., Result]
DATA = ROOT / "tests" / "data" / "deepspeed-0.9.3-z2_dp3_fused_adam" / "run"


def base_of(file: Path) -> dict[str, Any]:
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    base: dict[str, Any] = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return base


def estimates(run: Path, key: str = "d") -> list[float]:
    """What the ranks' files have, as torch reads them."""
    files = sorted(run.glob("*/*optim_states.pt"))
    return [base_of(file)["param_groups"][0][key] for file in files]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three ranks, each with a `d` of its own."""
    run = tmp_path / "run"
    shutil.copytree(DATA, run)
    for rank, file in enumerate(sorted(run.glob("*/*optim_states.pt"))):
        value = torch.load(file, weights_only=False)
        group = value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
        group |= {"d": 0.25 + rank, "d0": 1e-6, "d_denom": torch.tensor(0.5 * rank)}
        torch.save(value, file)
    return run


def test_the_keys_are_named(run: Path, zckpt: Program) -> None:
    shown = zckpt("inspect", run)
    assert shown.code == 0
    assert "d, d_denom: each of the 3 ranks has its own estimate (d: 0.25, 1.25, 2.25)" in shown.err
    assert zckpt("verify", run).code == 0


def test_the_same_ranks_get_their_own(run: Path, tmp_path: Path, zckpt: Program) -> None:
    assert zckpt("reshard", run, tmp_path / "same", "--dp", "3").code == 0
    assert zckpt("convert", run, tmp_path / "u").code == 0
    assert (
        zckpt("reshard", tmp_path / "u", tmp_path / "back", "--dp", "3", "--stage", "1").code == 0
    )
    for target in ("same", "back"):
        assert estimates(tmp_path / target) == [0.25, 1.25, 2.25]
        assert estimates(tmp_path / target, "d_denom") == [0.0, 0.5, 1.0]
        assert zckpt("verify", tmp_path / target, "--against", run).code == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--dp", "2"),
        ("--dp", "3", "--stage", "3"),
        ("--to", "dcp"),
        ("--to", "gathered"),
        ("--to", "deepspeed-universal"),
    ],
)
def test_others_cannot_have_them(
    options: tuple[str, ...], run: Path, tmp_path: Path, zckpt: Program
) -> None:
    command = "convert" if "--to" in options else "reshard"
    refused = zckpt(command, run, tmp_path / "t", *options)
    assert refused.code == 1
    assert "the optimizer's d, d_denom differ between ranks" in refused.err
    assert "--to deepspeed --dp 3 --stage 2" in refused.err
    assert not (tmp_path / "t").exists()
    assert zckpt(command, run, tmp_path / "t", *options, "--weights-only").code == 0


def test_as_pytorch_optimizer_names_them(run: Path, tmp_path: Path, zckpt: Program) -> None:
    """Every rank got the denominator of rank 0, and its estimate went another way."""
    for rank, file in enumerate(sorted(run.glob("*/*optim_states.pt"))):
        value = torch.load(file, weights_only=False)
        group = value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
        group["d_de_nom"] = torch.tensor([0.5 + rank])
        torch.save(value, file)
    assert zckpt("reshard", run, tmp_path / "same", "--dp", "3").code == 0
    assert estimates(tmp_path / "same", "d_de_nom") == [0.5, 1.5, 2.5]


def test_another_hyper_parameter_is_of_another_save(run: Path, zckpt: Program) -> None:
    file = max(run.glob("*/*optim_states.pt"))
    value = torch.load(file, weights_only=False)
    value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 7.0
    torch.save(value, file)
    refused = zckpt("inspect", run)
    assert refused.code == 1
    assert "files of different saves" in refused.err


@pytest.mark.engines
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_real_ranks_go_on_with_their_own(stage: int, tmp_path: Path, zckpt: Program) -> None:
    """As the engine itself resumes, bit for bit."""
    case = Case(f"z{stage}_dp2_estimating", "estimating", stage, 2, optimizer="estimating")
    source = deepspeed.train(case, tmp_path / "trained")
    assert len(set(estimates(source))) == 2
    assert zckpt("verify", source).code == 0
    assert zckpt("reshard", source, tmp_path / "t", "--dp", "2").code == 0
    assert estimates(tmp_path / "t") == estimates(source)
    own = deepspeed.resume(case, source, tmp_path / "own")
    after = deepspeed.resume(case, tmp_path / "t", tmp_path / "resumed")
    assert after["losses"] == own["losses"]
    assert zckpt("reshard", source, tmp_path / "other", "--dp", "3").code == 1


@pytest.mark.parametrize("record", [5, [5], [{"d": 5}], [{"d": [1.0]}], [{"d": ["a", "b", "c"]}]])
def test_a_damaged_record(record: Any, run: Path) -> None:
    source = zckpt.read(run)
    with pytest.raises((errors.CorruptCheckpoint, ValueError), match="by_rank"):
        stated_estimates(replace(source, states=states_in({"by_rank": record})))
