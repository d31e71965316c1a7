"""Runs whose ranks share sequences (Ulysses, ALST): names, sizes, and what DeepSpeed resumes."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.grid import Grid, GridPlace
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    WrongOption,
    ZckptError,
)
from zckpt.formats.deepspeed_states.engine import TargetEngine
from zckpt.formats.options import options_of
from zckpt.judging.loads import batch_changes

from ...conftest import texts
from ...engines import deepspeed
from ...engines.cases import CASES, Case
from ..equality import assert_proven
from .test_reshard import assert_same_state

Trained = Callable[[Case], Path]
DATA = Path(__file__).parents[2] / "data"
OLD_1, OLD_3 = (DATA / f"deepspeed-0.18.2-{name}" for name in ("z1_dp4_sp2", "z3_dp2_sp2"))
"""Real files of 0.18.2, in whose names are the ranks in the sequence."""
OLDER, DIMENSIONS = "deepspeed-0.18", "checkpoint_parallel_dimensions"


def copied(root: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a run, with `change` made to each model file."""
    run = shutil.copytree(root / "run", target)
    for path in run.glob("*/*model_states.pt"):
        model = torch.load(path, weights_only=False)
        change(model)
        torch.save(model, path)
    return run


def shown(run: Path) -> dict[str, Any]:
    return zckpt.inspect(zckpt.read(run))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("global_step*/*.pt"))


# -- the real engine


@pytest.mark.engines
@pytest.mark.parametrize(
    ("source", "dp", "sp", "stage"),
    [
        pytest.param("z2_dp2_sp2_fp32", 4, 2, None, marks=pytest.mark.first),
        ("z3_dp2_sp2_fp32", 1, 1, None),
        ("z3_dp4_sp2_fp32", 4, 4, None),
        ("z1_dp4_sp2_fp32", 3, 1, None),
        ("z1_dp4_sp2_fp32", 2, 2, 2),
        (OLD_3.name, 4, 2, None),
        (OLD_1.name, 1, 1, None),
    ],
)
def test_the_engine_resumes(
    source: str, dp: int, sp: int, stage: int | None, trained: Trained, tmp_path: Path
) -> None:
    """0.19.8 loads all, and loses as the run that went on; 0.18.2 does not clip by default."""
    is_old = source.startswith("deepspeed-")
    case = CASES[source.removeprefix("deepspeed-0.18.2-") + "_fp32" if is_old else source]
    root = DATA / source if is_old else trained(case)
    before = torch.load(root / "oracle.pt", weights_only=False)
    zckpt.reshard(root / "run", tmp_path / "resharded", dp=dp, sp=sp, stage=stage)
    assert_proven(root / "run", tmp_path / "resharded")
    config = {"gradient_clipping": 0.0} if is_old else None
    case = dataclasses.replace(case, dp=dp, sp=sp)
    after = deepspeed.resume(case, tmp_path / "resharded", tmp_path, stage=stage, config=config)
    assert_same_state(before, after, weights=True)
    assert after["losses"] == pytest.approx(before["losses"], rel=0, abs=1e-5)


# -- names


def test_what_the_names_of_older_releases_show() -> None:
    for root, dp, stage in ((OLD_1, 4, 1), (OLD_3, 2, 3)):
        run = root / "run"
        report = shown(run)
        assert (report["dp"], report["sp"], report["zero_stage"]) == (dp, 2, stage)
        assert report["dialect"] == OLDER
        assert zckpt.verify(run)["equal"]
        assert all("optim" not in name for name in names(run) if re.search("_1_mp_rank_00", name))


def test_files_have_the_names_that_are_asked_for(tmp_path: Path) -> None:
    zckpt.reshard(OLD_3 / "run", tmp_path / "new", dp=4)
    zckpt.reshard(OLD_3 / "run", tmp_path / "old", dp=8, sp=4, dialect=OLDER)
    zckpt.reshard(OLD_1 / "run", tmp_path / "flat", dp=4, dialect=OLDER)
    kinds = ("model", "optim")
    assert names(tmp_path / "new") == sorted(
        f"zero_pp_rank_{r}_mp_rank_00_{kind}_states.pt" for r in range(4) for kind in kinds
    )
    assert names(tmp_path / "old") == sorted(
        f"zero_pp_rank_{r}_mp_rank_0{r % 4}_{kind}_states.pt" for r in range(8) for kind in kinds
    )
    assert names(tmp_path / "flat") == names(OLD_1 / "run")
    for name, source, sizes in (
        ("new", OLD_3, (4, 2, None)),
        ("old", OLD_3, (8, 4, OLDER)),
        ("flat", OLD_1, (4, 2, OLDER)),
    ):
        report = shown(tmp_path / name)
        assert (report["dp"], report["sp"], report.get("dialect")) == sizes
        assert_proven(source / "run", tmp_path / name)
        (path, *_) = (tmp_path / name).glob("*/*model_states.pt")
        model = torch.load(path, weights_only=False)
        assert (model["mp_world_size"], model["dp_world_size"]) == (1, sizes[0])
        assert model[DIMENSIONS] == {"pp_degree": 1, "tp_degree": sizes[1]}


def test_older_names_are_for_patched_programs(tmp_path: Path) -> None:
    report = zckpt.reshard(OLD_1 / "run", tmp_path / "old", dp=4, dialect=OLDER, dry_run=True)
    assert any("before 0.19.6 loads no checkpoint" in line for line in texts(report["warnings"]))
    report = zckpt.reshard(OLD_1 / "run", tmp_path / "old", dp=4, dry_run=True)
    assert not any("0.19.6" in line for line in texts(report["warnings"]))


def test_like_decides_by_its_files(tmp_path: Path) -> None:
    """A source of another engine gets the names and the sequence ranks of the run."""
    zckpt.convert(OLD_1 / "run", tmp_path / "dcp", to="dcp")
    wanted = {"old": OLD_1 / "run", "new": tmp_path / "new"}
    zckpt.reshard(OLD_1 / "run", tmp_path / "new", dp=4)
    for name, run in wanted.items():
        target = tmp_path / f"like-{name}"
        zckpt.convert(tmp_path / "dcp", target, to="deepspeed", dp=4, like=run)
        assert names(target) == names(run)
        assert shown(target)["sp"] == 2


def test_a_target_keeps_the_sequence_ranks_if_it_can(tmp_path: Path) -> None:
    for dp, sp in ((2, 2), (6, 2), (3, None), (1, None)):
        zckpt.reshard(OLD_1 / "run", tmp_path / f"{dp}", dp=dp)
        assert shown(tmp_path / f"{dp}").get("sp") == sp
    zckpt.convert(OLD_1 / "run", tmp_path / "universal")
    assert shown(tmp_path / "universal")["sp"] == 2
    zckpt.reshard(tmp_path / "universal", tmp_path / "back", dp=8)
    assert shown(tmp_path / "back")["sp"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp": 3, "sp": 2}, "3 data-parallel ranks cannot be divided by --sp 2"),
        ({"dp": 3, "dialect": OLDER}, "applies only to ZeRO runs in which several ranks share"),
        ({"dp": 2, "stage": 0, "dialect": OLDER}, "applies only to ZeRO runs"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match=said) as raised:
        zckpt.reshard(OLD_1 / "run", tmp_path / "out", **options)
    assert raised.value.hint


def test_sequence_ranks_beside_other_ranks() -> None:
    """Of a target of two tensor ranks: no release of DeepSpeed has files of both."""
    source = zckpt.read(OLD_1 / "run")
    apart = replace(source, place=GridPlace(0, Grid(1, 2)))
    assert TargetEngine(apart, options_of({"dp": 2})).sp == 1
    with pytest.raises(WrongOption, match="cannot be combined with pipelines, tensor parallelism"):
        TargetEngine(apart, options_of({"dp": 2, "sp": 2}))
    with pytest.raises(WrongOption, match="--sp does not apply"):
        zckpt.reshard(DATA / "zckpt-0.1-pp2_tp2" / "run", "out", dp=2, sp=2)


# -- sizes that files state


def stating(run: Path, target: Path, **dimensions: Any) -> Path:
    """The run under later names, whose model files state these dimensions."""
    zckpt.reshard(run, target / "later" / "run", dp=4)
    stated = {DIMENSIONS: {"pp_degree": 1, "tp_degree": 2, **dimensions}}
    return copied(target / "later", target / "changed", lambda model: model.update(stated))


@pytest.mark.parametrize(
    ("dimensions", "error", "said"),
    [
        ({"cp_degree": 2}, UnsupportedCheckpoint, "axes .* does not know: cp_degree 2 .*states "
         "dp_world_size 4, mp_world_size 1, pp_degree 1, tp_degree 2, cp_degree 2"),
        ({"tp_degree": 3}, UnsupportedCheckpoint, "does not know: dp_world_size 4, "
         "mp_world_size 1, pp_degree 1, tp_degree 3; .* dp 4, pp 1 x tp 1"),
        ({"pp_degree": 2}, UnsupportedCheckpoint, "does not know"),
        ({"tp_degree": 10**30}, UnsupportedCheckpoint, "does not know"),
        ({"tp_degree": "two"}, InconsistentCheckpoint, "says pp 1 x tp 'two' .it states"),
        ({"cp_degree": 1}, None, ""),
    ],
)  # fmt: skip
def test_axes_that_are_not_known(
    dimensions: dict[str, Any], error: type[ZckptError] | None, said: str, tmp_path: Path
) -> None:
    """They are no damage: the error says which ones, and all sizes that the files state."""
    run = stating(OLD_1 / "run", tmp_path, **dimensions)
    if error is None:
        assert shown(run)["sp"] == 2
        return
    with pytest.raises(error, match=said) as raised:
        zckpt.read(run)
    assert raised.value.hint
    assert "copy all files again" not in raised.value.hint or error is InconsistentCheckpoint


def test_names_and_contents_that_differ(tmp_path: Path) -> None:
    """0.19.5 writes older names, and states the sequence ranks."""
    both = {"pp_degree": 1, "tp_degree": 2}
    run = copied(OLD_1, tmp_path / "both", lambda model: model.update({DIMENSIONS: both}))
    assert shown(run)["sp"] == 2
    for sp in (1, 4):
        other = {DIMENSIONS: {**both, "tp_degree": sp}}
        run = copied(OLD_1, tmp_path / f"{sp}", lambda model, own=other: model.update(own))
        with pytest.raises(InconsistentCheckpoint, match=f"2 ranks for each.*pp 1 x tp {sp} "):
            zckpt.read(run)


def test_lost_files_are_named(tmp_path: Path) -> None:
    for rank, name in ((1, "1_mp_rank_01"), (2, "2_mp_rank_00"), (3, "3_mp_rank_01")):
        run = shutil.copytree(OLD_1 / "run", tmp_path / f"{rank}")
        (path,) = run.glob(f"*/zero_pp_rank_{name}_optim_states.pt")
        path.unlink()
        with pytest.raises(
            IncompleteCheckpoint, match=f"lacks zero_pp_rank_{name}_optim"
        ) as raised:
            zckpt.read(run)
        assert [*raised.value.paths] == [str(path)]


def test_tensor_ranks_whose_files_are_lost(tmp_path: Path) -> None:
    """Those that are left have the names of sequence ranks; `mp_world_size` shows what they are."""
    run = copied(OLD_3, tmp_path / "run", lambda model: model.update(mp_world_size=2))
    with pytest.raises(IncompleteCheckpoint, match="1 of 2 model ranks"):
        zckpt.read(run)


def test_parts_that_mesh_param_loses(tmp_path: Path) -> None:
    """At stage 3 of 0.19.8, both ranks of a sequence write rank 0's files."""
    run = copied(OLD_3, tmp_path / "run", lambda model: model.update(dp_world_size=1))
    for path in run.glob("*/zero_pp_rank_1_*"):
        path.unlink()
    (path,) = run.glob("*/*optim_states.pt")
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["partition_count"] = 1
    torch.save(state, path)
    with pytest.raises(InconsistentCheckpoint, match="shards of all parameters are lost") as raised:
        zckpt.read(run)
    assert "parallel_state_sp" in raised.value.hint


# -- the run that goes on


def test_ranks_and_batches_of_the_next_run(tmp_path: Path) -> None:
    """The ranks of a sequence are data-parallel ranks, and share their samples."""
    run = tmp_path / "run"
    shutil.copytree(OLD_1 / "run", run)
    (step,) = zckpt.list_checkpoints(run, dp=4)["checkpoints"]
    assert step["sizes"] == {"dp": 4, "sp": 2}
    assert not step["loads"]
    assert "saved with names of files deepspeed-0.18; deepspeed-0.19 is asked for" in texts(
        step["obstacles"]
    )
    zckpt.reshard(run, tmp_path / "later", dp=4)
    resumed = zckpt.auto_resume(tmp_path / "later", dp=4, single=True)
    assert resumed is not None
    assert not resumed.report["written"]


def test_batches_of_the_next_run(tmp_path: Path) -> None:
    """12 samples on 4 ranks, of which two each have the same: 6 for each sequence.

    On 2 ranks DeepSpeed accumulates twice without being told.
    """
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 6}
    run = copied(OLD_1, tmp_path / "run", lambda model: model.update(ds_config=config))
    for dp, sp, micro in ((8, None, 3), (2, None, None), (8, 4, None), (3, None, 4)):
        report = zckpt.reshard(run, tmp_path / "out", dp=dp, sp=sp, dry_run=True)
        said = [line for line in texts(report["warnings"]) if "global batch" in line]
        word = f"set train_micro_batch_size_per_gpu={micro} to keep a global batch of 12"
        assert said == ([] if micro is None else [word])
        resumed = [
            line.message for line in batch_changes(zckpt.read(run), {"dp": dp, "sp": sp}, ())
        ]
        assert resumed == said
    report = zckpt.reshard(run, tmp_path / "out", dp=10, dry_run=True)
    word = "a global batch of 12 cannot be divided among 10 ranks, of which 2 share a sequence"
    assert any(word in line for line in texts(report["warnings"]))


def test_gradients_of_another_stage(tmp_path: Path) -> None:
    report = zckpt.reshard(OLD_1 / "run", tmp_path / "3", dp=2, stage=3, dry_run=True)
    assert any("2 times as large as those of stage 3" in line for line in texts(report["warnings"]))
    for options in ({"dp": 2, "stage": 2}, {"dp": 1, "stage": 3}):
        report = zckpt.reshard(OLD_1 / "run", tmp_path / "other", dry_run=True, **options)
        assert not any("as large" in line for line in texts(report["warnings"]))
