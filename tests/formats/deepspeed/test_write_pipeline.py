"""Pipelines of real DeepSpeed for other tensor ranks, stages and data ranks at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import MissingData, UnsupportedCheckpoint, WrongOption, ZckptError

from ...engines import grids
from ...engines.grids import CASES
from ..equality import same_bits
from .conftest import Trained
from .test_grid import BOTH
from .test_recut import BOUNDS, TWO, resumes

pytestmark = pytest.mark.engines
first = pytest.mark.first
TIES = "pipe_pp2_dp1_ties"
FP32 = "pipe_pp2_tp2_dp1_fp32"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDE = "pipe_pp2_tp2_dp2"


@pytest.mark.parametrize(
    ("name", "pp", "tp", "dp"),
    [
        pytest.param(BOTH, 1, 1, 2, marks=first),
        (BOTH, 2, 1, 1),
        (BOTH, 1, 2, 2),
        (FP32, 1, 1, 1),
        (FP32, 2, 1, 1),
        (FP32, 1, 4, 1),
        (WIDE, 1, 1, 1),
        (WIDE, 2, 1, 2),
    ],
)
def test_other_tensor_ranks(
    name: str, pp: int, tp: int, dp: int, grid_trained: Trained, tmp_path: Path
) -> None:
    root = grid_trained(name)
    report = zckpt.reshard(root / "run", tmp_path / "run", pp=pp, tp=tp, dp=dp)
    assert f"pp {pp}, tp {tp}, ZeRO stage 1" in report["about"]
    found = zckpt.verify(tmp_path / "run", against=root / "run")
    assert found["equal"], found
    resumes(root, tmp_path / "run", tmp_path, pp=pp, tp=tp, dp=dp)


def test_there_and_back(grid_trained: Trained, tmp_path: Path) -> None:
    """The files of one model rank state how parameters were cut, so no rules are needed."""
    root = grid_trained(BOTH)
    zckpt.reshard(root / "run", tmp_path / "one", pp=1, tp=1, dp=2)
    zckpt.reshard(tmp_path / "one", tmp_path / "two", tp=2, pp=2, pp_bounds=BOUNDS[2], dp=1)
    found = zckpt.verify(tmp_path / "two", against=root / "run", gather=True, device="cpu")
    assert found["equal"], found
    resumes(root, tmp_path / "two", tmp_path, pp=2, tp=2, dp=1)


@pytest.mark.parametrize(
    ("name", "pp", "tp", "dp"),
    [
        pytest.param(BOTH, None, None, None, marks=first),
        (BOTH, 1, 1, 1),
        (TWO, 3, None, 1),
        (TIES, None, None, 2),
        (TIES, 1, None, 1),
    ],
)
def test_from_a_universal_checkpoint(
    name: str, pp: Any, tp: int | None, dp: int | None, grid_trained: Trained, tmp_path: Path
) -> None:
    root, case = grid_trained(name), CASES[name]
    zckpt.convert(root / "run", tmp_path / "universal")
    zckpt.convert(
        tmp_path / "universal", tmp_path / "run", to="deepspeed",
        pp=pp, tp=tp, dp=dp, pp_bounds=BOUNDS.get(pp),
    )  # fmt: skip
    sizes = {"pp": pp or case.pp, "tp": tp or case.tp, "dp": dp or case.dp}
    resumes(root, tmp_path / "run", tmp_path, **sizes)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        pytest.param(FP32, {"tp": 2}, "bf16", marks=first),
        (FP32, {"tp": 1, "pp": 1}, "bf16"),
        (TWO, {"tp": 1}, "fp32"),
    ],
)
def test_another_type(
    name: str, options: Any, dtype: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """Masters and moments are the same; the engine's weights are the rounded masters."""
    root, case = grid_trained(name), CASES[name]
    zckpt.reshard(root / "run", tmp_path / "run", dtype=dtype, **options)
    expected = torch.load(root / "oracle.pt", weights_only=False)["tensors"]
    resumed = replace(case, dtype=dtype, tp=options["tp"])
    pp = options.get("pp", case.pp)
    held = grids.resume(resumed, tmp_path / "run", tmp_path / "engine", case.dp, pp)["tensors"]
    for name, tensor in expected.items():
        if not name.endswith("/param"):
            assert same_bits(held[name], tensor), name
    assert {t.dtype for n, t in held.items() if n.endswith("/param")} == {DTYPES[dtype]}


@first
@pytest.mark.parametrize("rows", [33, 41])
def test_rows_of_a_tied_vocabulary(rows: int, grid_trained: Trained, tmp_path: Path) -> None:
    """Both stages' copies have more or fewer of them; rows that the source lacks are zeros."""
    run = grid_trained(BOTH) / "run"
    zckpt.reshard(run, tmp_path / "out", tp=2, vocab_size=rows)
    padded, kept = rows + rows % 2, min(36, rows + rows % 2)
    for slot in ("param", "master", "exp_avg", "exp_avg_sq"):
        name = f"tied_modules.embed.weight/{slot}"
        before, after = zckpt.load(run, name), zckpt.load(tmp_path / "out", name)
        assert after.shape == (padded, 14)
        assert same_bits(after[:kept], before[:kept])
        assert not after[kept:].any()
    assert zckpt.verify(tmp_path / "out")["problems"] == []


@first
def test_files_of_layers_need_the_whole_model(grid_trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="--dtype does not apply") as raised:
        zckpt.reshard(grid_trained(BOTH) / "run", tmp_path / "out", dtype="fp32")
    assert "give --tp 2 too" in raised.value.hint


@first
def test_files_are_those_of_the_engine(grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained(BOTH) / "run"
    zckpt.convert(run, tmp_path / "run", to="deepspeed")
    paths = sorted(path.relative_to(run) for path in run.glob("*/*"))
    assert sorted(path.relative_to(tmp_path / "run") for path in tmp_path.glob("run/*/*")) == paths
    for path in paths:
        ours, theirs = (
            torch.load(root / path, weights_only=False) for root in (tmp_path / "run", run)
        )
        if path.name.startswith("layer_"):
            assert [*ours] == [*theirs]
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        elif path.name.startswith("mp_rank_"):
            assert ours.keys() == theirs.keys()
            for key in ("param_shapes", "buffer_names", "module", "checkpoint_parallel_dimensions",
                        "mp_world_size", "dp_world_size", "lr_scheduler"):  # fmt: skip
                assert ours[key] == theirs[key], key


@first
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tp": 8}, UnsupportedCheckpoint, "cannot be cut evenly over 8"),
        ({"tp": 1, "pp": 3}, WrongOption, "--pp 3 needs the first layer"),
        ({"tp": 1, "pp_bounds": (0, 4)}, WrongOption, "end before layer"),
        ({"tp": 1, "stage": 2}, WrongOption, "--stage 2 does not go with a pipeline"),
        ({"tp": 1, "stage": 0}, WrongOption, "--stage 0 does not go with a pipeline"),
        (
            {"tp": 1, "rename": [("1", "x")]},
            UnsupportedCheckpoint,
            "no longer have the names of its layers",
        ),
    ],
)
def test_refusals(
    options: Any, error: type[ZckptError], said: str, grid_trained: Trained, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as raised:
        zckpt.reshard(grid_trained(BOTH) / "run", tmp_path / "out", **options)
    assert raised.value.hint
    assert not (tmp_path / "out").exists()


@first
def test_rules_are_needed_for_more_tensor_ranks(grid_trained: Trained, tmp_path: Path) -> None:
    zckpt.reshard(grid_trained(BOTH) / "run", tmp_path / "one", tp=1, pp=1)
    for path in tmp_path.glob("one/*/mp_rank_*"):
        value = torch.load(path, weights_only=False)
        del value["universal_checkpoint_info"]
        torch.save(value, path)
    with pytest.raises(MissingData, match="nothing says how"):
        zckpt.reshard(tmp_path / "one", tmp_path / "two", tp=2)
    assert not (tmp_path / "two").exists()
