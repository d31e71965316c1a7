"""DeepSpeed directories against what real DeepSpeed held when it wrote them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import UnsupportedCheckpoint

from ...conftest import texts
from ...engines.cases import CASES, Case
from ..contract import FormatContract
from ..equality import (
    assert_is_what_the_engine_held,
    assert_proven,
    load,
    plain,
    same_bits,
)

Trained = Callable[[Case], Path]


def every_case() -> list[Any]:
    """All cases are of the full matrix; the first of each kind is of the default run too.

    Unless DeepSpeed would have to compile an extension for it, which takes minutes.
    """
    seen: set[str] = set()
    rows = []
    for case in CASES.values():
        first = case.kind not in seen and case.extension is None
        marks = [pytest.mark.engines, *([pytest.mark.first] if first else [])]
        seen.add(case.kind)
        rows.append(pytest.param(case, id=case.name, marks=marks))
    return rows


@pytest.mark.parametrize("case", every_case())
def test_universal_is_what_the_engine_held(case: Case, trained: Trained, tmp_path: Path) -> None:
    root = trained(case)
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    report = zckpt.convert(root / "run", tmp_path / "universal")
    assert report["records"]["unchecked"] == 0
    assert report["left_out"] == []
    assert_is_what_the_engine_held(tmp_path / "universal", oracle)
    assert_proven(root / "run", tmp_path / "universal")


@pytest.mark.engines
@pytest.mark.first
def test_a_loss_scale_at_its_minimum(trained: Trained) -> None:
    """An engine that may not go below the scale it starts with, and one that may."""
    case = CASES["z2_dp2_fp16_dynamic"]
    config = {"fp16": {"initial_scale_power": 8, "min_loss_scale": 256}}
    lowest = dataclasses.replace(case, name="z2_dp2_fp16_lowest", config=config)
    for each, is_warned in ((lowest, True), (case, False)):
        run = trained(each) / "run"
        for lines in (zckpt.read(run).notices.warnings, zckpt.stats(run)["problems"]):
            found = any("loss scale is at its minimum, 256" in line for line in texts(lines))
            assert found == is_warned


@pytest.mark.parametrize("what", ["MiCS", "NVMe, by its config", "NVMe, by its files"])
def test_what_is_refused_by_name(what: str, example: Path, tmp_path: Path) -> None:
    (tag,) = (path for path in example.iterdir() if path.is_dir())
    if "files" in what:
        (tag / "offloaded_tensors" / "rank00").mkdir(parents=True)
    for path in tag.glob("*_states.pt"):
        state = torch.load(path, weights_only=False)
        if what == "MiCS" and "optim" in path.name:
            counts = state["optimizer_state_dict"]["partition_count"]
            state["optimizer_state_dict"]["partition_count"] = [2] * len(counts)
        if "config" in what:
            offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/mnt"}}
            state["ds_config"]["zero_optimization"] |= offload
        torch.save(state, path)
    with pytest.raises(UnsupportedCheckpoint, match=what.partition(",")[0]) as raised:
        zckpt.convert(example, tmp_path / "out")
    assert raised.value.hint
    assert not (tmp_path / "out").exists()


def test_a_second_name_of_a_weight_that_was_left_out(example: Path, tmp_path: Path) -> None:
    """`exclude_frozen_parameters` keeps the second name of a tied frozen weight (LoRA, 0.19.8)."""
    run = shutil.copytree(example, tmp_path / "lora")
    (path,) = run.glob("*/mp_rank_00_model_states.pt")
    model = torch.load(path, weights_only=False)
    model["module"]["tied.weight"] = model["module"].pop("frozen.weight")
    del model["module"]["frozen.bias"]
    model["shared_params"]["tied.weight"] = "frozen.weight"
    model["frozen_param_shapes"] = model["frozen_param_fragments"] = None
    torch.save(model, path)
    report = zckpt.convert(run, tmp_path / "universal")
    assert any(line.startswith("tied.weight: a second name") for line in texts(report["left_out"]))
    verified = zckpt.verify(run, against=tmp_path / "universal", gather=True)
    assert verified["equal"], verified["problems"]


class TestContract(FormatContract):
    format = "deepspeed"

    @pytest.fixture
    def checkpoint(self, example: Path) -> Path:
        return example


@pytest.mark.engines
@pytest.mark.first
class TestContractStage3(FormatContract):
    format = "deepspeed"

    @pytest.fixture
    def checkpoint(self, trained: Trained) -> Path:
        return trained(CASES["z3_dp2_bf16"]) / "run"


@pytest.mark.engines
@pytest.mark.first
class TestWherePeersAreSilentlyWrong:
    """Cases in which DeepSpeed's own converters give no error and a wrong result (0.19.8)."""

    def converted(self, name: str, trained: Trained, tmp_path: Path) -> tuple[Any, Any]:
        root = trained(CASES[name])
        zckpt.convert(root / "run", tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        return load(tmp_path / "universal"), oracle

    @pytest.mark.parametrize("name", ["z1_dp2_round_robin", "z2_dp3_round_robin"])
    def test_round_robin_is_undone(self, name: str, trained: Trained, tmp_path: Path) -> None:
        tensors, oracle = self.converted(name, trained, tmp_path)
        for parameter in oracle["trainable"]:
            for slot in ("master", "exp_avg", "exp_avg_sq"):
                key = f"{parameter}/{slot}"
                assert same_bits(tensors[key], oracle["tensors"][key]), key

    @pytest.mark.parametrize("name", ["z1_dp2_bf16", "z2_dp2_bf16", "z3_dp2_bf16"])
    def test_buffers_are_kept(self, name: str, trained: Trained, tmp_path: Path) -> None:
        tensors, oracle = self.converted(name, trained, tmp_path)
        assert oracle["buffers"]
        for buffer, value in oracle["buffers"].items():
            assert value.any(), "a buffer that training changed"
            assert same_bits(tensors[f"{buffer}/param"], value)

    @pytest.mark.parametrize("name", ["z1_dp2_bf16", "z2_dp2_bf16", "z3_dp2_bf16"])
    def test_frozen_weights_are_kept(self, name: str, trained: Trained, tmp_path: Path) -> None:
        tensors, oracle = self.converted(name, trained, tmp_path)
        assert oracle["frozen"]
        for parameter in oracle["frozen"]:
            key = f"{parameter}/param"
            assert same_bits(tensors[key], oracle["tensors"][key])

    def test_stage_3_groups_keep_their_own_hyper_parameters(self, trained: Trained) -> None:
        root = trained(CASES["z3_dp2_bf16"])
        expected = torch.load(root / "oracle.pt", weights_only=False)["groups"]
        rates = {group["lr"] for group in expected}
        decays = {group["weight_decay"] for group in expected}
        assert (len(rates), len(decays)) == (len(expected), len(expected)), "groups that differ"
        groups = zckpt.read(root / "run").groups
        assert groups is not None
        for group, own in zip(groups, expected, strict=True):
            assert {key: plain(value) for key, value in group.items()} == {
                key: plain(value) for key, value in own.items() if key not in ("params", "step")
            }

    @pytest.mark.parametrize("name", ["z2_dp3_amsgrad", "z3_dp3_amsgrad"])
    def test_amsgrad_keeps_its_third_moment(
        self, name: str, trained: Trained, tmp_path: Path
    ) -> None:
        tensors, oracle = self.converted(name, trained, tmp_path)
        for parameter in oracle["trainable"]:
            key = f"{parameter}/max_exp_avg_sq"
            assert same_bits(tensors[key], oracle["tensors"][key])

    def test_weights_left_out_by_the_user_are_named(self, trained: Trained) -> None:
        for name in ("z2_dp2_no_frozen", "z3_dp2_no_frozen"):
            warnings = zckpt.read(trained(CASES[name]) / "run").notices.warnings
            assert any("exclude_frozen_parameters" in warning for warning in texts(warnings))


@pytest.mark.engines
@pytest.mark.first
class TestDirectories:
    """A run directory, a tag directory, a run without `latest`, more ranks than ten."""

    def test_tag_directory(self, trained: Trained) -> None:
        run = trained(CASES["z2_dp2_bf16"]) / "run"
        assert zckpt.read(run / "global_step3").source == zckpt.read(run).source

    def test_run_without_latest_and_one_tag(self, trained: Trained, tmp_path: Path) -> None:
        run = shutil.copytree(trained(CASES["z2_dp2_bf16"]) / "run", tmp_path / "run")
        (run / "latest").unlink()
        assert zckpt.read(run).source["tag"] == "global_step3"

    def test_ranks_are_sorted_as_numbers(self, trained: Trained) -> None:
        manifest = zckpt.read(trained(CASES["z3_dp12_many_ranks"]) / "run")
        ranks = [file for file in manifest.files.paths if "optim_states" in file]
        assert [f"rank_{rank}_" in file for rank, file in enumerate(ranks)] == [True] * 12


@pytest.mark.parametrize(("counted", "warned"), [(5, True), (6, False), (7, False), (20, False)])
def test_an_optimizer_that_is_ahead_of_the_engine(
    counted: int, warned: bool, example: Path, tmp_path: Path
) -> None:
    """Optimizer files of a later save. The engine may be ahead of step 7, and behind by one."""
    path = example / "global_step7" / "mp_rank_00_model_states.pt"
    value = torch.load(path, weights_only=False)
    torch.save({**value, "global_steps": counted}, path)
    for report in (zckpt.convert(example, tmp_path / "target"), zckpt.verify(example)):
        lines = [line for line in texts(report["warnings"]) if "different saves" in line]
        assert bool(lines) == warned
        for line in lines:
            assert f"{path} counts 5 steps" in line
            assert "in bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt has step 7" in line
