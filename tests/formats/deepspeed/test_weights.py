"""Weights alone, where the optimizer is lost: which are read, and who says what is lost?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.errors import IncompleteCheckpoint, InconsistentCheckpoint, ZckptError

from ...conftest import EXAMPLE, ROOT, Result
from ...engines.cases import CASES, Case

Trained = Callable[[Case], Path]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
LOST = "only the 16-bit weights are read; the masters are lost"


def without(run: Path, target: Path, pattern: str = "*optim_states.pt") -> Path:
    """A copy of a run without its optimizer's files."""
    shutil.copytree(run, target)
    files = [*target.rglob(pattern)]
    assert files
    for file in files:
        file.unlink()
    return target


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.dtype == other[name].dtype, name
        assert torch.equal(weight, other[name]), name


# -- the judge: what a real engine held


@pytest.mark.engines
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("z1_dp2_bf16", marks=pytest.mark.first),
        pytest.param("z2_dp2_bf16", marks=pytest.mark.first),
        "z1_dp2_bf16_optimizer",
        "z2_dp2_fp32",
    ],
)
def test_weights_are_those_of_the_model(name: str, trained: Trained, tmp_path: Path) -> None:
    """Bit by bit, buffers and frozen weights too, without any file of the optimizer."""
    root = trained(CASES[name])
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    run = without(root / "run", tmp_path / "run")
    report = zckpt.convert(run, tmp_path / "out", weights_only=True)
    (warning,) = [each for each in report["warnings"] if each["code"] == "optimizer-missing"]
    assert warning["message"].endswith(LOST) != name.endswith("fp32")
    held = {
        key.removesuffix("/param"): tensor
        for key, tensor in oracle["tensors"].items()
        if key.endswith("/param")
    }
    assert_alike(weights_of(tmp_path / "out"), held | oracle["buffers"])
    with pytest.raises(IncompleteCheckpoint):
        zckpt.reshard(run, tmp_path / "resharded", dp=1)


@pytest.mark.engines
@pytest.mark.first
def test_stage_3_has_no_weights_left(trained: Trained, tmp_path: Path) -> None:
    run = without(trained(CASES["z3_dp2_bf16"]) / "run", tmp_path / "run")
    for words in ({}, {"weights_only": True}):
        with pytest.raises(IncompleteCheckpoint) as raised:
            zckpt.convert(run, tmp_path / "out", **words)
        assert "in stage 3 the optimizer's files hold the weights too" in raised.value.hint


# -- one or all files lost, damaged, foreign or old


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for file in folder.rglob("*.pt"):
        value = torch.load(file, weights_only=False)
        change(value)
        torch.save(value, file)


def optimizer(run: Path, rank: int) -> Path:
    return run / "global_step7" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def one_is_missing(run: Path) -> None:
    optimizer(run, 1).unlink()


def one_is_cut(run: Path) -> None:
    optimizer(run, 2).write_bytes(optimizer(run, 2).read_bytes()[:500])


def one_is_of_another_rank(run: Path) -> None:
    shutil.copy(optimizer(run, 0), optimizer(run, 1))


def is_old(run: Path) -> None:
    """As before 0.5.10: there the optimizer's files had the shapes."""

    def change(value: dict[str, Any]) -> None:
        value.pop("param_shapes", None)
        for each in (value, value.get("optimizer_state_dict") or {}):
            each["ds_version"] = "0.5.8"

    changed(run, change)


def is_on_nvme(run: Path) -> None:
    (run / "global_step7" / "offloaded_tensors").mkdir()


@pytest.mark.parametrize(
    "damage", [one_is_missing, one_is_cut, one_is_of_another_rank, is_old, is_on_nvme]
)
def test_damaged_optimizers(
    damage: Callable[[Path], None], example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """Each command says it, and its hint has the one that writes the weights."""
    assert zckpt("convert", EXAMPLE, tmp_path / "sound", "--weights-only").code == 0
    damage(example)
    refused = zckpt("inspect", example)
    assert refused.code == 1
    way = refused.err.rpartition("`zckpt ")[2].partition("`")[0]
    assert way == f"convert {example} DST --weights-only"
    written = zckpt(*way.replace("DST", str(tmp_path / "out")).split())
    assert written.code == 0
    assert "only the 16-bit weights are read; the masters are " in written.err
    assert_alike(weights_of(tmp_path / "out"), weights_of(tmp_path / "sound"))
    assert zckpt("reshard", example, tmp_path / "resharded", "--dp", "2").code == 1


def test_a_damaged_model_file_is_no_matter_of_the_optimizer(
    example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    model = example / "global_step7" / "mp_rank_00_model_states.pt"
    model.write_bytes(model.read_bytes()[:500])
    refused = zckpt("convert", example, tmp_path / "out", "--weights-only")
    assert refused.code == 1
    assert str(model) in refused.err
    assert "--weights-only" not in refused.err


def test_model_files_of_several_ranks_are_not_enough(tmp_path: Path) -> None:
    """Weights of tensor ranks are slices."""
    run = without(EXAMPLE, tmp_path / "run")
    (model,) = run.rglob("mp_rank_00_model_states.pt")
    value = torch.load(model, weights_only=False) | {"mp_world_size": 2}
    torch.save(value, model)
    with pytest.raises(ZckptError, match="holds no optimizer files"):
        zckpt.convert(run, tmp_path / "out", weights_only=True)


def test_an_optimizer_of_another_save_is_an_error(example: Path, tmp_path: Path) -> None:
    """Model and optimizer contradict each other: no file is known to be the right one."""
    changed(example, lambda value: value.get("param_shapes", [{}]).append({}))
    with pytest.raises(InconsistentCheckpoint):
        zckpt.convert(example, tmp_path / "out", weights_only=True)


# -- who says what


def test_every_command_knows_that_the_masters_are_lost(
    tmp_path: Path, zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = without(EXAMPLE, tmp_path / "runs" / "run")
    for code, *words in (
        (0, "inspect", run),
        (3, "verify", run),
        (3, "verify", run, "--gather", "--against", EXAMPLE),
        (3, "report", run),
        (3, "check", run),
        (3, "list", run.parent),
        (1, "auto-resume", run),
        (1, "reshard", run, "out", "--dp", "2"),
        (1, "convert", run, "out"),
        (1, "convert", run, "out", "--to", "dcp"),
        (1, "convert", run, "out", "--to", "gathered"),
        (1, "convert", run, "out", "--to", "deepspeed-universal"),
        (1, "convert", run, "out", "--weights-only", "--dtype", "fp32"),
        (0, "convert", run, "of-torch", "--to", "dcp", "--weights-only"),
        (0, "convert", run, "of-deepspeed", "--to", "deepspeed", "--weights-only"),
    ):
        shown = zckpt(*words)
        assert shown.code == code, (words, shown.err)
        assert LOST in shown.out + shown.err, words


def test_a_folder_for_from_pretrained(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    run = without(TRAINER, tmp_path / "checkpoint-4")
    shown = zckpt("export", run, tmp_path / "model")
    assert shown.code == 0
    assert LOST in shown.err
    assert zckpt("export", TRAINER, tmp_path / "sound").code == 0
    assert_alike(weights_of(tmp_path / "model"), weights_of(tmp_path / "sound"))


def test_a_run_without_an_optimizer_has_lost_none(tmp_path: Path) -> None:
    """Stage 0 keeps it in the model file: a program may train without one, or only evaluate."""
    run = without(EXAMPLE, tmp_path / "run")
    (model,) = run.rglob("mp_rank_00_model_states.pt")
    value = torch.load(model, weights_only=False)
    value["ds_config"] = {"zero_optimization": {"stage": 0}}
    value["module"] = {name: tensor.float() for name, tensor in value["module"].items()}
    torch.save(value, model)
    report = zckpt.convert(run, tmp_path / "out", weights_only=True)
    assert not [each for each in report["warnings"] if each["code"] == "optimizer-missing"]
    with pytest.raises(ZckptError, match="no optimizer"):
        zckpt.convert(run, tmp_path / "dcp", to="deepspeed")
