"""Directories that zckpt wrote of stage 0, or for it, loaded by the unmodified engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors

from ...conftest import texts
from ...engines import deepspeed
from ...engines.cases import BF16_OPTIMIZER, CASES, FUSED, STAGE_0, Case
from ...engines.client import CLASSES
from ...engines.old_deepspeed import rewrite
from ..equality import assert_proven, plain, same_bits
from .test_stage_0 import names_of_optimizer

Trained = Callable[[Case], Path]
CASES_BY_NAME = {**CASES, **STAGE_0}
OF_TRAINED = "adamw of trained"  # its list has no frozen parameters


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks and `stage`, perhaps `through` a universal one."""

    case: str
    dp: int
    stage: int
    through: bool = False
    optimizer: str | None = None  # of the resuming engine
    exact: bool = True  # whether the losses after the first one are near too
    config: Mapping[str, Any] | None = None  # of the resuming engine, and given to zckpt
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [self.case, f"dp{self.dp}", f"z{self.stage}", *(["universal"] * self.through)]
        return "-".join([*parts, *map(str, self.options.values())])


MOVES = [
    *(
        Move(f"z0_dp2_{kind}", dp, stage, through=(dp + stage) % 2 == 0)
        for kind in ("bf16", "fp32", "fused_bf16")
        for dp, stage in ((3, 0), (1, 0), (2, 1), (3, 2), (2, 3))
    ),
    *(
        Move(case, dp, 0, through=(dp == 3))
        for case, dp in (("z1_dp2_bf16", 2), ("z2_dp3_bf16", 2), ("z3_dp2_bf16", 3))
    ),
    *(
        Move(f"z{stage}_dp2_fused_adam_compiled", stage, 0, through=(stage == 3))
        for stage in (2, 3)
    ),
    *(
        Move(f"z{stage}_dp2_fp32", 2, 0, through=(stage == 2), optimizer=OF_TRAINED)
        for stage in (1, 2, 3)
    ),
    *(
        Move(f"z0_dp2_fp16_{kind}", 2, stage, exact=stage == 0)  # see docs/deepspeed.md
        for kind, stage in (("dynamic", 0), ("dynamic", 2), ("skipped", 3), ("static", 1))
    ),
    *(
        Move("z0_dp2_fused_fp32", dp, stage, through=(dp == 3))
        for dp, stage in ((2, 0), (3, 0), (2, 1), (3, 2), (2, 3))
    ),
    Move("z0_dp2_adam_fp32", 2, 2),
    *(Move("z0_dp2_fused_fp16", 2, stage, exact=stage == 0) for stage in (0, 1)),
    Move("z2_dp2_fp16_dynamic", 2, 0, exact=False),
    Move("z3_dp3_fp16_skipped", 3, 0, exact=False),
    Move("z1_dp2_fp16_static", 2, 0, exact=False),
    *(
        Move(f"z0_dp2_{name}_{dtype}", 2, stage, through=stage == 0, exact=name != "lamb")
        for name in ("nadam", "odd", "lamb", "unused")
        for dtype, stage in (("bf16", 2), ("fp32", 0))
    ),
    Move("z0_dp2_momentum_bf16", 3, 0),
    Move("z0_dp2_adafactor_bf16", 2, 0, through=True),
    Move("z0_dp2_lion_fp32", 2, 1),
    Move("z0_dp2_sgd_bf16", 2, 3),
    Move("z0_dp2_one_group", 3, 2),
    Move("z0_dp3_three_groups", 2, 0, through=True),
    Move("z0_dp3_three_groups", 2, 3),
    Move("z0_dp2_lambda", 3, 0),
    Move("z0_dp2_lambda", 2, 2, through=True),
    Move("z0_dp2_client_state", 2, 0, through=True),
    Move("z3_dp2_client_state", 2, 0),
    Move("z3_dp3_nadam", 2, 0),
    Move("z2_dp2_odd", 3, 0),
    Move("z2_dp3_round_robin", 2, 0),
    Move("z3_dp3_sub_groups", 2, 0),
    Move("z2_dp3_aligned", 2, 0),
    Move("z2_dp2_no_frozen", 2, 0),
    Move("z1_dp2_bf16_optimizer", 3, 0, config={}),
    # the class of Adam decides the wrapper
    Move("z0_dp2_bf16", 2, 0, optimizer=FUSED, options={"optimizer": "deepspeed-fused-adam"}),
    Move("z2_dp2_fused_adam_compiled", 2, 0, optimizer="adamw", options={"optimizer": "torch"}),
    Move("z0_dp2_fused_bf16", 2, 0, optimizer="adamw", options={"optimizer": "torch"}),
]


def every_move() -> list[Any]:
    first = {"z0_dp2_bf16-dp3-z0", "z0_dp2_bf16-dp3-z2"}
    return [
        pytest.param(
            move,
            id=move.name,
            marks=[pytest.mark.engines, *([pytest.mark.first] if move.name in first else [])],
        )
        for move in MOVES
    ]


@pytest.mark.parametrize("move", every_move())
def test_the_engine_resumes(move: Move, trained: Trained, tmp_path: Path) -> None:
    case = CASES_BY_NAME[move.case]
    root = trained(case)
    before = torch.load(root / "oracle.pt", weights_only=False)
    names = names_of_optimizer(case) if case.stage == 0 and case.dtype == "fp32" else None
    source, given = root / "run", names
    if move.through:
        zckpt.convert(source, tmp_path / "universal", param_names=names)
        source, given = tmp_path / "universal", None
    config = None if move.config is None else {**move.config, "bf16": {"enabled": True}}
    directory = tmp_path / "resharded"
    zckpt.reshard(
        source,
        directory,
        dp=move.dp,
        stage=move.stage,
        param_names=given,
        allow_object=CLASSES,
        config=config,
        **move.options,
    )
    assert zckpt.read(directory).source["zero_stage"] == move.stage
    after = deepspeed.resume(
        case,
        directory,
        tmp_path,
        dp=move.dp,
        stage=move.stage,
        optimizer=move.optimizer,
        config=move.config,
    )
    assert_same_state(before, after, groups=not move.options)
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=1e-6)
    if move.exact:
        tolerance = 1e-5 if case.dtype == "fp32" else 1e-2
        assert after["losses"] == pytest.approx(before["losses"], rel=0, abs=tolerance)
        # another stage has tensors of other lengths, whose last elements torch computes one by one:
        # on some processors their last bit differs
        if move.dp == case.dp and case.dtype == "fp32" and move.stage == case.stage:
            assert after["losses"] == before["losses"]
    if names is None:
        assert_proven(root / "run", directory)
    else:
        assert zckpt.verify(root / "run", directory, param_names=names)["equal"]


def assert_same_state(before: dict[str, Any], after: dict[str, Any], groups: bool) -> None:
    """Bit for bit; a master of fp32 without ZeRO is the weight itself."""
    states = [
        {name: t for name, t in state["tensors"].items() if not name.endswith("/master")}
        | {
            f"{name}/master": state["tensors"].get(
                f"{name}/master", state["tensors"][f"{name}/param"]
            )
            for name in state["trainable"]
        }
        for state in (before, after)
    ]
    assert sorted(states[0]) == sorted(states[1])
    assert [name for name in states[0] if not same_bits(states[0][name], states[1][name])] == []
    for name, tensor in before["buffers"].items():
        assert same_bits(tensor, after["buffers"][name]), name
    for key in ("steps", "scalars", "trainable", "frozen", "aliases", "counters", "lr_scheduler"):
        assert before[key] == after[key], key
    for one, other in zip(before["groups"], after["groups"], strict=True):
        keys = one.keys() if groups else one.keys() & other.keys() - {"step"}
        assert {key: plain(one[key]) for key in keys} == {key: plain(other[key]) for key in keys}
    for key, value in before["client_state"].items():
        assert repr(after["client_state"][key]) == repr(value), key


@pytest.mark.engines
class TestLossScale:
    """The numbers of the loss scale go over; what stage 0 has no place for is the ds_config's."""

    def scaling(self, run: Path) -> dict[str, Any]:
        import deepspeed  # noqa: F401  (its classes are in the pickle)

        (path,) = run.glob("*/mp_rank_00_model_states.pt")
        optimizer = torch.load(path, weights_only=False)["optimizer"]
        keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return {key: optimizer[key] for key in ("dynamic_loss_scale", *keys) if key in optimizer}

    @pytest.mark.parametrize("name", ["fp16_dynamic", "fp16_skipped", "fp16_static", "fused_fp16"])
    def test_through_zero(self, name: str, trained: Trained, tmp_path: Path) -> None:
        run = trained(STAGE_0[f"z0_dp2_{name}"]) / "run"
        expected = self.scaling(run)
        assert expected["cur_scale"] != 1
        zckpt.reshard(run, tmp_path / "zero", stage=2, dp=3)
        zckpt.reshard(tmp_path / "zero", tmp_path / "back", stage=0, dp=2)
        assert self.scaling(tmp_path / "back") == expected

    @pytest.mark.parametrize("stage", [2, 3])
    def test_bf16_counts_updates(self, stage: int, trained: Trained, tmp_path: Path) -> None:
        zckpt.reshard(trained(CASES[f"z{stage}_dp2_bf16"]) / "run", tmp_path / "run", stage=0)
        expected = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3}
        assert self.scaling(tmp_path / "run") == expected


@pytest.mark.engines
class TestOlderBf16:
    """Before 0.17.6 bf16 in stage 0 was BF16_Optimizer, which writes partitions."""

    @pytest.fixture
    def old(self, trained: Trained, tmp_path: Path) -> Path:
        rewrite(trained(CASES["z1_dp2_bf16_optimizer"]) / "run", tmp_path / "old", "0.7.0")
        return tmp_path / "old"

    @pytest.mark.parametrize("stage", [None, 0])
    def test_stays_so(self, stage: int | None, old: Path, trained: Trained, tmp_path: Path) -> None:
        case = CASES["z1_dp2_bf16_optimizer"]
        manifest = zckpt.read(old)
        assert manifest.run.engine.config["zero_optimization"]["stage"] == 0  # type: ignore[union-attr]
        assert manifest.source["zero_stage"] == 1
        zckpt.reshard(old, tmp_path / "run", dp=3, stage=stage)
        files = sorted(path.name for path in (tmp_path / "run").glob("*/*optim_states.pt"))
        assert files == [
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)
        ]
        for path in (tmp_path / "run").glob("*/*optim_states.pt"):
            state = torch.load(path, weights_only=False)["optimizer_state_dict"]
            lengths = [flat.numel() for flat in state["single_partition_of_fp32_groups"]]
            states = state["base_optimizer_state"]["state"].values()
            assert [kept["exp_avg"].numel() for kept in states] == lengths
        zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=2)
        assert zckpt.verify(old, tmp_path / "again")["equal"]
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3, config=BF16_OPTIMIZER)
        before = torch.load(trained(case) / "oracle.pt", weights_only=False)
        assert_same_state(before, after, groups=True)

    def test_newer_layouts_when_asked(self, old: Path, tmp_path: Path) -> None:
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
        zckpt.reshard(old, tmp_path / "run", dp=3, config=config)
        assert zckpt.read(tmp_path / "run").source["zero_stage"] == 2


@pytest.mark.engines
class TestWeightsOnly:
    @pytest.mark.parametrize("name", ["z0_dp2_bf16", "z0_dp2_fused_bf16", "z2_dp2_fp32"])
    def test_the_engine_loads_them(self, name: str, trained: Trained, tmp_path: Path) -> None:
        case = CASES_BY_NAME[name]
        root = trained(case)
        report = zckpt.reshard(root / "run", tmp_path / "run", stage=0, weights_only=True)
        assert "load_module_only=True" in report["next"]
        before = torch.load(root / "oracle.pt", weights_only=False)
        resumed = dataclasses.replace(case, stage=0)
        after = deepspeed.resume(
            resumed, tmp_path / "run", tmp_path, load={"load_module_only": True}
        )
        for key in (f"{name}/param" for name in (*before["trainable"], *before["frozen"])):
            assert same_bits(before["tensors"][key], after["tensors"][key]), key
        for key in (key for key in after["tensors"] if key.endswith("/master")):
            weight = after["tensors"][key.replace("/master", "/param")]
            assert same_bits(after["tensors"][key], weight.float()), key


@pytest.mark.engines
class TestOtherFormats:
    @pytest.mark.parametrize("name", ["z0_dp2_bf16", "z0_dp2_fp32", "z0_dp2_fused_bf16"])
    @pytest.mark.parametrize("to", ["dcp", "gathered"])
    def test_export_and_back(self, to: str, name: str, trained: Trained, tmp_path: Path) -> None:
        case = STAGE_0[name]
        run = trained(case) / "run"
        names = names_of_optimizer(case) if case.dtype == "fp32" else None
        zckpt.convert(run, tmp_path / "other", to=to, param_names=names)
        assert zckpt.verify(run, tmp_path / "other", param_names=names)["equal"]
        report = zckpt.diff(run, tmp_path / "other", param_names=names)
        assert not report["differences"]
        assert zckpt.stats(run, param_names=names)["tensors"]

    @pytest.mark.parametrize("name", ["z0_dp2_plain_bf16", "z0_dp2_plain_fp32"])
    def test_of_torch_to_stage_0(self, name: str, trained: Trained, tmp_path: Path) -> None:
        """Files of a program without DeepSpeed, which keeps no masters beside its weights."""
        case = STAGE_0[name]
        root = trained(case)
        names = names_of_optimizer(case)
        zckpt.convert(root / "run", tmp_path / "torch", to="gathered", param_names=names)
        config = {"zero_optimization": {"stage": 0}}
        config |= {"bf16": {"enabled": True}} if case.dtype == "bf16" else {}
        zckpt.convert(
            tmp_path / "torch", tmp_path / "run", to="deepspeed", dp=2, config=config,
            param_names=names,
        )  # fmt: skip
        before = torch.load(root / "oracle.pt", weights_only=False)
        after = deepspeed.resume(case, tmp_path / "run", tmp_path)
        for key in before["tensors"]:
            assert same_bits(before["tensors"][key], after["tensors"][key]), key
        assert before["steps"] == after["steps"]
        if (
            case.dtype == "fp32"
        ):  # in bf16 steps are one more than batches, of which the run's is lost
            assert after["losses"] == before["losses"]

    def test_deepspeeds_universal_needs_a_stage(self, trained: Trained, tmp_path: Path) -> None:
        run = trained(STAGE_0["z0_dp2_bf16"]) / "run"
        with pytest.raises(errors.WrongOption, match="has stage 0"):
            zckpt.convert(run, tmp_path / "universal", to="deepspeed-universal")
        zckpt.convert(run, tmp_path / "universal", to="deepspeed-universal", stage=2)
        assert zckpt.verify(run, tmp_path / "universal")["equal"]


@pytest.mark.engines
def test_frozen_parameters_have_numbers(trained: Trained, tmp_path: Path) -> None:
    """The list of torch's own optimizer has frozen parameters; ZeRO does not keep them."""
    case = STAGE_0["z0_dp2_fp32"]
    run, names = trained(case) / "run", names_of_optimizer(case)
    zckpt.reshard(run, tmp_path / "zero", stage=2, param_names=names)
    report = zckpt.reshard(tmp_path / "zero", tmp_path / "whole", stage=0)
    assert any("only the trained parameters" in line for line in texts(report["warnings"]))
    with pytest.raises(deepspeed.EngineError, match="doesn't match the size"):
        deepspeed.resume(case, tmp_path / "whole", tmp_path)
    report = zckpt.reshard(run, tmp_path / "again", stage=0, param_names=names)
    assert report["warnings"] == []
    zckpt.reshard(tmp_path / "again", tmp_path / "third", dp=3)
    assert zckpt.read(tmp_path / "third").notices.inferred == ()
    for path in (tmp_path / "again", tmp_path / "third"):
        (file,) = path.glob("*/mp_rank_00_model_states.pt")
        optimizer = torch.load(file, weights_only=False)["optimizer"]
        assert [group["params"] for group in optimizer["param_groups"]] == [
            [0, 1, 2, 3, 4, 5],
            [6, 7, 8, 9, 10, 11, 12],
        ]
        assert 2 not in optimizer["state"]
