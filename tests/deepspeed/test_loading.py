"""An engine that loads without a copy holds what it would load from a resharded directory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt

from ..engines import deepspeed
from ..engines.cases import CASES, STAGE_0, Case
from ..engines.client import CLASSES
from ..formats.deepspeed.test_reshard import MOVES, Move, assert_same_state, engine_config

Trained = Callable[[Case], Path]
OBJECTS = {"allow_object": CLASSES}
QUICK = (
    *(
        "z2_dp2_bf16-dp1",
        "z1_dp2_bf16-dp3",
        "z2_dp2_bf16-dp3",
        "z3_dp2_bf16-dp1",
        "z3_dp2_bf16-dp3",
    ),
    *("z2_dp2_fp32-dp3", "z2_dp2_fp16_dynamic-dp3", "z3_dp3_bf16-dp2-z1", "z1_dp3_bf16-dp2-z3"),
    *("z3_dp3_three_groups-dp4", "z2_dp2_client_state-dp3"),
)
"""The beginnings of the names of those that the default run takes."""
KIND = re.compile(r"z\d_dp\d+_")  # stage and size, before the kind


def every_move() -> list[Any]:
    """The default run takes the quick ones, `-m engines` the first of each kind of case too."""
    seen: set[str] = set()
    rows = []
    for move in MOVES:
        kind = KIND.sub("", move.case)
        marks = [pytest.mark.matrix if kind in seen else pytest.mark.engines]
        if is_quick(move):
            marks = [pytest.mark.engines, pytest.mark.first]
        seen.add(kind)
        rows.append(pytest.param(move, id=move.name, marks=marks))
    return rows


def is_quick(move: Move) -> bool:
    return f"{move.name}-".startswith(tuple(f"{name}-" for name in QUICK))


@pytest.mark.parametrize("move", every_move())
def test_it_is_what_a_resharded_directory_gives(
    move: Move, trained: Trained, tmp_path: Path
) -> None:
    case = CASES[move.case]
    source = trained(case) / "run"
    if move.through:
        source = tmp_path / "universal"
        zckpt.convert(trained(case) / "run", source)
    if move.dtype:
        case = dataclasses.replace(case, dtype=move.dtype)
    config = engine_config(case, move)
    zckpt.reshard(source, tmp_path / "out", dp=move.dp, config=config, **OBJECTS, **move.options)
    sizes = {"dp": move.dp, "stage": move.stage, "config": move.config}
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", **sizes)
    load = {**case.load, "without_copy": True, **OBJECTS}
    loaded = deepspeed.resume(case, source, tmp_path / "loaded", **sizes, load=load)
    for each in (copied, loaded):  # the tests' files lack what their engine has by default
        assert each["client_state"].pop("ds_config")["zero_optimization"]
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]


@pytest.mark.engines
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.first)])
def test_fsdp2_goes_on_in_deepspeed(
    stage: int, torch_trained: Callable[[str, int], Path], tmp_path: Path
) -> None:
    source = torch_trained("fsdp2_as_deepspeed", 2) / "run"
    zckpt.convert(source, tmp_path / "out", to="deepspeed", dp=3, stage=stage)
    case = CASES[f"z{stage}_dp2_as_torch"]
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", dp=3)
    load = {**case.load, "without_copy": True}
    loaded = deepspeed.resume(case, source, tmp_path / "loaded", dp=3, load=load)
    copied["client_state"].pop("ds_config", None)  # the engine's own, if it is loaded directly
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("words", [{"load_module_only": True}, {"load_lr_scheduler_states": False}])
def test_the_arguments_are_those_of_the_engine(
    words: dict[str, Any], trained: Trained, tmp_path: Path
) -> None:
    case = CASES["z2_dp2_warmup"]
    source = trained(case) / "run"
    zckpt.reshard(source, tmp_path / "out", dp=1)
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", dp=1, load=words)
    load = {**words, "without_copy": True}
    loaded = deepspeed.resume(case, source, tmp_path / "loaded", dp=1, load=load)
    copied["client_state"].pop("ds_config")
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("z0_dp2_fp32", 0, marks=pytest.mark.first),
        pytest.param("z0_dp2_bf16", 0, marks=pytest.mark.first),
        ("z0_dp2_fp16_dynamic", 0),
        ("z0_dp2_bf16", 3),
        ("z0_dp2_fp32", 2),
        ("z3_dp2_bf16", 0),
        ("z0_dp2_fused_bf16", 0),
    ],
)
def test_stage_0(name: str, stage: int, trained: Trained, tmp_path: Path) -> None:
    case = {**CASES, **STAGE_0}[name]
    source = trained(case) / "run"
    zckpt.reshard(source, tmp_path / "out", dp=3, stage=stage)
    sizes = {"dp": 3, "stage": stage}
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", **sizes)
    load = {**case.load, "without_copy": True}
    loaded = deepspeed.resume(case, source, tmp_path / "loaded", **sizes, load=load)
    for each in (copied, loaded):
        assert each["client_state"].pop("ds_config")["zero_optimization"]
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "sizes", "version"),
    [
        pytest.param("z2_dp2_bf16", {"dp": 3}, "0.20.0", marks=pytest.mark.first),
        ("z3_dp2_bf16", {"dp": 1}, "0.20.0"),
        ("z1_dp4_sp2_fp32", {"dp": 2, "sp": 2}, ""),
        ("z2_dp2_bf16", {"dp": 2}, "0.20.0"),
    ],
)
def test_where_it_is_refused_a_copy_may_be_written(
    name: str, sizes: dict[str, int], version: str, trained: Trained, tmp_path: Path
) -> None:
    case = CASES[name]
    source = trained(case) / "run"
    zckpt.reshard(source, tmp_path / "out", dp=sizes["dp"])
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", **sizes)
    scratch = tmp_path / "scratch"
    load = {"without_copy": True, "fallback": "copy", "scratch": scratch, "verify": "files"}
    load |= {"version": version} if version else {}
    loaded = deepspeed.resume(case, source, tmp_path / "loaded", **sizes, load=load)
    for each in (copied, loaded):  # the ds_config of the engine, or the source's
        each["client_state"].pop("ds_config", None)
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]
    names = [path.name for path in scratch.glob("*/*")]
    assert any("-dp" in each for each in names) == (sizes["dp"] != case.dp)
