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
TIED = "tied_modules.embed.weight/"
"""Each stage has a copy of it, with its own optimizer states."""
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


def is_piped(run: Path) -> bool:
    return package.read(run).run.origin.pp == 2


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
            if not (
                name.startswith(TIED) and is_piped(whole)
            ):  # the other stage's, which has the same here
                expected[mask] = before[f"{parameter}/param"][mask] if slot == "master" else 0
        assert (after[name] == expected).all(), name
    assert false
    assert not exact & false
    assert {name.rpartition("/")[2] for name in false} == {"master", "exp_avg", "exp_avg_sq"}
    if "mp_rank_02" not in "".join(path.name for path in whole.rglob("*")):  # of one axis
        is_tensor = not any(whole.rglob("layer_06-model_states.pt"))
        assert bool(exact) == is_tensor
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
    assert f"the values of {layer}.norm.weight/" in caught.value.hint
    assert "in the lost file are unknown" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def moments_of(run: Path, lost: str) -> list[torch.Tensor]:
    (path,) = run.rglob(lost)
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    return [each["exp_avg"] for each in state["state"].values()]


def moved_moments(run: Path, pattern: str) -> None:
    for path in run.rglob(pattern):
        state = torch.load(path, weights_only=False)
        for each in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            each["exp_avg"] += 1
        torch.save(state, path)


@pytest.mark.parametrize("dp", [0, 1])
def test_moments_that_have_drifted(dp: int, tmp_path: Path) -> None:
    """No copy of the lost ones can be compared. Those that are left on the same rank can be."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=2, pp=1)
    moved_moments(tmp_path / "whole", "*_mp_rank_01_optim_states.pt")
    run = without(tmp_path / "whole", f"bf16_zero_pp_rank_{dp}_mp_rank_01_optim_states.pt")
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(run, tmp_path / "mended", rebuild=BOTH)
    assert "in the lost file are unknown" in caught.value.hint
    assert "/exp_avg" in caught.value.hint
    assert not (tmp_path / "mended").exists()


@pytest.mark.parametrize("mp", [0, 1])
def test_moments_of_a_tied_layer(mp: int, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Another stage's go on with both, and are not exact, since the engine lets them drift."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    moved_moments(tmp_path / "whole", "*_mp_rank_01_optim_states.pt")
    whole = package.read(tmp_path / "whole")
    copies = (*whole.entries.values(), *whole.replicas)
    (lost,) = {
        Path(each.extent.file).name
        for copy in copies
        if copy.name == f"{TIED}exp_avg" and (copy.axis == "stage") == bool(mp)
        for each in list(copy.fragments)[:1]
    }
    run = without(tmp_path / "whole", lost)
    refused = zckpt("mend", run, tmp_path / "mended")
    assert refused.code == 1
    assert "`--rebuild masters --rebuild moments=zero` writes made-up values" in refused.err
    report = package.mend(run, tmp_path / "mended", rebuild=BOTH)
    assert {f"{TIED}{slot}" for slot in ("master", "exp_avg", "exp_avg_sq")} <= {*told(report)}
    by = {each["tensor"]: each["by"] for each in listed(tmp_path / "mended")}
    assert by[f"{TIED}exp_avg"] == by[f"{TIED}master"] == "made-up"
    assert package.verify(tmp_path / "mended")["equal"]


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
    doubled(older, "layer_*")
    doubled_masters(older)
    assert not package.verify(older, tmp_path / "whole")["equal"]
    package.mend(run, tmp_path / "mended", older=older)
    assert package.verify(tmp_path / "mended", tmp_path / "whole")["equal"]


def doubled(run: Path, *patterns: str) -> None:
    """Doubles the weights of layers."""
    for path in (each for pattern in patterns for each in run.rglob(pattern)):
        state = torch.load(path, weights_only=False)
        for tensor in filter(torch.is_floating_point, state.values()):
            tensor *= 2
        torch.save(state, path)


def doubled_masters(run: Path) -> None:
    for path in run.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.data *= 2
        torch.save(state, path)


REST = ("layer_0[34]-*", "layer_06-model_01-*")


@pytest.mark.parametrize("others", [REST, REST[:1], REST[1:]])
def test_a_layer_of_averaged_weights(others: tuple[str, ...], tmp_path: Path) -> None:
    """The program saves other weights than it trains: the masters do not show the lost ones."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=2, pp=2)
    doubled(tmp_path / "whole", *others)
    run = without(tmp_path / "whole", OF_RANK)
    report = package.mend(run, dry_run=True)
    assert {line["state"] for line in report["lost"] if line["tensors"]} >= {"gone"}
    assert told(report)["6.fused.weight/param"] == "gone"
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(run, tmp_path / "mended", rebuild=BOTH)
    assert "is lost for good" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def test_a_layer_whose_other_copy_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zckpt: Callable[..., Result]
) -> None:
    """It was read for the lost file: no older one is asked for, and the error is in the report."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=2, pp=2)
    (path,) = (tmp_path / "whole").rglob(OF_RANK.replace("model_00", "model_01"))
    state = torch.load(path, weights_only=False)
    state["dense.weight"] = state["dense.weight"][:, :5].clone()
    torch.save(state, path)
    run = without(tmp_path / "whole", OF_RANK)
    refused = zckpt("mend", run, tmp_path / "mended")
    assert refused.code == 1
    assert f"lacks {OF_RANK}" in refused.err
    assert "--older" not in refused.err
    assert "--older" not in zckpt("verify", run).out
    others = zckpt("mend", run, tmp_path / "mended", "--older", tmp_path / "whole").err
    assert "has no file of the lost layer" not in others
    monkeypatch.chdir(tmp_path)  # there goes the page
    said = zckpt("report", run).out
    assert "the rest was not read, because of the missing files above: " in said
    assert "6.dense.weight has shape (14, 5) in its layer's file, but (14, 8)" in said


@pytest.mark.parametrize("averaged", ["whole", "older"])
def test_an_older_layer_of_averaged_weights(averaged: str, tmp_path: Path) -> None:
    """The checkpoint's other layers, or the older checkpoint, show that masters are no weights."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    older = shutil.copytree(tmp_path / "whole", tmp_path / "older")
    doubled(tmp_path / averaged, "layer_04-*")
    run = without(tmp_path / "whole", LAYER)
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(run, tmp_path / "mended", older=older, rebuild=BOTH)
    assert "is lost for good" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def test_a_layer_with_buffers(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Running means change, so those of an older checkpoint are made up."""
    package.reshard(DATA, tmp_path / "whole", dp=2, tp=1, pp=2)
    run = without(tmp_path / "whole", LAYER.replace("06", "05"))
    refused = zckpt("mend", run, tmp_path / "mended", "--older", tmp_path / "whole")
    assert refused.code == 1
    assert "`--rebuild model` writes made-up values" in refused.err
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
