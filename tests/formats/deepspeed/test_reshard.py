"""Directories that zckpt wrote, loaded by the unmodified engine: state, steps, next losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

from ...conftest import texts
from ...engines import deepspeed
from ...engines.cases import CASES, Case, zero
from ...engines.client import CLASSES
from ..equality import assert_proven, plain, same_bits

Trained = Callable[[Case], Path]


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks, `stage`, `dtype`, another `config` of the engine."""

    kind: str
    case: str
    dp: int
    stage: int | None = None
    dtype: str | None = None
    config: Mapping[str, Any] | None = None
    optimizer: str | None = None  # of the resuming engine, a key of the harness
    options: Mapping[str, Any] = field(default_factory=dict)
    through: bool = False  # by way of a universal checkpoint

    @property
    def name(self) -> str:
        parts = [self.case, f"dp{self.dp}"]
        parts += [f"z{self.stage}"] if self.stage else []
        parts += [self.dtype] if self.dtype else []
        parts += [self.kind.replace(" ", "_"), *(["universal"] if self.through else [])]
        return "-".join(parts)


def plain_moves() -> list[Move]:
    """Every dp a -> b over {1, 2, 3, 4}, every stage to every stage."""
    moves = []
    for stage in (1, 2, 3):
        for a in (1, 2, 3, 4):
            for b in (1, 2, 3, 4):
                case = f"z{stage}_dp{a}_bf16"
                moves.append(Move(f"stage {stage}", case, b, through=(a + b) % 2 == 1))
    for stage in (1, 2, 3):
        for other in {1, 2, 3} - {stage}:
            kind = f"stage {stage} to {other}"
            moves.append(Move(kind, f"z{stage}_dp3_bf16", 2, other))
            moves.append(Move(kind, f"z{stage}_dp2_bf16", 4, other, through=True))
    return moves


OPTIMIZERS = ("adam", "amsgrad", "nadam", "rmsprop", "sgd", "momentum", "lion", "fused_adam")
ROUND_ROBIN = zero(round_robin_gradients=True)

MOVES = [
    Move("round robin to round robin", "z2_dp3_round_robin", 2),
    Move("round robin to round robin", "z2_dp2_round_robin", 3, through=True),
    Move("round robin to plain", "z2_dp3_round_robin", 2, config={}),
    Move("round robin to plain", "z1_dp2_round_robin", 2, config={}),
    Move("plain to round robin", "z2_dp2_bf16", 3, config=ROUND_ROBIN),
    Move("round robin to stage 3", "z2_dp3_round_robin", 2, 3, config={}),
    *plain_moves(),
    *(Move("BF16_Optimizer", f"z1_dp{a}_bf16_optimizer", b) for a in (1, 2, 3) for b in (1, 2, 3)),
    Move("BF16_Optimizer to stage 2", "z1_dp2_bf16_optimizer", 3, 2),
    Move("BF16_Optimizer to stage 3", "z1_dp3_bf16_optimizer", 2, 3, config={}),
    Move("only padding", "z1_dp4_only_padding", 8),
    Move("only padding", "z2_dp8_only_padding", 3),
    Move("only padding", "z3_dp4_only_padding", 8),
    Move("groups", "z2_dp3_three_groups", 2),
    Move("groups", "z3_dp3_three_groups", 4),
    *(
        Move(f"optimizer {name.replace('_', ' ')}", f"z{stage}_dp3_{name}", 2, other)
        for name in OPTIMIZERS
        for stage, other in ((2, None), (3, None), (2, 3), (3, 1))
    ),
    Move("optimizer apex", "z2_dp2_apex_fused_adam", 3),
    Move("optimizer muon", "z2_dp2_muon", 3),
    Move("optimizer muon", "z1_dp3_muon", 2),
    Move("optimizer muon", "z2_dp8_muon", 4),
    Move("sub-groups", "z3_dp3_sub_groups", 2),
    Move("sub-groups", "z3_dp2_sub_groups", 4),
    Move("other sub_group_size", "z3_dp2_sub_groups", 3, config=zero(sub_group_size=100)),
    Move("other sub_group_size", "z3_dp2_bf16", 2, config=zero(sub_group_size=150)),
    Move("sub-groups to stage 2", "z3_dp2_sub_groups", 3, 2, config={}),
    Move("aligned", "z2_dp3_aligned", 2),
    Move("aligned", "z1_dp2_aligned", 3),
    Move("aligned", "z2_dp3_aligned_round_robin", 2),
    Move("aligned to plain", "z2_dp3_aligned", 2, config={}),
    Move("plain to aligned", "z2_dp2_bf16", 3, config=zero(parameter_alignment=True)),
    Move("fp32", "z2_dp2_fp32", 3),
    Move("fp32", "z3_dp2_fp32", 1),
    Move("fp16", "z2_dp2_fp16_dynamic", 3),
    Move("fp16", "z3_dp2_fp16_dynamic", 1),
    Move("fp16", "z1_dp2_fp16_static", 3),
    Move("fp16 skipped", "z2_dp2_fp16_skipped", 1),
    Move("strided", "z2_dp2_strided", 3),
    Move("unused", "z2_dp3_unused", 2),
    Move("unused", "z3_dp3_unused", 2),
    *(
        Move(f"no frozen stage {stage}", f"z{stage}_dp2_no_frozen", dp, other, through=through)
        for stage in (2, 3, 1)
        for dp, other, through in (
            (3, None, False),
            (2, None, False),
            (1, None, True),
            (3, 1 + stage % 3, True),
        )
    ),
    Move("no frozen stage 1", "z1_dp2_no_frozen", 3, 3),
    Move("client state", "z3_dp2_client_state", 3),
    Move("client state", "z2_dp2_client_state", 3, through=True),
    Move("scheduler", "z2_dp2_warmup", 3),
    Move("scheduler", "z3_dp2_lambda", 3),
    Move("offload", "z2_dp2_offload", 3),
    Move("offload", "z3_dp2_offload", 1),
    Move("persistent", "z3_dp2_persistent", 3),
    Move("stage 3", "z3_dp4_hpz", 2),
    Move("stage 3", "z3_dp2_plain", 4, config=zero(zero_hpz_partition_size=2)),
    Move("dtype", "z2_dp2_bf16", 3, dtype="fp32"),
    Move("dtype", "z3_dp2_bf16", 2, dtype="fp32"),
    Move("dtype", "z2_dp2_fp32", 2, dtype="bf16"),
    Move("dtype", "z2_dp2_bf16", 2, dtype="fp16", config={"fp16": {"initial_scale_power": 8}}),
    Move("dtype", "z2_dp2_fp16_dynamic", 2, dtype="bf16", config={}),
    Move("dtype", "z3_dp2_fp16_dynamic", 3, dtype="fp32", config={}),
    Move("many ranks", "z1_dp12_many_ranks", 3),
    Move("many ranks", "z3_dp12_many_ranks", 2),
    Move("many ranks", "z2_dp2_bf16", 12),
]


def every_move() -> list[Any]:
    seen: set[str] = set()
    rows = []
    for move in MOVES:
        marks = [pytest.mark.engines] + ([] if move.kind in seen else [pytest.mark.first])
        seen.add(move.kind)
        rows.append(pytest.param(move, id=move.name, marks=marks))
    return rows


def engine_config(case: Case, move: Move) -> dict[str, Any]:
    """The ds_config as the resuming engine will run with, in the words of a user's file."""
    stage = move.stage or case.stage
    dtype = move.dtype or case.dtype
    extra = dict(case.config if move.config is None else move.config)
    config: dict[str, Any] = {**extra}
    config["zero_optimization"] = {**extra.get("zero_optimization", {}), "stage": stage}
    if dtype != "fp32":
        config[dtype] = {**extra.get(dtype, {}), "enabled": True}
    return config


def written(move: Move, trained: Trained, tmp_path: Path) -> Path:
    case = CASES[move.case]
    source = trained(case) / "run"
    if move.through:
        zckpt.convert(source, tmp_path / "universal")
        source = tmp_path / "universal"
    config = None if move.config is None else engine_config(case, move)
    options = dict(
        dp=move.dp,
        stage=move.stage,
        dtype=move.dtype if config is None else None,
        config=config,
        **move.options,
    )
    zckpt.reshard(source, tmp_path / "resharded", allow_object=CLASSES, **options)
    return tmp_path / "resharded"


@pytest.mark.parametrize("move", every_move())
def test_the_engine_resumes(move: Move, trained: Trained, tmp_path: Path) -> None:
    import dataclasses

    case = CASES[move.case]
    before = torch.load(trained(case) / "oracle.pt", weights_only=False)
    directory = written(move, trained, tmp_path)
    if move.dtype:
        case = dataclasses.replace(case, dtype=move.dtype)
    after = deepspeed.resume(
        case, directory, tmp_path, dp=move.dp, stage=move.stage, config=move.config
    )
    assert_same_state(before, after, weights=not move.dtype)
    if move.dtype == "bf16" and CASES[move.case].dtype == "fp16":
        # frozen weights have no masters to be rounded from: fp16 to bf16 loses digits
        differences = zckpt.verify(trained(CASES[move.case]) / "run", directory)["differences"]
        assert {line["tensor"] for line in differences} == {
            f"{name}/param" for name in before["frozen"]
        }
    else:
        assert_proven(trained(CASES[move.case]) / "run", directory)
    same = move.dp == case.dp and move.stage in (None, case.stage) and not move.dtype
    if same and move.config is None:
        assert after["losses"] == before["losses"]
    tolerance = 0.05 if move.dtype else 1e-6
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)


def assert_same_state(before: dict[str, Any], after: dict[str, Any], weights: bool) -> None:
    """Bit for bit; `weights` says whether the module's own are of the same type."""
    assert sorted(before["tensors"]) == sorted(after["tensors"])
    for name, tensor in before["tensors"].items():
        if weights or not name.endswith("/param"):
            loaded = after["tensors"][name]
            if loaded.dtype == torch.float32:  # torch's load_state_dict widens Muon's momentum
                tensor = tensor.float()
            assert same_bits(tensor, loaded), name
    for name, tensor in before["buffers"].items():
        assert same_bits(tensor, after["buffers"][name]), name
    for key in ("steps", "scalars", "trainable", "frozen", "aliases", "counters"):
        assert before[key] == after[key], key
    for one, other in zip(before["groups"], after["groups"], strict=True):
        assert {key: plain(value) for key, value in one.items()} == {
            key: plain(value) for key, value in other.items()
        }
    assert before["lr_scheduler"] == after["lr_scheduler"]
    for key, value in before["client_state"].items():
        assert repr(after["client_state"][key]) == repr(value), key


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("stage", [2, 3])
class TestWithoutFrozenParameters:
    """`frozen_param_shapes` and `frozen_param_fragments` are None, not empty, as in the source."""

    def fields(self, run: Path) -> list[Any]:
        import deepspeed  # noqa: F401  (its classes are in the pickle)

        return [
            torch.load(file, weights_only=False)[f"frozen_param_{name}"]
            for file in sorted(run.rglob("*model_states.pt"))
            for name in ("shapes", "fragments")
        ]

    @pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal"])
    @pytest.mark.parametrize("through", [False, True])
    def test_none_stays_none(
        self, to: str, through: bool, stage: int, trained: Trained, tmp_path: Path
    ) -> None:
        source = trained(CASES[f"z{stage}_dp2_no_frozen"]) / "run"
        if through:
            zckpt.convert(source, tmp_path / "universal")
            source = tmp_path / "universal"
        zckpt.convert(source, tmp_path / "run", to=to, dp=3)
        assert self.fields(tmp_path / "run") == (2 if stage == 2 else 6) * [None]
        assert zckpt.verify(source, tmp_path / "run")["equal"]

    def test_none_is_not_empty(self, stage: int, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[f"z{stage}_dp2_plain"]) / "run"
        zckpt.reshard(run, tmp_path / "run", dp=2)
        assert self.fields(tmp_path / "run") == self.fields(run)
        assert not any(self.fields(run))
        assert None not in self.fields(run)

    def test_a_difference_is_found(self, stage: int, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[f"z{stage}_dp2_no_frozen"]) / "run"
        zckpt.reshard(run, tmp_path / "run", dp=2)
        for file in (tmp_path / "run").rglob("*model_states.pt"):
            value = torch.load(file, weights_only=False)
            value |= {"frozen_param_shapes": {}, "frozen_param_fragments": {}}
            torch.save(value, file)
        stated = {
            "key": "frozen_param_fragments",
            "a": "None (saved without frozen parameters)",
            "b": "all frozen parameters",
        }
        report = zckpt.diff(run, tmp_path / "run")
        assert not report["equal"]
        assert report["states"] == [stated]
        report = zckpt.verify(run, tmp_path / "run")
        assert report["equal"]  # every value is
        assert any("frozen_param_fragments: None" in note for note in texts(report["notes"]))
