"""Runs of real DeepSpeed for another number of tensor ranks: what the new engine's ranks hold."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    ZckptError,
)

from ...conftest import texts
from ...engines import grids
from ...engines.grids import CASES
from ..equality import LOST_IN_STATE_DICTS, same_bits
from .conftest import Trained
from .test_grid import edit

pytestmark = pytest.mark.engines
first = pytest.mark.first

FP32 = "tensor_tp2_dp2_z2"
ONE = "tensor_tp1_dp2"
RULES = r"""
(embedding|head)\.weight = vocab:31
.*\.(dense|down)\.weight = 1
.*\.(dense|down)\.bias = replicated
.*\.gate_up\..* = 0:2x
.*\.fused\..* = 0:16,4,8
.*norm\..*|position|normed\.gain|frozen\..* = replicated
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(RULES)
    return path


def resumes(root: Path, run: Path, tp: int, dp: int, tmp_path: Path, stage: int | None) -> None:
    """The unmodified engine has what the source's engine had, and trains on."""
    case = CASES[root.name]
    case = dataclasses.replace(case, tp=tp, stage=case.stage if stage is None else stage)
    held = grids.resume(case, run, tmp_path / "engine", dp)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    for key in ("steps", "scalars", "counters", "groups", "trainable", "frozen"):
        assert held[key] == expected[key], key
    for key in ("tensors", "buffers"):
        assert held[key].keys() == expected[key].keys()
        different = [n for n in held[key] if not same_bits(held[key][n], expected[key][n])]
        assert different == []
    most = 1e-5 if case.dtype == "fp32" else 2e-3
    assert abs(held["losses"][0] - expected["losses"][0]) < most


@pytest.mark.parametrize(
    ("name", "tp", "dp", "stage"),
    [
        pytest.param(FP32, 1, 3, None, marks=first),
        ("tensor_tp2_dp2", 1, 1, None),
        ("tensor_tp2_dp2_z3", 1, 2, None),
        ("llama_tp2_dp2", 1, 1, 2),
        ("llama_tp2_dp1_z3", 1, 2, None),
    ],
)
def test_one_tensor_rank(
    name: str, tp: int, dp: int, stage: int | None, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(name)
    zckpt.reshard(root / "run", tmp_path / "run", tp=tp, dp=dp, stage=stage)
    assert zckpt.verify(tmp_path / "run", against=root / "run")["equal"]
    resumes(root, tmp_path / "run", tp, dp, tmp_path, stage)


@pytest.mark.parametrize(
    ("name", "dp", "stage"),
    [
        pytest.param(FP32, 2, 1, marks=first),
        ("tensor_tp2_dp2", 3, 3),
        ("tensor_tp2_dp2_z3", 1, 2),
        ("llama_tp2_dp1_z2", 2, 3),
    ],
)
def test_another_stage_at_the_same_grid(
    name: str, dp: int, stage: int, grid_trained: Trained, tmp_path: Path
) -> None:
    """Each rank is written by itself, so no rules are needed."""
    root = grid_trained(name)
    report = zckpt.reshard(root / "run", tmp_path / "run", dp=dp, stage=stage)
    assert f"tp 2, ZeRO stage {stage}" in report["about"]
    resumes(root, tmp_path / "run", 2, dp, tmp_path, stage)


@pytest.mark.parametrize(
    ("name", "dp", "stage"),
    [(FP32, 1, 1), ("llama_tp2_dp1_z2", 2, 3), ("tensor_tp2_dp1_bf16", 3, 1)],
)
def test_there_and_back(
    name: str, dp: int, stage: int, grid_trained: Trained, tmp_path: Path
) -> None:
    """The files of one rank state how parameters were cut, so no rules are needed."""
    root = grid_trained(name)
    zckpt.reshard(root / "run", tmp_path / "one", tp=1)
    report = zckpt.reshard(tmp_path / "one", tmp_path / "two", tp=2, dp=dp, stage=stage)
    assert f"tp 2, ZeRO stage {stage}" in report["about"]
    is_auto = name.startswith("llama")
    assert any("num_key_value_heads" in line for line in texts(report["warnings"])) == is_auto
    found = zckpt.verify(tmp_path / "two", against=root / "run", gather=True, device="cpu")
    assert found["equal"], found
    resumes(root, tmp_path / "two", 2, dp, tmp_path, stage)


@pytest.mark.parametrize("dp", [pytest.param(1, marks=first), 2])
def test_rules_cut_a_run_of_one_rank(
    dp: int, rules: Path, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(ONE)
    with pytest.raises(MissingData, match="nothing says how"):
        zckpt.reshard(root / "run", tmp_path / "run", tp=2, dp=dp)
    zckpt.reshard(root / "run", tmp_path / "run", tp=2, dp=dp, tp_rules=rules)
    resumes(root, tmp_path / "run", 2, dp, tmp_path, None)


@pytest.mark.parametrize(
    ("name", "dp", "stage"),
    [(FP32, 1, 2), ("tensor_tp2_dp2_z3", 2, 3)],
)
def test_four_tensor_ranks(
    name: str, dp: int, stage: int, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(name)
    zckpt.reshard(root / "run", tmp_path / "run", tp=4, dp=dp, stage=stage)
    resumes(root, tmp_path / "run", 4, dp, tmp_path, stage)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "stage", "dtype"),
    [
        (FP32, 1, 2, 1, "bf16"),
        ("tensor_tp2_dp2", 1, 1, 2, "fp32"),
        ("tensor_tp2_dp2_z3", 1, 1, 3, "fp32"),
    ],
)
def test_another_element_type(
    name: str, tp: int, dp: int, stage: int, dtype: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """Masters and moments stay as they are; the module's weights are the masters, rounded."""
    root = grid_trained(name)
    zckpt.reshard(root / "run", tmp_path / "run", tp=tp, dp=dp, stage=stage, dtype=dtype)
    case = dataclasses.replace(CASES[name], tp=tp, stage=stage, dtype=dtype)
    held = grids.resume(case, tmp_path / "run", tmp_path / "engine", dp)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    assert held["steps"] == expected["steps"]
    tensors = dict(expected["tensors"])
    for entry in [entry for entry in tensors if entry.endswith("/param")]:
        master = tensors.get(f"{entry.removesuffix('/param')}/master", tensors[entry])
        tensors[entry] = master.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert held["tensors"].keys() == tensors.keys()
    assert [n for n in tensors if not same_bits(held["tensors"][n], tensors[n])] == []


@pytest.mark.parametrize("tp", [1, 2])
def test_from_a_universal_checkpoint(tp: int, grid_trained: Trained, tmp_path: Path) -> None:
    root = grid_trained(FP32)
    zckpt.convert(root / "run", tmp_path / "universal")
    zckpt.reshard(tmp_path / "universal", tmp_path / "run", tp=tp, dp=1)
    resumes(root, tmp_path / "run", tp, 1, tmp_path, None)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=first), 1])
def test_rows_of_a_padded_vocabulary(tp: int, grid_trained: Trained, tmp_path: Path) -> None:
    """Fewer rows, and then more again: rows that the source lacks are zeros."""
    root = grid_trained(FP32)
    zckpt.reshard(root / "run", tmp_path / "few", tp=1, vocab_size=31)
    assert zckpt.read(tmp_path / "few").parameters["head.weight"].shape == (31, 14)
    assert zckpt.verify(tmp_path / "few")["equal"]
    zckpt.reshard(tmp_path / "few", tmp_path / "run", tp=tp, dp=1, vocab_size=36)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    case = dataclasses.replace(CASES[FP32], tp=tp)
    held = grids.resume(case, tmp_path / "run", tmp_path / "engine", 1)
    for name, tensor in expected["tensors"].items():
        if name.startswith(("embedding.", "head.")):
            tensor = torch.cat([tensor[:31], torch.zeros_like(tensor[31:])])
        assert same_bits(held["tensors"][name], tensor), name


def model_file(run: Path, rank: int) -> Mapping[str, Any]:
    (path,) = run.glob(f"*/mp_rank_{rank:02d}_*")
    loaded: Mapping[str, Any] = torch.load(path, weights_only=False)
    return loaded


@first
def test_files_are_those_of_the_engine(grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained(FP32) / "run"
    zckpt.reshard(run, tmp_path / "one", tp=1)
    zckpt.reshard(tmp_path / "one", tmp_path / "two", tp=2, dp=2)
    names = sorted(path.name for path in run.glob("*/*"))
    assert sorted(path.name for path in (tmp_path / "two").glob("*/*")) == names
    assert [model_file(tmp_path / "one", 0)[key] for key in ("mp_world_size", "dp_world_size")] == [
        1, 2,
    ]  # fmt: skip
    for rank in (0, 1):
        ours, theirs = model_file(tmp_path / "two", rank), model_file(run, rank)
        assert ours.keys() == theirs.keys()
        for key in ("param_shapes", "buffer_names", "checkpoint_parallel_dimensions",
                    "mp_world_size", "dp_world_size", "universal_checkpoint_info"):  # fmt: skip
            assert ours[key] == theirs[key], key
        assert ours["module"].keys() == theirs["module"].keys()
        assert all(torch.equal(ours["module"][n], theirs["module"][n]) for n in ours["module"])


@first
def test_one_rank_of_a_run_that_has_one(example: Path, tmp_path: Path) -> None:
    """Neither rules nor a choice are needed; other engines' runs are written so too."""
    zckpt.reshard(example, tmp_path / "same", tp=1, dp=3)
    zckpt.convert(example, tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "dcp", tmp_path / "back", to="deepspeed", dp=2, tp=1)
    assert zckpt.verify(tmp_path / "same", against=example)["equal"]
    report = zckpt.verify(tmp_path / "back", against=example)
    assert {line["key"] for line in report["states"]} == LOST_IN_STATE_DICTS
    assert report["differences"] == report["problems"] == report["groups"] == []
    with pytest.raises(MissingData, match="nothing says how") as raised:
        zckpt.convert(tmp_path / "dcp", tmp_path / "two", to="deepspeed", dp=2, tp=2)
    assert "--to deepspeed first" in raised.value.hint


@first
class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "said"),
        [
            ({"tp": 0}, WrongOption, "--tp cannot be 0"),
            ({"tp": 8}, UnsupportedCheckpoint, "cannot be cut evenly over 8 .*fused.weight"),
            ({"tp": 2, "pp": 2}, WrongOption, "--pp does not apply .* is not a pipeline"),
        ],
    )
    def test_options(
        self,
        options: Any,
        error: type[ZckptError],
        said: str,
        grid_trained: Trained,
        tmp_path: Path,
    ) -> None:
        with pytest.raises(error, match=said) as raised:
            zckpt.reshard(grid_trained(FP32) / "run", tmp_path / "out", **options)
        assert raised.value.hint
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("replicas", [None, "rank0", "mean"])
    def test_copies_that_differ(
        self, replicas: str | None, grid_trained: Trained, tmp_path: Path
    ) -> None:
        run = Path(shutil.copytree(grid_trained(FP32) / "run", tmp_path / "run"))
        (path,) = run.glob("*/zero_pp_rank_0_mp_rank_01_optim_states.pt")

        def drift(value: Any) -> None:
            value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"][:] += 1

        edit(path, drift)
        if replicas is None:
            with pytest.raises(InconsistentCheckpoint, match="hold different replicas"):
                zckpt.reshard(run, tmp_path / "out", tp=1)
            assert not (tmp_path / "out").exists()
            return
        report = zckpt.reshard(run, tmp_path / "out", tp=1, replicas=replicas)
        assert any("replicas of" in line for line in texts(report["warnings"]))


@pytest.mark.engines
def test_a_vocabulary_does_not_lose_rows(grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained("tensor_tp2_dp2") / "run"
    with pytest.raises(WrongOption, match=r"--vocab-size 20 is less than the 31 rows of emb"):
        zckpt.reshard(run, tmp_path / "out", tp=4, vocab_size=20)
    assert not (tmp_path / "out").exists()
