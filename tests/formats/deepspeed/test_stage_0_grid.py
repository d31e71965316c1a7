"""Runs of several tensor ranks without ZeRO: read, and written for other sizes and stages."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    WrongOption,
    ZckptError,
)

from ...conftest import texts
from ...engines import grids
from ...engines.grids import CASES
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
    with pytest.raises(MissingData, match="the order of the module does not show which is which"):
        zckpt.convert(root / "run", tmp_path / "out")
    names = oracle["listed"]
    zckpt.convert(root / "run", tmp_path / "universal", param_names=names)
    manifest = zckpt.read(tmp_path / "universal")
    tensors = oracle["tensors"]
    assert {n for n in tensors if not n.endswith("/param")} <= {*map(name_of, manifest.entries)}
    for name in {*map(name_of, manifest.entries)} & tensors.keys():
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
    with pytest.raises(InconsistentCheckpoint, match="hold different replicas"):
        zckpt.convert(drifted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- pipelines

PP_FP16, PP_FP32 = "pipe_pp2_dp1_z0_fp16", "pipe_pp2_dp1_z0_fp32"
PP_BF16, PP_TP = "pipe_pp2_dp2_z0_bf16", "pipe_pp2_tp2_z0_fp16"
PP_TP_FP32 = "pipe_pp2_tp2_z0_fp32"
UNTIED = "pipe_pp2_dp1_z0_plain"
FUSED, FUSED_TP = "pipe_pp2_dp1_z0_fused", "pipe_pp2_tp2_z0_fused"  # FP16_Optimizer
FUSED_FP32 = "pipe_pp2_dp1_fused_z0_fp32"  # it counts in the last parameter of a group
DECAYED = "tied_modules.embed.weight", "6.fused.weight", "6.dense.weight"
OTHERS = "5.gain", *(f"6.{n}" for n in ("norm.weight", "norm.bias", "fused.bias", "dense.bias"))


def names_of(root: Path) -> list[str] | None:
    """What a user's program writes: the names of the first stage, then those of the second."""
    if root.name in (PP_BF16, UNTIED, FUSED_TP):
        return None  # the files show them
    listed = torch.load(root / "oracle.pt", weights_only=False)["listed"]
    return [*listed, *DECAYED, *OTHERS, "7.weight", "7.bias"]


@pytest.mark.parametrize(
    "name", [PP_FP16, PP_FP32, PP_BF16, PP_TP, PP_TP_FP32, UNTIED, FUSED, FUSED_TP, FUSED_FP32]
)
def test_a_pipeline_is_what_all_stages_held(
    name: str, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(name)
    tensors = torch.load(root / "oracle.pt", weights_only=False)["tensors"]
    report = zckpt.convert(root / "run", tmp_path / "universal", param_names=names_of(root))
    assert report["left_out"] == report["warnings"] == []
    entries = {
        n
        for n in map(name_of, zckpt.read(tmp_path / "universal").entries)
        if not n.startswith("state")
    }
    assert tensors.keys() <= entries
    for key, tensor in tensors.items():
        assert same_bits(zckpt.load(tmp_path / "universal", key), tensor), key


@pytest.mark.parametrize(
    ("name", "options", "stage"),
    [
        (PP_FP16, {"dp": 2}, 0),
        (PP_FP16, {"dp": 2, "stage": 1}, 1),
        (PP_FP32, {"dp": 2}, 0),
        (PP_FP32, {"dp": 1, "stage": 1, "tp": 1}, 1),
        (PP_BF16, {"dp": 1}, 1),
        (PP_TP, {"dp": 1}, 0),
        (UNTIED, {"dp": 1}, 0),
        (UNTIED, {"dp": 1, "stage": 1, "pp": 1}, 1),
        (FUSED, {"dp": 2}, 0),
        (FUSED, {"dp": 2, "stage": 1, "pp": 1}, 1),
        (FUSED_TP, {"dp": 2}, 0),
        (FUSED_TP, {"dp": 1, "stage": 1, "tp": 1}, 1),
        (FUSED_FP32, {"dp": 2}, 0),
        (FUSED_FP32, {"dp": 1, "stage": 1, "pp": 1}, 1),
    ],
)
def test_a_pipeline_resumes(
    name: str, options: dict[str, int], stage: int, grid_trained: Trained, tmp_path: Path
) -> None:
    """DeepSpeed 0.19.8 does not load its own bf16 pipelines of stage 0; stage 1 loads them."""
    root, case = grid_trained(name), CASES[name]
    expected = torch.load(root / "oracle.pt", weights_only=False)
    zckpt.reshard(root / "run", tmp_path / "run", param_names=names_of(root), **options)
    config = grids.BF16_OPTIMIZER if name == PP_BF16 else case.config
    resumed = dataclasses.replace(case, stage=stage, config=config, tp=options.get("tp", case.tp))
    held = grids.resume(
        resumed, tmp_path / "run", tmp_path / "engine", options["dp"], options.get("pp")
    )
    for key, tensor in held["tensors"].items():
        own = key if key in expected["tensors"] else key.replace("/master", "/param")
        assert same_bits(tensor, expected["tensors"][own]), key
    assert held["tensors"].keys() >= expected["tensors"].keys()
    assert held["steps"] == expected["steps"]
    most = 1e-5 if case.dtype == "fp32" else 2e-3
    assert abs(held["losses"][0] - expected["losses"][0]) < most
    if case.dtype == "fp32" and stage == case.stage:  # stage 1 clips gradients
        assert held["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("pipe_pp2_dp1_fp16", {"dp": 2}, marks=first),
        ("pipe_pp2_dp1_ties", {"dp": 1, "dtype": "fp16"}),
        ("pipe_pp2_tp2_dp1_fp32", {"dp": 1, "tp": 1}),
        ("pipe_pp2_dp2_fp32", {"dp": 1, "pp": 1}),
    ],
)
def test_a_pipeline_leaves_zero(
    name: str, options: dict[str, Any], grid_trained: Trained, tmp_path: Path
) -> None:
    root, case = grid_trained(name), CASES[name]
    report = zckpt.reshard(root / "run", tmp_path / "run", stage=0, **options)
    dtype = options.get("dtype", case.dtype)
    said = (
        "give the optimizer only the trained"
        if dtype == "fp32"
        else "divides gradients by the loss"
    )
    lines = [line for line in report["warnings"] if line["code"] != "batch-size-changes"]
    assert [said in line for line in texts(lines)] == [True] * (case.dtype == dtype)
    assert zckpt.verify(tmp_path / "run", against=root / "run")["equal"]
    resumed = dataclasses.replace(
        case, stage=0, dtype=dtype, tp=options.get("tp", case.tp), lists_frozen=dtype != "fp32"
    )
    held = grids.resume(
        resumed, tmp_path / "run", tmp_path / "engine", options["dp"], options.get("pp")
    )
    expected = torch.load(root / "oracle.pt", weights_only=False)
    for key, tensor in expected["tensors"].items():
        own = key if key in held["tensors"] else key.replace("/master", "/param")
        if dtype == case.dtype or not key.endswith("/param"):
            assert same_bits(held["tensors"][own], tensor), key
    assert held["steps"] == expected["steps"]
    assert abs(held["losses"][0] - expected["losses"][0]) < (1e-5 if dtype == "fp32" else 4e-3)


@first
def test_bf16_pipelines_keep_zero(grid_trained: Trained, tmp_path: Path) -> None:
    """The engine's own file of such a run does not load: `param_shapes` is None in it."""
    with pytest.raises(WrongOption, match="--stage 0 does not go with a pipeline in bf16"):
        zckpt.reshard(grid_trained("pipe_pp2_dp2") / "run", tmp_path / "run", stage=0)


def test_names_that_no_file_of_a_pipeline_states(grid_trained: Trained, tmp_path: Path) -> None:
    root = grid_trained(PP_FP16)
    with pytest.raises(MissingData, match=r"tied layer, and no file states its key") as raised:
        zckpt.convert(root / "run", tmp_path / "out")
    assert "in the order of the stages" in raised.value.hint
    with pytest.raises(WrongOption, match=r"names 3 parameters, .* have 13 \+ 10"):
        zckpt.convert(root / "run", tmp_path / "out", param_names=["a", "b", "c"])
    names = names_of(root)
    assert names is not None
    swapped = [*names[1:2], *names[:1], *names[2:]]
    with pytest.raises(ZckptError):
        zckpt.convert(root / "run", tmp_path / "out", param_names=swapped)
    for options in ({}, {"weights_only": True}):
        with pytest.raises(MissingData, match="have equal shape"):
            zckpt.convert(grid_trained(PP_FP32) / "run", tmp_path / "out", **options)
    run = grid_trained(PP_BF16) / "run"
    with pytest.raises(MissingData, match="list no parameters"):
        zckpt.verify(run, run, gather=True, device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda names: [names[1], names[0], *names[2:]], "fill the groups|rounds to the weight"),
        (lambda names: [*names[:5], names[6], names[5], *names[7:]], "rounds to the weight 1.norm"),
        (lambda names: names[:-1], "do not fill the groups"),
        (lambda names: [*names, "7.bias"], "do not fill the groups"),
        (lambda names: ["8.weight", *names[1:]], "which the model's state does not have"),
    ],
)
def test_wrong_names_of_flat_masters(
    change: Any, said: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """Two norms' weight and bias have one length: only the masters show that they are swapped."""
    root = grid_trained(FUSED)
    names = names_of(root)
    assert names is not None
    assert names[5:7] == ["1.norm.weight", "1.norm.bias"]
    with pytest.raises(MissingData, match=r"tied layer, and no file states its key"):
        zckpt.convert(root / "run", tmp_path / "out")
    with pytest.raises(WrongOption, match=said):
        zckpt.convert(root / "run", tmp_path / "out", param_names=change(names))
    assert not (tmp_path / "out").exists()


def test_wrong_names_of_whole_masters(grid_trained: Trained, tmp_path: Path) -> None:
    root = grid_trained(PP_FP16)
    names = names_of(root)
    assert names is not None
    swapped = [*names[:5], names[6], names[5], *names[7:]]
    with pytest.raises(
        WrongOption,
        match=r"the name 1\.norm\.bias to a master in .* rounds to the weight 1\.norm\.weight",
    ):
        zckpt.convert(root / "run", tmp_path / "out", param_names=swapped)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lost", "error", "said"),
    [
        ("mp_rank_01_*", IncompleteCheckpoint, "1 of 2 model ranks"),
        ("layer_06-*", ZckptError, "rounds to no weight"),
        ("layer_*", ZckptError, "no file of a layer"),
    ],
)
def test_lost_files_of_a_pipeline(
    lost: str, error: type[ZckptError], said: str, grid_trained: Trained, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(grid_trained(UNTIED) / "run", tmp_path / "run"))
    for path in run.glob(f"*/{lost}"):
        path.unlink()
    with pytest.raises(error, match=said):
        zckpt.convert(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
