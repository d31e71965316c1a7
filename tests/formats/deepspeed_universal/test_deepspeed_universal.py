"""DeepSpeed's own universal directories: its converter's, read; ours, loaded by its engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zckpt
from zckpt import ZckptError
from zckpt.core.inert import to_json

from ...conftest import Result
from ...engines import deepspeed
from ...engines.cases import CASES, Case
from ..contract import FormatContract
from ..equality import assert_is_what_the_engine_held, load, plain, same_bits

Trained = Callable[[Case], Path]
Zckpt = Callable[..., Result]
FORMAT = "deepspeed-universal"
TAG = "global_step7"  # of examples/run
LOAD = {"checkpoint": {"load_universal": True}}


def convert(source: Path, target: Path, **options: Any) -> Path:
    zckpt.convert(source, target, to=FORMAT, **options)
    return target


def warnings(source: Path, target: Path, **options: Any) -> str:
    made = zckpt.convert(source, target, to=FORMAT, **options, dry_run=True)
    return "\n".join(made["warnings"])


# -- the contract, without an engine


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


def same_universal(a: Path, b: Path) -> None:
    """Two of our own universal checkpoints, but for where they came from."""
    one, other = (json.loads((path / "manifest.json").read_text()) for path in (a, b))
    for key in ("parameters", "entries", "groups", "buffers", "optimizer", "step", "tuples"):
        assert one[key] == other[key], key
    assert list(one["parameters"]) == list(other["parameters"])
    assert one["state"] == other["state"]
    tensors, others = load(a), load(b)
    for name, tensor in tensors.items():
        assert same_bits(tensor, others[name]), name


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
        trainable = {name for name, held in parameters.items() if held.trainable}
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


class TestFiles:
    """What DeepSpeed's loader looks for."""

    def test_a_dictionary_with_the_whole_shape(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        manifest = zckpt.read(example)
        assert (merged / "latest_universal").read_text() == TAG
        assert not (merged / "latest").exists()
        for name, held in manifest.parameters.items():
            folder = merged / TAG / "zero" / name
            assert folder.exists() == held.trainable
            if not held.trainable:
                continue
            files = sorted(path.name for path in folder.iterdir())
            assert files == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
            for key in ("exp_avg", "exp_avg_sq", "fp32"):
                value = torch.load(folder / f"{key}.pt")
                assert value.keys() == {"cat_dim", "param"}
                assert value["cat_dim"] == 0
                assert value["param"].shape == held.shape
            step = torch.load(folder / "step.pt")
            assert (step.shape, step.dtype, step.item()) == ((), torch.float32, held.step)

    def test_a_flat_tensor_in_stage_3(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged", stage=3)
        for name, held in zckpt.read(example).parameters.items():
            folder = merged / TAG / "zero" / name
            if held.trainable:
                files = sorted(path.name for path in folder.iterdir())
                assert files == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]
                value = torch.load(folder / "exp_avg.pt")
                assert value.shape == (torch.Size(held.shape).numel(),)

    def test_the_tail_of_small_parameters(self, example: Path, tmp_path: Path) -> None:
        """Converters before 0.19 leave padding there in stage 3."""
        merged = convert(example, tmp_path / "merged", stage=3)
        name, held = next(
            (name, held)
            for name, held in zckpt.read(merged).parameters.items()
            if held.trainable and torch.Size(held.shape).numel() % 4
        )
        path = merged / TAG / "zero" / name / "exp_avg.pt"
        tensor = torch.load(path)
        torch.save(torch.cat([tensor, torch.zeros(1)]), path)
        zckpt.convert(merged, tmp_path / "universal")
        whole = load(tmp_path / "universal")[f"{name}/exp_avg"]
        assert same_bits(whole, tensor.view(held.shape))

    def test_losses_are_named(self, example: Path, tmp_path: Path) -> None:
        manifest = zckpt.read(example)
        told = warnings(example, tmp_path / "merged")
        assert "does not load buffers" in told
        assert "does not load frozen weights" in told
        frozen = [name for name, held in manifest.parameters.items() if not held.trainable]
        for name in (*manifest.buffers, *frozen):
            assert name in told
        assert "group 0" not in told
        assert "hyper-parameters of group 0" in warnings(example, tmp_path / "merged", stage=3)

    def test_weights_alone(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged", weights_only=True)
        manifest = zckpt.read(merged)
        assert set(manifest.slots) == {"param", "master"}
        assert manifest.step is None


# -- directories


class TestDirectories:
    def test_tag_directory(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        assert zckpt.read(merged / TAG).source == zckpt.read(merged).source
        assert zckpt.read(merged, tag=TAG).source == zckpt.read(merged).source

    def test_without_the_pointer(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        (merged / "latest_universal").unlink()
        assert zckpt.read(merged).format == FORMAT

    def both(self, example: Path, tmp_path: Path) -> Path:
        """A run directory as DeepSpeed's converter leaves it."""
        merged = convert(example, tmp_path / "merged")
        shutil.move(merged / TAG, example / "universal_step7")
        (example / "latest_universal").write_text("universal_step7")
        return example

    def test_beside_the_ordinary_one(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        run = self.both(example, tmp_path)
        ended = zckpt("inspect", run)
        assert ended.code == 1
        assert "deepspeed, deepspeed-universal" in ended.err
        for name in ("deepspeed", FORMAT):
            ended = zckpt("inspect", run, "--from", name, "--json")
            assert ended.document["format"] == name

    def test_is_no_tag_of_the_ordinary_format(self, example: Path, tmp_path: Path) -> None:
        run = self.both(example, tmp_path)
        (run / "latest").unlink()
        assert zckpt.read(run, format="deepspeed").source["tag"] == TAG
        assert zckpt.read(run / "universal_step7").format == FORMAT

    def test_is_no_sibling(self, example: Path, tmp_path: Path) -> None:
        run = self.both(example, tmp_path)
        (run / "trainer_state.json").write_text("{}")
        for name in ("deepspeed", FORMAT):
            siblings = zckpt.read(run, format=name).siblings
            assert [found.name for found in siblings] == ["trainer_state.json"]


# -- bad input


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
        self.refused(zckpt, merged, "rank 0")

    def test_a_frozen_slice_missing(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        merged = convert(example, tmp_path / "merged", stage=3)
        (merged / TAG / "zero_pp_rank_3_mp_rank_00_model_states.pt").unlink()
        self.refused(zckpt, merged, "3 of 4 model files")

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

    def test_no_tensor(self, merged: Path, zckpt: Zckpt) -> None:
        for value in ({"cat_dim": 0}, {"param": 3}, "text", [1]):
            torch.save(value, self.folder(merged) / "fp32.pt")
            self.refused(zckpt, merged, "fp32.pt", "no tensor")

    @pytest.mark.parametrize("name", ["../../../outside", "a/b", "..", ".", "", "a\0b", "x" * 256])
    def test_a_parameter_that_is_no_folder_name(
        self, name: str, merged: Path, zckpt: Zckpt
    ) -> None:
        rename_parameter(merged / TAG / "mp_rank_00_model_states.pt", name)
        self.refused(zckpt, merged, "no folder name")

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

    @pytest.mark.parametrize("tag", ["../outside", "..", "a/b", "latest_universal"])
    def test_writing_a_tag_that_is_no_folder_name(
        self, tag: str, example: Path, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        assert zckpt("convert", example, tmp_path / "universal").code == 0
        path = tmp_path / "universal" / "manifest.json"
        path.write_text(path.read_text().replace(f'"tag": "{TAG}"', f'"tag": "{tag}"'))
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


def rename_parameter(path: Path, new: str) -> None:
    """The first one, in all lists of a model file."""
    value = torch.load(path, weights_only=False)
    name = next(iter(value["param_shapes"][0]))
    for held in (*value["param_shapes"], value["module"]):
        items = [(new if key == name else key, item) for key, item in held.items()]
        held.clear()
        held.update(items)
    value["shared_params"] = {
        alias: new if owner == name else owner for alias, owner in value["shared_params"].items()
    }
    torch.save(value, path)


def with_info(run: Path, target: Path, info: Mapping[str, Any]) -> Path:
    """A universal checkpoint whose client state has what Megatron tells DeepSpeed's converter."""
    zckpt.convert(run, target)
    path = target / "manifest.json"
    made = json.loads(path.read_text())
    made["state"]["client_state"]["universal_checkpoint_info"] = to_json(dict(info))
    path.write_text(json.dumps(made))
    return target


class TestSteps:
    """A step of its own for every parameter."""

    @pytest.fixture
    def merged(self, example: Path, tmp_path: Path) -> Path:
        return convert(example, tmp_path / "merged")

    def test_differing_ones_are_kept(self, merged: Path, tmp_path: Path) -> None:
        folders = [path for path in sorted((merged / TAG / "zero").iterdir()) if path.is_dir()]
        torch.save(torch.tensor(2.0), folders[0] / "step.pt")
        manifest = zckpt.read(merged)
        assert manifest.parameters[folders[0].name].step == 2
        assert manifest.parameters[folders[1].name].step == 7
        assert manifest.step is None
        told = {line.step: line.where for line in manifest.steps if line.truth}
        assert folders[0].name in told[2]
        with pytest.raises(ZckptError, match="one step for"):
            convert(merged, tmp_path / "target")
        assert zckpt.read(merged, step_policy="max").step == 7
        assert zckpt.read(merged, step_policy="9").parameters[folders[0].name].step == 9

    def test_an_int_stays_one(self, merged: Path, tmp_path: Path) -> None:
        for folder in (merged / TAG / "zero").iterdir():
            if folder.is_dir():
                torch.save(7, folder / "step.pt")
        again = convert(merged, tmp_path / "again")
        found = [torch.load(path) for path in again.rglob("step.pt")]
        assert found
        assert all(type(step) is int and step == 7 for step in found)

    def test_a_tensor_of_one_element_stays_one(self, merged: Path, tmp_path: Path) -> None:
        for path in merged.rglob("step.pt"):
            torch.save(torch.tensor([7.0]), path)
        again = convert(merged, tmp_path / "again")
        found = [torch.load(path) for path in again.rglob("step.pt")]
        assert found
        assert all(step.shape == (1,) and step.item() == 7 for step in found)

    def test_a_lost_one_is_told(self, merged: Path) -> None:
        for path in list(merged.rglob("step.pt")):
            path.unlink()
        manifest = zckpt.read(merged)
        assert manifest.step is None
        assert any("without a step" in warning for warning in manifest.warnings)


# -- DeepSpeed's converter


def merge(run: Path, target: Path) -> Path:
    """What DeepSpeed's own converter makes of the run's latest."""
    tag = (run / "latest").read_text()
    shutil.copytree(run, target)
    words = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    words += ["--input_folder", str(target / tag), "--output_folder", str(target / "merged")]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env={**os.environ, **deepspeed.ENVIRONMENT},
        check=True,
        capture_output=True,
    )
    return target


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


def first_of_each(rows: list[tuple[str, Any]]) -> list[Any]:
    """All are of the full matrix; the first of each kind is of the default run too."""
    seen: set[str] = set()
    found = []
    for kind, row in rows:
        marks = [pytest.mark.engines] + ([] if kind in seen else [pytest.mark.first])
        seen.add(kind)
        found.append(pytest.param(row, id=getattr(row, "name", row), marks=marks))
    return found


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
    """DeepSpeed's converter mixes up the parameters of such runs (0.19.8)."""

    CASE = CASES["z2_dp3_round_robin"]

    def test_the_converter_s_directory_is_warned_of(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(self.CASE)
        run = merge(root / "run", tmp_path / "run")
        manifest = zckpt.read(run, format=FORMAT)
        assert any("round_robin_gradients" in warning for warning in manifest.warnings)
        zckpt.convert(run, tmp_path / "universal", format=FORMAT)
        held = load(tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)["tensors"]
        wrong = [
            name for name in oracle if name in held and not same_bits(held[name], oracle[name])
        ]
        assert wrong

    def test_ours_is_right(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(self.CASE)
        merged = convert(root / "run", tmp_path / "merged")
        manifest = zckpt.read(merged)
        assert not any("round_robin" in warning for warning in manifest.warnings)
        zckpt.convert(merged, tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)


# -- DeepSpeed's loader


@dataclass(frozen=True)
class Load:
    """A case's run, converted to `stage` and loaded by an engine of `dp` ranks and `config`."""

    kind: str
    case: str
    dp: int
    stage: int | None = None
    config: Mapping[str, Any] | None = None
    through: bool = False  # by way of our own universal checkpoint

    @property
    def name(self) -> str:
        parts = [self.case, f"dp{self.dp}", *([f"z{self.stage}"] if self.stage else [])]
        return "-".join([*parts, *(["universal"] if self.through else [])])


LOADS = [
    *(
        Load(f"stage {stage}", f"z{stage}_dp{a}_bf16", b, through=(a + b) % 2 == 0)
        for stage in (1, 2, 3)
        for a in (3, 1, 2, 4)
        for b in (2, 1, 3, 4)
    ),
    *(
        Load("stage to stage", f"z{stage}_dp3_bf16", 2, other)
        for stage in (1, 2, 3)
        for other in (1, 2, 3)
        if other != stage
    ),
    Load("round robin", "z2_dp3_round_robin", 2, config={}),
    Load("round robin", "z1_dp2_round_robin", 3, config={}),
    Load("round robin", "z2_dp3_round_robin", 2, 3, config={}),
    Load("round robin", "z2_dp3_aligned_round_robin", 2),
    Load("groups", "z2_dp3_three_groups", 4),
    Load("groups stage 3", "z3_dp3_sub_groups", 2),
    Load("groups stage 3", "z3_dp2_sub_groups", 4, config={}),
    Load("groups stage 3", "z3_dp2_sub_groups_fused_adam", 3),
    Load("BF16_Optimizer", "z1_dp2_bf16_optimizer", 3),
    Load("BF16_Optimizer", "z1_dp3_bf16_optimizer", 2, 2, config={}),
    Load("BF16_Optimizer", "z1_dp2_lion_bf16_optimizer", 1),
    *(
        Load("amsgrad" if name == "amsgrad" else "optimizer", f"z2_dp3_{name}", 2, stage)
        for name in ("amsgrad", "lion", "momentum", "adam", "rmsprop", "sgd", "fused_adam")
        for stage in (None, 1)
    ),
    *(Load("optimizer", f"z3_dp3_{name}", 2, 2) for name in ("lion", "momentum", "amsgrad")),
    Load("optimizer", "z3_dp3_adam", 2),
    Load("optimizer", "z3_dp3_fused_adam", 4),
    Load("optimizer", "z2_dp2_adagrad", 3),
    Load("optimizer", "z2_dp2_apex_fused_adam", 3),
    Load("optimizer", "z2_dp3_muon_offload", 2),
    Load("optimizer", "z1_dp3_muon_bf16_optimizer", 2),
    Load("optimizer", "z2_dp2_offload_cpu_adam", 3),
    Load("optimizer", "z3_dp2_offload_cpu_adam", 3),
    Load("optimizer", "z2_dp2_cpu_lion", 1),
    Load("layout", "z2_dp3_aligned", 2),
    Load("precision", "z2_dp2_fp16_dynamic", 3),
    Load("precision", "z1_dp2_fp16_static", 3),
    Load("precision", "z3_dp2_fp16_dynamic", 1),
    Load("precision", "z2_dp2_fp32", 3),
    Load("precision", "z3_dp2_fp32", 1),
    Load("layout", "z2_dp2_offload", 3),
    Load("layout", "z3_dp2_offload", 3),
    Load("extras", "z2_dp2_client_state", 3),
    Load("extras", "z3_dp2_client_state", 3),
    Load("extras", "z2_dp2_lambda", 3),
    Load("extras", "z2_dp2_warmup", 1),
    Load("layout", "z2_dp3_unused", 2),
    Load("layout", "z3_dp12_many_ranks", 2),
    Load("layout", "z3_dp2_bf16", 12),
]


def resumed(
    move: Load, trained: Trained, tmp_path: Path
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What the engine held, what another holds after loading, and the names it cannot load."""
    case = CASES[move.case]
    source = trained(case) / "run"
    if move.through:
        zckpt.convert(source, tmp_path / "universal")
        source = tmp_path / "universal"
    merged = convert(source, tmp_path / "merged", stage=move.stage)
    config = {**(case.config if move.config is None else move.config), **LOAD}
    after = deepspeed.resume(
        case, merged, tmp_path, dp=move.dp, stage=move.stage, config=config, losses=1
    )
    before = torch.load(trained(case) / "oracle.pt", weights_only=False)
    return before, after, [f"{name}/param" for name in before["frozen"]]


@pytest.mark.parametrize("move", first_of_each([(move.kind, move) for move in LOADS]))
def test_the_engine_loads(move: Load, trained: Trained, tmp_path: Path) -> None:
    before, after, frozen = resumed(move, trained, tmp_path)
    assert sorted(before["tensors"]) == sorted(after["tensors"])
    for name, tensor in before["tensors"].items():
        assert name in frozen or same_bits(tensor, after["tensors"][name]), name
    for key in ("steps", "scalars", "trainable", "frozen", "aliases", "counters", "lr_scheduler"):
        assert before[key] == after[key], key
    for key, value in before["client_state"].items():
        assert repr(after["client_state"][key]) == repr(value), key
    stage = move.stage or CASES[move.case].stage
    groups = [{k: plain(v) for k, v in held.items()} for held in before["groups"]]
    loaded = [{k: plain(v) for k, v in held.items()} for held in after["groups"]]
    if stage == 3:  # 0.19.8 gives group 0's to all
        groups = [{**groups[0], "params": held["params"]} for held in groups]
    assert loaded == groups


@pytest.mark.engines
@pytest.mark.first
class TestWeightsAlone:
    """Ways to load without the optimizer's states: what works is what the report says."""

    @pytest.mark.parametrize("name", ["z1_dp2_bf16", "z2_dp2_bf16", "z3_dp2_bf16"])
    @pytest.mark.parametrize(
        "words",
        [
            {"load_optimizer_states": True},
            {"load_optimizer_states": False},
            {"load_module_only": True},
        ],
        ids=lambda words: "".join(words),
    )
    def test_the_engine_loads(
        self, name: str, words: dict[str, bool], trained: Trained, tmp_path: Path
    ) -> None:
        case = CASES[name]
        run = trained(case) / "run"
        merged = convert(run, tmp_path / "merged")
        told = "load_module_only=True" in warnings(run, tmp_path / "target")
        assert told == (case.stage == 3)

        def resume(directory: Path) -> dict[str, Any]:
            return deepspeed.resume(
                case,
                directory,
                tmp_path,
                dp=3,
                config={**case.config, **LOAD},
                load=words,
                losses=1,
            )

        before = torch.load(trained(case) / "oracle.pt", weights_only=False)
        if told and words == {"load_optimizer_states": False}:
            with pytest.raises(deepspeed.EngineError, match="Unable to find 'latest'"):
                resume(merged)
            # beside the ordinary one, as DeepSpeed's own converter writes it
            shutil.copytree(run, tmp_path / "both")
            shutil.move(merged / "global_step3", tmp_path / "both" / "universal")
            merged = tmp_path / "both"
            (merged / "latest_universal").write_text("universal")
        after = resume(merged)
        weights = [f"{name}/{slot}" for name in before["trainable"] for slot in ("param", "master")]
        assert [
            n for n in weights if not same_bits(before["tensors"][n], after["tensors"][n])
        ] == []
        loaded = any(name.endswith("/exp_avg") for name in after["tensors"])
        assert loaded == (case.stage < 3 or words == {"load_optimizer_states": True})

    def test_the_other_way(self, trained: Trained, tmp_path: Path) -> None:
        """An ordinary directory, of which stage 3 loads weights alone."""
        case = CASES["z3_dp2_bf16"]
        zckpt.reshard(trained(case) / "run", tmp_path / "run", dp=3)
        words = {"load_optimizer_states": False}
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3, load=words, losses=1)
        before = torch.load(trained(case) / "oracle.pt", weights_only=False)
        for name in before["trainable"]:
            assert same_bits(before["tensors"][f"{name}/param"], after["tensors"][f"{name}/param"])


@pytest.mark.engines
@pytest.mark.first
class TestWhatTheLoaderCannotDo:
    """The reasons of our warnings and refusals; a test that fails here tells of one too many."""

    def test_buffers_and_frozen_weights(self, trained: Trained, tmp_path: Path) -> None:
        move = Load("", "z2_dp2_bf16", 2)
        before, after, frozen = resumed(move, trained, tmp_path)
        assert not any(
            same_bits(before["tensors"][name], after["tensors"][name]) for name in frozen
        )
        assert not any(
            same_bits(t, after["buffers"][name]) for name, t in before["buffers"].items()
        )

    def test_round_robin(self, trained: Trained, tmp_path: Path) -> None:
        move = Load("", "z2_dp3_round_robin", 2)
        assert "round_robin_gradients" in warnings(
            trained(CASES[move.case]) / "run", tmp_path / "x"
        )
        before, after, frozen = resumed(move, trained, tmp_path)
        wrong = [
            name
            for name, tensor in before["tensors"].items()
            if name not in frozen and not same_bits(tensor, after["tensors"][name])
        ]
        assert wrong

    def test_a_rank_without_elements(self, trained: Trained, tmp_path: Path) -> None:
        move = Load("", "z1_dp4_only_padding", 4)
        run = trained(CASES[move.case]) / "run"
        assert "group 3 has 1 elements" in warnings(run, tmp_path / "target")
        assert "elements" not in warnings(run, tmp_path / "target", dp=1)
        assert "group 1 has 57 elements" in warnings(run, tmp_path / "target", dp=12)
        with pytest.raises(deepspeed.EngineError, match="IndexError"):
            resumed(move, trained, tmp_path)

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("z2_dp3_nadam", "mu_product"),
            ("z3_dp3_amsgrad", "max_exp_avg_sq"),
            ("z3_dp3_lion", "no step"),
            ("z3_dp3_sgd", "none"),
            ("z3_dp2_muon", "momentum_buffer"),
            ("z2_dp2_muon", "Muon"),
        ],
    )
    def test_optimizers(self, name: str, says: str, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[name]) / "run"
        with pytest.raises(ZckptError, match=says):
            convert(run, tmp_path / "merged")
        assert convert(run, tmp_path / "weights", weights_only=True)


# -- tensor and pipeline parallelism


INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 11,
    "vocabulary_parameter_patterns": ["words"],
    "tp_replicated_parameter_patterns": [".*norm"],
    "parameter_with_row_parallelism_patterns": ["down"],
    "parameter_with_2_sub_params_cat_dim_0": ["gate"],
    "parameter_with_sub_params": [
        {"patterns": ["attention"], "shape": ((8, 4, 4), 6), "partition_dim": 0},
        {"patterns": ["offsets"], "shape": (3, -1), "partition_dim": 0},  # before 0.4: three parts
    ],
}
WHOLE = {"words": (12, 6), "up": (8, 6), "down": (6, 8), "gate": (8, 6), "attention": (16, 6)}
GROUPS = [[*WHOLE], ["norm", "offsets"]]
SHAPES: dict[str, tuple[int, ...]] = {**WHOLE, "norm": (6,), "offsets": (12,)}
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def cut(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a Megatron of `ranks` tensor-parallel ranks holds of a parameter."""
    if name == "norm":
        return whole
    parts = {"gate": [4, 4], "attention": [8, 4, 4], "offsets": [4, 4, 4]}.get(name)
    axis = 1 if name == "down" else 0
    pieces = whole.split(parts) if parts else [whole]
    return torch.cat([piece.chunk(ranks, axis)[rank] for piece in pieces], axis)


@pytest.mark.engines
@pytest.mark.first
class TestTensorParallelism:
    """The real converter's merge and the real loader's cut, without an engine around them."""

    @pytest.fixture(autouse=True)
    def on_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for key, value in deepspeed.ENVIRONMENT.items():
            monkeypatch.setenv(key, value)

    @pytest.fixture
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(4)
        return {
            name: {key: torch.randn(shape, generator=generator) for key in KEYS}
            for name, shape in SHAPES.items()
        }

    def merged(self, tensors: dict[str, dict[str, torch.Tensor]], root: Path) -> Path:
        """What the converter makes of a run of two ranks; only its merge is of DeepSpeed."""
        from deepspeed.checkpoint.ds_to_universal import merge_tp_slices

        folder, slices = root / "run" / "global_step5", root / "slices"
        for name, held in tensors.items():
            for rank in (0, 1):
                place = slices / name / str(rank)
                place.mkdir(parents=True)
                for key, tensor in held.items():
                    torch.save(cut(name, tensor, rank, 2).flatten(), place / f"{key}.00")
                torch.save(torch.tensor(5.0), place / "step.00")
            shapes = [cut(name, held["fp32"], rank, 2).shape for rank in (0, 1)]
            merge_tp_slices(INFO, str(folder / "zero"), str(slices), 2, (name, shapes))
        groups = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.2, "weight_decay": 0.0}]
        common = {"ds_version": "0.19.8", "param_groups": groups, "zero_stage": 1}
        torch.save(common, folder / "zero" / "optimizer_state.pt")
        for rank in (0, 1):
            pieces = {name: cut(name, held["fp32"], rank, 2) for name, held in tensors.items()}
            torch.save(
                {
                    "module": {name: piece.bfloat16() for name, piece in pieces.items()},
                    "param_shapes": [{name: pieces[name].shape for name in g} for g in GROUPS],
                    "dp_world_size": 3,
                    "mp_world_size": 2,
                    "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
                    "ds_version": "0.19.8",
                    "global_steps": 5,
                    "universal_checkpoint_info": INFO,
                },
                folder / f"mp_rank_{rank:02d}_model_states.pt",
            )
        (root / "run" / "latest_universal").write_text("global_step5")
        return root / "run"

    def loaded(self, folder: Path, name: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """What the loader gives one tensor-parallel rank that has no data-parallel neighbour."""
        from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state

        rows = 12 if ranks < 3 else 2 * ranks * -(-12 // (2 * ranks))  # padded for more ranks
        shape = (rows, 6) if name == "words" else SHAPES[name]
        piece = cut(name, torch.zeros(shape), rank, ranks)
        master = torch.full((piece.numel(),), float("nan"))
        mapping = SimpleNamespace(
            optim_fragment={},
            lp_fragment_address=SimpleNamespace(start=0, numel=piece.numel()),
            get_hp_fragment=lambda: master,
        )
        parameter = SimpleNamespace(_hp_mapping=mapping, shape=piece.shape, numel=piece.numel)
        step = load_hp_checkpoint_state(parameter, str(folder / name), rank, ranks)
        assert step == 5
        found = {"fp32": master, **mapping.optim_fragment}
        return {key: tensor.view(piece.shape) for key, tensor in found.items()}

    def test_read(self, tensors: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
        run = self.merged(tensors, tmp_path)
        manifest = zckpt.read(run)
        assert [len(manifest.parameters), manifest.step, manifest.dp] == [7, 5, 3]
        for group, names in enumerate(GROUPS):
            assert [name for name, p in manifest.parameters.items() if p.group == group] == names
        assert any("modules of 2 model-parallel ranks" in what for what in manifest.left_out)
        zckpt.convert(run, tmp_path / "universal")
        held = load(tmp_path / "universal")
        assert sorted({name.rpartition("/")[2] for name in held}) == [
            "exp_avg", "exp_avg_sq", "master"
        ]  # fmt: skip
        for name, kept in tensors.items():
            for key, tensor in kept.items():
                slot = "master" if key == "fp32" else key
                tensor = tensor[:11] if name == "words" else tensor
                assert same_bits(held[f"{name}/{slot}"], tensor), (name, key)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("through", [False, True])
    def test_written_again(
        self,
        ranks: int,
        through: bool,
        tensors: dict[str, dict[str, torch.Tensor]],
        tmp_path: Path,
    ) -> None:
        source = self.merged(tensors, tmp_path)
        if through:
            zckpt.convert(source, tmp_path / "universal")
            source = tmp_path / "universal"
        merged = convert(source, tmp_path / "merged")
        for name in SHAPES:
            for rank in range(ranks):
                found = self.loaded(merged / "global_step5" / "zero", name, rank, ranks)
                for key, tensor in found.items():
                    whole = tensors[name][key]
                    if name == "words":
                        whole = whole.clone()
                        whole[11:] = 0
                        if ranks == 4:
                            whole = torch.nn.functional.pad(whole, (0, 0, 0, 4))
                    assert same_bits(tensor, cut(name, whole, rank, ranks)), (name, key)

    def test_patterns_of_a_run_without_it(
        self, tensors: dict[str, dict[str, torch.Tensor]], tmp_path: Path
    ) -> None:
        """A run of one tensor-parallel rank has what the converter would have used."""
        whole = self.merged(tensors, tmp_path)
        zckpt.convert(whole, tmp_path / "universal")
        path = tmp_path / "universal" / "manifest.json"
        made = json.loads(path.read_text())
        del made["state"]["universal"]
        path.write_text(json.dumps(made))
        merged = convert(tmp_path / "universal", tmp_path / "merged")
        for name in SHAPES:
            a, b = (
                torch.load(run / "global_step5" / "zero" / name / "fp32.pt", weights_only=False)
                for run in (whole, merged)
            )
            del a["param"], b["param"]
            assert a == b, name


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
    merged = convert(run, tmp_path / "merged")
    zckpt.convert(merged, tmp_path / "around")
    same_universal(tmp_path / "straight", tmp_path / "around")
