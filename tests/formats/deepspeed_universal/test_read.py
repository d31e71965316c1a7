"""Universal directories, read: ours, DeepSpeed's own converter's, damaged ones."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import ZckptError
from zckpt.errors import InconsistentCheckpoint

from ... import faults
from ...conftest import texts
from ...engines.cases import CASES
from ...engines.client import CLASSES
from ...manifests import changed
from ..contract import FormatContract
from ..equality import assert_is_what_the_engine_held, load, same_bits
from .directories import (
    FORMAT,
    TAG,
    Trained,
    Zckpt,
    convert,
    first_of_each,
    merge,
    rename_parameter,
    same_universal,
    with_info,
)


class TestContract(FormatContract):
    format = FORMAT

    @pytest.fixture
    def checkpoint(self, example: Path, tmp_path: Path) -> Path:
        return convert(example, tmp_path / "merged")


class TestContractStage3(FormatContract):
    format = FORMAT

    @pytest.fixture
    def checkpoint(self, example: Path, tmp_path: Path) -> Path:
        return convert(example, tmp_path / "merged", stage=3)


class TestRoundTrip:
    """deepspeed -> deepspeed-universal -> universal is deepspeed -> universal."""

    def test_example(self, example: Path, tmp_path: Path) -> None:
        zckpt.convert(example, tmp_path / "straight")
        report = zckpt.convert(convert(example, tmp_path / "merged"), tmp_path / "around")
        assert report["records"]["unchecked"] == 0
        same_universal(tmp_path / "straight", tmp_path / "around")

    def test_example_by_way_of_stage_3(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged", stage=3)
        zckpt.convert(example, tmp_path / "straight")
        zckpt.convert(merged, tmp_path / "around")
        straight, around = load(tmp_path / "straight"), load(tmp_path / "around")
        for name, tensor in around.items():
            assert same_bits(tensor, straight[name]), name
        parameters = zckpt.read(example).parameters
        assert zckpt.read(merged).parameters == parameters
        trainable = {name for name, parameter in parameters.items() if parameter.trainable}
        assert straight.keys() - around.keys() == {f"{name}/param" for name in trainable}

    def test_universal_goes_back(self, example: Path, tmp_path: Path) -> None:
        """What came of this format is resharded to it; the files are the same."""
        merged = convert(example, tmp_path / "merged")
        zckpt.convert(merged, tmp_path / "universal")
        zckpt.reshard(tmp_path / "universal", tmp_path / "back")
        names = [path.relative_to(merged) for path in sorted(merged.rglob("*")) if path.is_file()]
        assert names
        for name in names:
            assert (merged / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name


class TestBadInput:
    @pytest.fixture
    def merged(self, example: Path, tmp_path: Path) -> Path:
        return convert(example, tmp_path / "merged")

    def refused(self, zckpt: Zckpt, merged: Path, *says: str) -> None:
        for command in (["inspect", merged], ["convert", merged, merged.parent / "target"]):
            ended = zckpt(*command)
            assert (ended.code, ended.out) == (1, "")
            lines = ended.err.splitlines()
            assert len(lines) == 2, ended.err
            assert lines[0].startswith("Error: ")
            for word in says:
                assert word in ended.err
        assert not (merged.parent / "target").exists()

    def folder(self, merged: Path) -> Path:
        return next(path for path in sorted((merged / TAG / "zero").iterdir()) if path.is_dir())

    def test_no_zero_folder(self, merged: Path, zckpt: Zckpt) -> None:
        shutil.rmtree(merged / TAG / "zero")
        self.refused(zckpt, merged, "zero/optimizer_state.pt")

    def test_no_common_file(self, merged: Path, zckpt: Zckpt) -> None:
        (merged / TAG / "zero" / "optimizer_state.pt").unlink()
        self.refused(zckpt, merged, "zero/optimizer_state.pt")

    def test_a_parameter_without_its_master(self, merged: Path, zckpt: Zckpt) -> None:
        folder = self.folder(merged)
        (folder / "fp32.pt").unlink()
        self.refused(zckpt, merged, f"{folder.name}/fp32.pt")

    def test_a_parameter_less(self, merged: Path, zckpt: Zckpt) -> None:
        folder = self.folder(merged)
        shutil.rmtree(folder)
        self.refused(zckpt, merged, f"{folder.name}/fp32.pt")

    def test_a_parameter_more(self, merged: Path, zckpt: Zckpt) -> None:
        shutil.copytree(self.folder(merged), merged / TAG / "zero" / "another")
        self.refused(zckpt, merged, "another")

    def test_no_model_states(self, merged: Path, zckpt: Zckpt) -> None:
        (merged / TAG / "mp_rank_00_model_states.pt").unlink()
        self.refused(zckpt, merged, "no model states")

    def test_a_model_file_missing_between(self, merged: Path, zckpt: Zckpt) -> None:
        path = merged / TAG / "mp_rank_00_model_states.pt"
        path.rename(path.with_name("mp_rank_01_model_states.pt"))
        self.refused(zckpt, merged, f"lacks {path.name}")

    def test_a_frozen_slice_missing(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        merged = convert(example, tmp_path / "merged", stage=3)
        (merged / TAG / "zero_pp_rank_3_mp_rank_00_model_states.pt").unlink()
        self.refused(zckpt, merged, "3 of 4 model files")

    def test_swapped_states(self, merged: Path, zckpt: Zckpt) -> None:
        folder = self.folder(merged)
        faults.swap_files(folder / "exp_avg.pt", folder / "exp_avg_sq.pt", renamed=False)
        self.refused(zckpt, merged, "was saved as exp_avg_sq.pt: files of two states are swapped")

    def test_swapped_model_files(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        """They have the frozen weights of stage 3."""
        merged = convert(example, tmp_path / "merged", stage=3)
        one, other = sorted((merged / TAG).glob("zero_pp_rank_[12]_*"))
        faults.swap_files(one, other, renamed=False)
        self.refused(zckpt, merged, f"was saved as {other.name}")

    @pytest.mark.parametrize("keep", [0, 1, 100, -1, -30])
    @pytest.mark.parametrize("name", ["fp32.pt", "step.pt", "../optimizer_state.pt"])
    def test_a_short_file(self, keep: int, name: str, merged: Path, zckpt: Zckpt) -> None:
        path = self.folder(merged) / name
        path.write_bytes(path.read_bytes()[:keep])
        self.refused(zckpt, merged, os.path.basename(name))

    def test_a_flipped_bit(self, merged: Path, zckpt: Zckpt) -> None:
        path = self.folder(merged) / "exp_avg.pt"
        tensor = torch.load(path)["param"].flatten()
        data = bytearray(path.read_bytes())
        data[data.index(tensor.numpy().tobytes())] ^= 1
        path.write_bytes(data)
        ended = zckpt("convert", merged, merged.parent / "target")
        assert ended.code == 1
        assert "exp_avg.pt" in ended.err
        assert "damaged" in ended.err

    def test_another_shape(self, merged: Path, zckpt: Zckpt) -> None:
        path = self.folder(merged) / "exp_avg.pt"
        torch.save({"param": torch.zeros(3, 5), "cat_dim": 0}, path)
        self.refused(zckpt, merged, "exp_avg.pt", "[3, 5]")
        path = self.folder(merged) / "fp32.pt"
        torch.save({"param": torch.zeros(3, 5), "cat_dim": 0}, path)
        self.refused(zckpt, merged, "fp32.pt", "[3, 5]")

    def test_malformed(self, merged: Path, zckpt: Zckpt) -> None:
        path = merged / TAG / "mp_rank_00_model_states.pt"
        value = torch.load(path, weights_only=False)
        value["param_shapes"] = [3]
        torch.save(value, path)
        self.refused(zckpt, merged, "malformed")

    def test_the_file_of_another_state(self, merged: Path, zckpt: Zckpt) -> None:
        """Also if nothing states how it was called when it was saved."""
        folder = self.folder(merged)
        whole, step = torch.load(folder / "exp_avg.pt"), torch.load(folder / "step.pt")
        torch.save(whole, folder / "step.pt")
        self.refused(zckpt, merged, "step.pt", "instead of a step")
        torch.save(step, folder / "step.pt")
        torch.save(step, folder / "fp32.pt")
        self.refused(zckpt, merged, "fp32.pt", "shape []")

    def test_no_tensor(self, merged: Path, zckpt: Zckpt) -> None:
        for value in ({"cat_dim": 0}, {"param": 3}, "text", [1]):
            torch.save(value, self.folder(merged) / "fp32.pt")
            self.refused(zckpt, merged, "fp32.pt", "no tensor")

    @pytest.mark.parametrize("name", ["../../../outside", "a/b", "..", ".", "", "a\0b", "x" * 256])
    def test_a_parameter_that_is_no_folder_name(
        self, name: str, merged: Path, zckpt: Zckpt
    ) -> None:
        rename_parameter(merged / TAG / "mp_rank_00_model_states.pt", name)
        self.refused(zckpt, merged, "cannot be a folder's name")

    @pytest.mark.parametrize("name", ["../../../outside", "a/b", "optimizer_state.pt", "x" * 256])
    def test_writing_a_parameter_that_is_no_folder_name(
        self, name: str, example: Path, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        rename_parameter(example / TAG / "mp_rank_00_model_states.pt", name)
        before = sorted(tmp_path.parent.rglob("*"))
        ended = zckpt("convert", example, tmp_path / "target", "--to", FORMAT)
        assert ended.code == 1
        assert "cannot be the name" in ended.err
        assert sorted(tmp_path.parent.rglob("*")) == before

    @pytest.mark.parametrize("tag", ["../outside", "..", "a/../b", "latest_universal"])
    def test_writing_a_tag_that_is_no_folder_name(
        self, tag: str, example: Path, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        assert zckpt("convert", example, tmp_path / "universal").code == 0
        with changed(tmp_path / "universal") as manifest:
            manifest["source"]["tag"] = tag
        ended = zckpt("convert", tmp_path / "universal", tmp_path / "target", "--to", FORMAT)
        assert ended.code == 1
        assert "tag" in ended.err

    @pytest.mark.parametrize("tag", ["../merged", "gone", "", ".", "a\0b"])
    def test_a_pointer_to_nowhere(self, tag: str, merged: Path, zckpt: Zckpt) -> None:
        (merged / "latest_universal").write_text(tag)
        self.refused(zckpt, merged, "latest_universal")

    def test_patterns_that_do_not_fit(self, example: Path, tmp_path: Path) -> None:
        for info in (
            {"vocabulary_parameter_patterns": ["(("]},
            {"parameter_with_sub_params": [{"patterns": [".*"], "shape": [0], "partition_dim": 0}]},
            {"parameter_with_sub_params": [{"patterns": [".*"]}]},
        ):
            source = with_info(example, tmp_path / "universal", info)
            with pytest.raises(ZckptError, match="universal_checkpoint_info"):
                convert(source, tmp_path / "target")
            shutil.rmtree(source)


class TestSteps:
    """A step of its own for every parameter."""

    @pytest.fixture
    def merged(self, example: Path, tmp_path: Path) -> Path:
        return convert(example, tmp_path / "merged")

    def test_differing_ones_of_a_group(self, merged: Path, tmp_path: Path) -> None:
        """DeepSpeed writes none of them. They are refused, unless the user wants to keep them."""
        folders = [path for path in sorted((merged / TAG / "zero").iterdir()) if path.is_dir()]
        torch.save(torch.tensor(2.0), folders[0] / "step.pt")
        differ = rf"differ within a group: 2 \(step.pt of {folders[0].name}\), 7 \("
        with pytest.raises(ZckptError, match=differ):
            zckpt.convert(merged, tmp_path / "refused")
        (problem,) = zckpt.verify(merged)["problems"]
        assert re.search(differ, problem["message"])
        assert "--step-policy max|min|keep|N" in problem["hint"]
        manifest = zckpt.read(merged, step_policy="keep")
        assert manifest.parameters[folders[0].name].step == 2
        assert manifest.parameters[folders[1].name].step == 7
        assert manifest.step is None
        places = {line.step: line.where for line in manifest.run.steps if line.truth}
        assert folders[0].name in places[2]
        with pytest.raises(ZckptError, match="one step for"):
            convert(merged, tmp_path / "target", step_policy="keep")
        assert zckpt.read(merged, step_policy="max").step == 7
        assert zckpt.read(merged, step_policy="9").parameters[folders[0].name].step == 9

    def test_an_int_stays_one(self, merged: Path, tmp_path: Path) -> None:
        for folder in (merged / TAG / "zero").iterdir():
            if folder.is_dir():
                torch.save(7, folder / "step.pt")
        again = convert(merged, tmp_path / "again")
        steps = [torch.load(path) for path in again.rglob("step.pt")]
        assert steps
        assert all(type(step) is int and step == 7 for step in steps)

    def test_a_tensor_of_one_element_stays_one(self, merged: Path, tmp_path: Path) -> None:
        for path in merged.rglob("step.pt"):
            torch.save(torch.tensor([7.0]), path)
        again = convert(merged, tmp_path / "again")
        steps = [torch.load(path) for path in again.rglob("step.pt")]
        assert steps
        assert all(step.shape == (1,) and step.item() == 7 for step in steps)

    def test_a_lost_one_is_told(self, merged: Path) -> None:
        for path in list(merged.rglob("step.pt")):
            path.unlink()
        manifest = zckpt.read(merged)
        assert manifest.step is None
        assert any("without a step" in warning for warning in texts(manifest.notices.warnings))


MERGED = [
    ("stage 2", "z2_dp3_three_groups"),
    ("stage 3", "z3_dp3_sub_groups"),
    ("BF16_Optimizer", "z1_dp2_bf16_optimizer"),
    ("stage 2", "z1_dp4_bf16"),
    ("stage 2", "z2_dp3_fused_adam"),
    ("stage 2", "z2_dp2_fp32"),
    ("stage 2", "z2_dp2_fp16_dynamic"),
    ("stage 2", "z2_dp3_unused"),
    ("stage 2", "z2_dp3_aligned_round_robin"),
    ("stage 2", "z2_dp2_client_state"),
    ("stage 2", "z2_dp2_lambda"),
    ("stage 3", "z3_dp4_only_padding"),
    ("stage 3", "z3_dp12_many_ranks"),
    ("stage 3", "z3_dp3_fused_adam"),
    ("stage 3", "z3_dp2_fp16_dynamic"),
    ("stage 3", "z3_dp2_client_state"),
]


@pytest.mark.parametrize("name", first_of_each(MERGED))
def test_the_converter_s_directory_is_what_the_engine_held(
    name: str, trained: Trained, tmp_path: Path
) -> None:
    root = trained(CASES[name])
    run = merge(root / "run", tmp_path / "run")
    report = zckpt.convert(run, tmp_path / "universal", format=FORMAT)
    assert report["records"]["unchecked"] == 0
    assert report["left_out"] == []
    assert report["warnings"] == []
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    assert_is_what_the_engine_held(tmp_path / "universal", oracle)
    zckpt.convert(root / "run", tmp_path / "straight")
    same_universal(tmp_path / "straight", tmp_path / "universal")


@pytest.mark.engines
@pytest.mark.first
class TestRoundRobin:
    """DeepSpeed's converter mixes up the parameters of such runs (0.19.8), but not its weights."""

    CASE = CASES["z2_dp3_round_robin"]

    def test_the_converter_s_directory_is_refused(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(self.CASE)
        run = merge(root / "run", tmp_path / "run")
        manifest = zckpt.read(run, format=FORMAT)
        assert any(
            "round_robin_gradients" in warning for warning in texts(manifest.notices.warnings)
        )
        with pytest.raises(InconsistentCheckpoint, match="not the rounded masters"):
            zckpt.convert(run, tmp_path / "universal", format=FORMAT)
        zckpt.convert(run, tmp_path / "universal", format=FORMAT, accept_weights=True)
        tensors = load(tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)["tensors"]
        wrong = [
            name
            for name in oracle
            if name in tensors and not same_bits(tensors[name], oracle[name])
        ]
        assert wrong

    def test_ours_is_right(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(self.CASE)
        merged = convert(root / "run", tmp_path / "merged")
        manifest = zckpt.read(merged)
        assert not any("round_robin" in warning for warning in texts(manifest.notices.warnings))
        zckpt.convert(merged, tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)


@pytest.mark.engines
@pytest.mark.parametrize(
    "name",
    [
        case.name
        for case in CASES.values()
        if not any(word in case.name for word in ("elastic", "nadam", "muon", "odd"))
        if case.stage < 3 or case.optimizer in ("adamw", "adam", "fused adam")
    ],
)
def test_every_case_survives(name: str, trained: Trained, tmp_path: Path) -> None:
    """deepspeed -> deepspeed-universal -> universal is deepspeed -> universal."""
    run = trained(CASES[name]) / "run"
    zckpt.convert(run, tmp_path / "straight")
    merged = convert(run, tmp_path / "merged", allow_object=CLASSES)
    zckpt.convert(merged, tmp_path / "around")
    same_universal(tmp_path / "straight", tmp_path / "around")
