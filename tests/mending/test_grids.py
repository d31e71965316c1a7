"""Lost files of tensor and pipeline ranks: copies and rounded masters are exact, all else typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED
from zckpt.errors import IncompleteCheckpoint

from ..conftest import EXAMPLE, ROOT, Once, Result
from .test_losses import remove, told
from .test_rebuilding import elements, made_up

BOTH = ("masters", "moments=zero")
DATA = ROOT / "tests/data/zckpt-0.1-pp2_tp2/run"
FIRST, LAST = (
    f"bf16_zero_pp_rank_{dp}_mp_rank_0{mp}_optim_states.pt" for dp, mp in ((0, 0), (1, 1))
)
MODEL, LAYER = "mp_rank_01_model_states.pt", "layer_06-model_states.pt"
OF_RANK = "layer_06-model_00-model_states.pt"
SIZES = {"tensor": {"tp": 2, "pp": 1}, "pipeline": {"tp": 1, "pp": 2}, "both": {"tp": 2, "pp": 2}}


@pytest.fixture(params=SIZES)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of two data ranks, with two ranks along one or both of the other axes."""
    package.reshard(DATA, tmp_path / "whole", dp=2, **SIZES[request.param])
    return tmp_path / "whole"


def without(whole: Path, *files: str) -> Path:
    """A copy of a run that has lost these files."""
    run = shutil.copytree(whole, whole.parent / "run")
    remove(run, *files)
    return run


def rows(run: Path) -> dict[str, np.ndarray]:
    """All tensors in fp32, in row-major order also where ranks have columns of them."""
    universal = run.with_suffix(".universal")
    package.convert(run, universal)
    return elements(universal)


def listed(mended: Path) -> list[dict[str, Any]]:
    (path,) = mended.rglob(MENDED)
    records: list[dict[str, Any]] = json.loads(path.read_text())["mended"]
    return records


@pytest.mark.parametrize("lost", [FIRST, LAST])
def test_an_optimizer_file(lost: str, whole: Path, tmp_path: Path) -> None:
    """What another rank has a copy of is exact, and only the rest is made up and listed so."""
    package.mend(without(whole, lost), tmp_path / "mended", rebuild=BOTH)
    before, after = rows(whole), rows(tmp_path / "mended")
    lists = listed(tmp_path / "mended")
    exact = {each["tensor"] for each in lists if each["by"] == "witness"}
    false = {each["tensor"] for each in lists if each["by"] == "made-up"}
    assert before.keys() == after.keys()
    for name, values in before.items():
        parameter, _, slot = name.rpartition("/")
        expected = values.copy()
        if name in false:
            mask = made_up(whole, lost)[name]
            expected[mask] = before[f"{parameter}/param"][mask] if slot == "master" else 0
        assert (after[name] == expected).all(), name
    assert false
    assert not exact & false
    assert {name.rpartition("/")[2] for name in false} == {"master", "exp_avg", "exp_avg_sq"}
    if "mp_rank_02" not in "".join(path.name for path in whole.rglob("*")):  # of one axis
        is_tensor = not any(whole.rglob("layer_06-model_states.pt"))
        assert bool(exact) == (is_tensor or lost == FIRST)
    assert package.verify(tmp_path / "mended")["equal"]


@pytest.mark.parametrize(("lost", "layer"), [(FIRST, 1), (LAST, 6)])
def test_copies_that_have_drifted(lost: str, layer: int, tmp_path: Path) -> None:
    """Nobody knows what the lost rank had of the norms: they are not taken from the other one."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=2, pp=1)
    run = without(tmp_path / "whole", lost)
    (path,) = run.rglob(f"layer_0{layer}-model_01-model_states.pt")
    state = torch.load(path, weights_only=False)
    state["norm.weight"] += 1
    torch.save(state, path)
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(run, tmp_path / "mended", rebuild=BOTH)
    assert (
        f"nothing shows the values that the lost file had of {layer}.norm.weight/"
        in caught.value.hint
    )
    assert not (tmp_path / "mended").exists()


def test_a_layer_of_tensor_ranks(tmp_path: Path) -> None:
    """The other rank's file shows names and shapes, and masters round to the weights."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=2, pp=2)
    run = without(tmp_path / "whole", OF_RANK)
    package.mend(run, tmp_path / "mended")
    assert package.verify(tmp_path / "mended", tmp_path / "whole")["equal"]
    assert {each["by"] for each in listed(tmp_path / "mended")} == {"witness"}
    one, other = (
        torch.load(next(path.rglob(OF_RANK)), weights_only=False)
        for path in (tmp_path / "whole", tmp_path / "mended")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_layer_of_a_pipeline(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Nothing but an older checkpoint shows its names and shapes. The error and `verify` say so."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    run = without(tmp_path / "whole", LAYER)
    refused = zckpt("mend", run, tmp_path / "mended")
    assert refused.code == 1
    assert "an older checkpoint of the run (--older PATH) shows the names" in refused.err
    assert f": zckpt mend {run} DST --older PATH\n" in zckpt("verify", run).out
    other = zckpt("mend", run, tmp_path / "mended", "--older", EXAMPLE)
    assert other.code == 1
    assert (
        f"the older checkpoint {EXAMPLE / 'global_step7'} has no file of the lost layer"
        in other.err
    )
    older = shutil.copytree(tmp_path / "whole", tmp_path / "older")
    (path,) = older.rglob(LAYER)
    state = torch.load(path, weights_only=False)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, path)
    package.mend(run, tmp_path / "mended", older=older)
    assert package.verify(tmp_path / "mended", tmp_path / "whole")["equal"]


def test_a_layer_with_buffers(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Running means change, so those of an older checkpoint are made up."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    run = without(tmp_path / "whole", LAYER.replace("06", "05"))
    refused = zckpt("mend", run, tmp_path / "mended", "--older", tmp_path / "whole")
    assert refused.code == 1
    assert "`--rebuild model` makes up what is lost" in refused.err
    package.mend(run, tmp_path / "mended", older=tmp_path / "whole", rebuild=("model",))
    false = {each["tensor"] for each in listed(tmp_path / "mended") if each["by"] == "made-up"}
    assert false == {"5.running_mean/param", "5.num_batches_tracked/param"}


@pytest.mark.parametrize("older", [True, False])
def test_a_model_file_of_a_stage(older: bool, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """It is refused by its name, and nothing is promised: no file has the stage's counters."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    run = without(tmp_path / "whole", MODEL)
    words = ("--older", tmp_path / "whole") if older else ()
    refused = zckpt("mend", run, tmp_path / "mended", "--rebuild", "model", *words)
    assert refused.code == 1
    assert f"lacks {MODEL}" in refused.err
    assert "zckpt mend" not in zckpt("verify", run).out


def test_a_run_of_earlier_versions(tmp_path: Path) -> None:
    """All files were saved under one name there. A file that stands in is no copied one."""
    run = shutil.copytree(DATA, tmp_path / "run")
    remove(run, FIRST.replace("mp_rank_00", "mp_rank_01"))
    report = package.mend(run, dry_run=True)
    assert {"elsewhere", "made-up"} >= set(told(report).values())
    assert told(report)


# -- real trainings

STEPS = 6


@pytest.fixture(scope="module", params=["tensor_tp2_dp2", "pipe_pp2_dp2"])
def trained(request: pytest.FixtureRequest, once: Once) -> tuple[Any, Path, Path]:
    """The case, a run, and an older checkpoint of it."""
    from ..engines import grids

    case = replace(grids.CASES[request.param], steps=STEPS, learns=True)

    def train(steps: int) -> Path:
        name = f"{request.param}_{steps}_steps"
        return once("mended", name, partial(grids.train, replace(case, steps=steps)))

    return case, train(STEPS), train(STEPS - 2)


def resumed(case: Any, run: Path, root: Path) -> list[float]:
    from ..engines import grids

    losses: list[float] = grids.resume(case, run, root, case.dp)["losses"]
    return losses


@pytest.mark.engines
@pytest.mark.parametrize("moments", ["zero", "older"])
@pytest.mark.parametrize("lost", [FIRST, LAST])
def test_the_engine_goes_on(
    lost: str, moments: str, trained: tuple[Any, Path, Path], tmp_path: Path
) -> None:
    """The first loss is that of the weights, which were not lost, and later ones are near."""
    case, whole, older = trained
    run = shutil.copytree(whole, tmp_path / "run")
    remove(run, lost)
    rebuild = ("masters", f"moments={moments}")
    package.mend(run, tmp_path / "mended", older=older, rebuild=rebuild)
    losses = resumed(case, tmp_path / "mended", tmp_path / "resumed")
    oracle = torch.load(whole.parent / "oracle.pt", weights_only=False)["losses"]
    assert losses[0] == oracle[0]
    assert losses != oracle
    assert losses == pytest.approx(oracle, rel=0.05)


@pytest.mark.engines
def test_weights_are_exact(trained: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """A lost model or layer file: the engine goes on with the losses of the uninterrupted run."""
    case, whole, older = trained
    is_pipeline = case.model == "pipe"
    run = shutil.copytree(whole, tmp_path / "run")
    remove(run, LAYER if is_pipeline else MODEL)
    if is_pipeline:
        package.mend(run, tmp_path / "mended", older=older)
    else:
        package.mend(run, tmp_path / "mended", rebuild=("model",))
    assert package.verify(tmp_path / "mended", whole)["equal"]
    oracle = torch.load(whole.parent / "oracle.pt", weights_only=False)["losses"]
    assert resumed(case, tmp_path / "mended", tmp_path / "resumed") == oracle
