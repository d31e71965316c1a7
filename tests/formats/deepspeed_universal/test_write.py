"""Universal directories, written: what DeepSpeed's loader makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import ZckptError

from ...engines import deepspeed
from ...engines.cases import CASES
from ...engines.client import CLASSES
from ...manifests import changed
from ..equality import load, plain, same_bits
from .directories import (
    LOAD,
    TAG,
    Trained,
    convert,
    first_of_each,
    warnings,
)


class TestFiles:
    """What DeepSpeed's loader looks for."""

    def test_a_dictionary_with_the_whole_shape(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        manifest = zckpt.read(example)
        assert (merged / "latest_universal").read_text() == TAG
        assert not (merged / "latest").exists()
        for name, parameter in manifest.parameters.items():
            folder = merged / TAG / "zero" / name
            assert folder.exists() == parameter.trainable
            if not parameter.trainable:
                continue
            files = sorted(path.name for path in folder.iterdir())
            assert files == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
            for key in ("exp_avg", "exp_avg_sq", "fp32"):
                value = torch.load(folder / f"{key}.pt")
                assert value.keys() == {"cat_dim", "param"}
                assert value["cat_dim"] == 0
                assert value["param"].shape == parameter.shape
            step = torch.load(folder / "step.pt")
            assert (step.shape, step.dtype, step.item()) == ((), torch.float32, parameter.step)

    def test_a_flat_tensor_in_stage_3(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged", stage=3)
        for name, parameter in zckpt.read(example).parameters.items():
            folder = merged / TAG / "zero" / name
            if parameter.trainable:
                files = sorted(path.name for path in folder.iterdir())
                assert files == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]
                value = torch.load(folder / "exp_avg.pt")
                assert value.shape == (torch.Size(parameter.shape).numel(),)

    def test_the_tail_of_small_parameters(self, example: Path, tmp_path: Path) -> None:
        """Converters before 0.19 leave padding there in stage 3."""
        merged = convert(example, tmp_path / "merged", stage=3)
        name, parameter = next(
            (name, parameter)
            for name, parameter in zckpt.read(merged).parameters.items()
            if parameter.trainable and torch.Size(parameter.shape).numel() % 4
        )
        path = merged / TAG / "zero" / name / "exp_avg.pt"
        tensor = torch.load(path)
        torch.save(torch.cat([tensor, torch.zeros(1)]), path)
        zckpt.convert(merged, tmp_path / "universal")
        whole = load(tmp_path / "universal")[f"{name}/exp_avg"]
        assert same_bits(whole, tensor.view(parameter.shape))

    def test_losses_are_named(self, example: Path, tmp_path: Path) -> None:
        manifest = zckpt.read(example)
        lines = warnings(example, tmp_path / "merged")
        assert "does not load buffers" in lines
        assert "does not load frozen weights" in lines
        frozen = [
            name for name, parameter in manifest.parameters.items() if not parameter.trainable
        ]
        for name in (*manifest.buffers, *frozen):
            assert name in lines
        assert "group 0" not in lines
        assert "hyper-parameters of group 0" in warnings(example, tmp_path / "merged", stage=3)

    def test_weights_alone(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged", weights_only=True)
        manifest = zckpt.read(merged)
        assert set(manifest.slots) == {"param", "master"}
        assert manifest.step is None


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
    merged = convert(source, tmp_path / "merged", stage=move.stage, allow_object=CLASSES)
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
    groups = [{k: plain(v) for k, v in group.items()} for group in before["groups"]]
    loaded = [{k: plain(v) for k, v in group.items()} for group in after["groups"]]
    if stage == 3:  # 0.19.8 gives group 0's to all
        groups = [{**groups[0], "params": group["params"]} for group in groups]
    assert loaded == groups


@pytest.mark.parametrize(
    ("version", "stage", "warned"),
    [("0.17.6", 3, True), ("0.17.6", 2, False), ("0.18.0", 3, False)],
)
def test_what_older_engines_cannot_load(
    version: str, stage: int, warned: bool, example: Path, tmp_path: Path
) -> None:
    """Run by hand with 0.14.5 and 0.16.4, which cannot, and 0.18.9, which can."""
    zckpt.convert(example, tmp_path / "universal")
    with changed(tmp_path / "universal") as manifest:
        manifest["state"]["engine"]["version"] = version
    said = warnings(tmp_path / "universal", tmp_path / "target", stage=stage)
    assert ("before 0.18" in said) == warned


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
        warned = "load_module_only=True" in warnings(run, tmp_path / "target")
        assert warned == (case.stage == 3)

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
        if warned and words == {"load_optimizer_states": False}:
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
