"""Experts without ZeRO (stage 0): what real DeepSpeed held and holds again, and damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
)

from ... import faults
from ...conftest import texts
from ...engines.experts import CASES, WITHOUT_ZERO, ExpertCase, resume
from ..equality import load, same_bits
from .test_experts import INSIDE, oracle_of, settings_of, swap, tag_of
from .test_grid import edit

Trained = Callable[[str], Path]
FIRST, SEVERAL, FP32 = "dp4_ep2_z0", "dp4_ep4_ep2_z0", "dp4_ep2_z0_fp32"
EVERY = {**CASES, **WITHOUT_ZERO}

engines, first, matrix = pytest.mark.engines, pytest.mark.first, pytest.mark.matrix


@pytest.fixture
def run(trained_experts: Trained, tmp_path: Path) -> Path:
    """A copy of the first case's run: dp 4, ep 2, two layers of four experts."""
    return Path(shutil.copytree(trained_experts(FIRST) / "run", tmp_path / "run"))


def names_of(case: ExpertCase, oracle: dict[str, Any]) -> list[str] | None:
    """What the user must give: the parameters of rank 0 in the optimizer's order."""
    several = len(set(case.ep)) > 1
    return [name for group in oracle["order"] for name in group] if several else None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[engines, *([first] if name == FIRST else [])])
        for name, case in WITHOUT_ZERO.items()
    ],
)
def test_universal_is_what_all_ranks_held(
    case: ExpertCase, trained_experts: Trained, tmp_path: Path
) -> None:
    root, universal = trained_experts(case.name), tmp_path / "universal"
    oracle = oracle_of(root)
    names = names_of(case, oracle)
    report = zckpt.convert(root / "run", universal, param_names=names)
    assert report["left_out"] == []
    assert bool(report["inferred"]) == bool(report["warnings"]) == (case.dtype == "fp32")
    tensors = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    expected = {
        name: tensor
        for name, tensor in oracle["tensors"].items()
        if name.rpartition("/")[0] not in oracle["aliases"]
    }
    assert sorted(tensors) == sorted(expected)
    assert [name for name in expected if not same_bits(tensors[name], expected[name])] == []
    manifest = zckpt.read(root / "run", param_names=names)
    parameters = manifest.parameters
    assert {name: parameters[name].step for name in oracle["steps"]} == oracle["steps"]
    assert {name for name, p in parameters.items() if p.trainable} == oracle["trainable"]
    assert {name for name, p in parameters.items() if not p.trainable} == oracle["frozen"]
    aliases = {alias: name for name, p in parameters.items() for alias in p.aliases}
    assert aliases == oracle["aliases"]
    for group, members in enumerate(oracle["members"]):
        assert {name for name, p in parameters.items() if p.group == group} == members
    proven = case.dtype != "fp32"  # the order of the module shows names, and does not prove them
    assert zckpt.verify(root / "run", param_names=names)["equal"]
    assert zckpt.verify(root / "run", universal, param_names=names)["equal"] == proven
    if case.dtype != "fp32" and "fused" not in case.optimizer:
        gathered = zckpt.verify(
            root / "run", universal, gather=True, device="cpu", param_names=names
        )
        assert gathered["equal"], gathered
        assert gathered["tensors"] == len(expected)


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks, another `ep` and `stage`."""

    case: str
    dp: int
    ep: int | None
    stage: int
    through: bool = False  # by way of a universal checkpoint

    @property
    def name(self) -> str:
        return f"{self.case}-dp{self.dp}-ep{self.ep}-z{self.stage}" + "-universal" * self.through


MOVES = [
    Move(FIRST, 4, 4, 0),
    Move(FIRST, 2, None, 0, through=True),
    Move(FIRST, 4, 1, 1),
    Move(FIRST, 2, 2, 2, through=True),
    Move(FP32, 4, 4, 0),
    Move(FP32, 2, 2, 1),
    Move("dp2_ep2_z0_fp16", 2, 1, 0),
    Move("dp2_ep2_z0_fused", 2, 1, 0),
    Move("dp2_ep1_z0_fused", 4, 2, 2),
    Move(SEVERAL, 8, None, 0),
    Move(SEVERAL, 4, None, 2, through=True),
    Move("dp4_ep2_z1", 4, 2, 0),
    Move("dp4_ep2_own_groups", 4, 4, 0, through=True),
    Move("dp4_ep4_ep2", 4, None, 0),
]


def moves() -> list[Any]:
    def marks_of(number: int) -> list[Any]:
        in_engines = not number or number in (1, 2, 7, 9, 12)
        return [*([first] if not number else []), engines if in_engines else matrix]

    return [
        pytest.param(move, id=move.name, marks=marks_of(number))
        for number, move in enumerate(MOVES)
    ]


@pytest.mark.parametrize("move", moves())
def test_the_engine_resumes(move: Move, trained_experts: Trained, tmp_path: Path) -> None:
    case, root = EVERY[move.case], trained_experts(move.case)
    before, source = oracle_of(root), root / "run"
    names = names_of(case, before) if case.stage == 0 else None
    if move.through:
        zckpt.convert(source, tmp_path / "universal", param_names=names)
        source, names = tmp_path / "universal", None
    ep = {} if move.ep is None else {"ep": move.ep}
    zckpt.convert(
        source, tmp_path / "run", to="deepspeed", dp=move.dp, stage=move.stage,
        param_names=names, **ep,
    )  # fmt: skip
    sizes = case.ep if move.ep is None else (move.ep, move.ep)
    after = resume(case, tmp_path / "run", tmp_path, dp=move.dp, ep=sizes, stage=move.stage)
    is_new = {name.rpartition("/")[2] for name in set(after["tensors"]) - set(before["tensors"])}
    assert is_new <= ({"master"} if case.dtype == "fp32" else set())
    different = [
        name
        for name, tensor in before["tensors"].items()
        if not same_bits(tensor, after["tensors"][name])
    ]
    assert different == []
    for key in ("steps", "counters", "trainable", "frozen", "aliases"):
        assert after[key] == before[key], key
    for name in before["steps"]:
        assert settings_of(name, after) == settings_of(name, before)
    tolerance = 1e-5 if case.dtype == "fp32" else 2e-3
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)
    assert zckpt.verify(tmp_path / "run")["equal"]
    if case.dtype != "fp32":
        report = zckpt.verify(tmp_path / "run", root / "run", param_names=names_of(case, before))
        assert report["equal"], report


@engines
@first
def test_what_zckpt_writes_is_proven(run: Path, tmp_path: Path) -> None:
    """Its files list the names of parameters, so that the engine's rule has them too."""
    zckpt.reshard(run, tmp_path / "other", ep=4)
    universal = tmp_path / "universal"
    zckpt.convert(run, universal)
    assert zckpt.verify(tmp_path / "other", universal, gather=True, device="cpu")["equal"]
    assert [path.name[:11] for path in sorted(tag_of(tmp_path / "other").glob("expp*"))] == [
        f"expp_rank_{rank}" for rank in range(4)
    ]


@engines
@first
def test_stage_3_and_odd_sizes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="layers of experts in ZeRO stage 3"):
        zckpt.reshard(run, tmp_path / "other", stage=3)
    with pytest.raises(UnsupportedCheckpoint, match="universal checkpoints do not hold"):
        zckpt.convert(run, tmp_path / "other", to="deepspeed-universal")


@engines
def test_several_sizes_need_names(trained_experts: Trained) -> None:
    """The two programs' lines of --param-names give the names of rank 0."""
    root = trained_experts(SEVERAL)
    with pytest.raises(MissingData, match="sizes 2, 4, and in stage 0") as caught:
        zckpt.read(root / "run")
    assert "--param-names" in str(caught.value.hint)
    case = WITHOUT_ZERO[SEVERAL]
    names = names_of(case, oracle_of(root))
    assert names is not None
    layers = zckpt.read(root / "run", param_names=names).run.engine.experts  # type: ignore[union-attr]
    assert [(layer.name, layer.ep) for layer in layers] == [("sparse", 4), ("block.residual", 2)]


# -- damaged


@engines
@first
@pytest.mark.parametrize(
    ("rank", "said"), [(0, "lacks expp_rank_0_mp"), (1, "expected expp_rank_1_mp")]
)
def test_a_lost_optimizer(rank: int, said: str, run: Path) -> None:
    (tag_of(run) / f"expp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint) as caught:
        zckpt.read(run)
    assert said in f"{caught.value.message}; {caught.value.hint}"


@engines
@first
def test_all_optimizers_lost(run: Path) -> None:
    for path in tag_of(run).glob("expp*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpoint, match="optimizer files of all ep ranks are missing"):
        zckpt.read(run)


@engines
@first
def test_an_optimizer_too_many(run: Path) -> None:
    last = tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt"
    faults.copy_file(last, last.with_name("expp_rank_2_mp_rank_00_optim_states.pt"))
    with pytest.raises(InconsistentCheckpoint, match=r"expp_rank_2.* is one file too many"):
        zckpt.read(run)


@engines
@first
def test_swapped_optimizers(run: Path) -> None:
    names = (f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    swap(*(tag_of(run) / name for name in names))
    with pytest.raises(MissingData, match="rounds to no weight"):
        zckpt.read(run)


@engines
def test_swapped_flat_optimizers(trained_experts: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_experts("dp2_ep2_z0_fused") / "run", tmp_path / "run"))
    names = (f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    swap(*(tag_of(run) / name for name in names))
    with pytest.raises(MissingData, match="rounds to no weight"):
        zckpt.read(run)


@engines
@first
def test_an_optimizer_of_another_save(run: Path, tmp_path: Path) -> None:
    def change(value: Any) -> None:
        value["optimizer"]["fp32_groups"][1][3].data.mul_(2)

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    assert not zckpt.verify(run)["equal"]
    with pytest.raises(InconsistentCheckpoint, match="round"):
        zckpt.convert(run, tmp_path / "out")


@engines
@first
def test_swapped_optimizers_that_zckpt_wrote(run: Path, tmp_path: Path) -> None:
    """Names are stated there: `verify` finds it by the weights of each."""
    zckpt.reshard(run, tmp_path / "other")
    names = (f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    swap(*(tag_of(tmp_path / "other") / name for name in names))
    different = {line["tensor"] for line in zckpt.verify(tmp_path / "other")["differences"]}
    assert any(f"{INSIDE}0." in name for name in different)


@engines
@first
def test_dense_copies_that_differ(run: Path, tmp_path: Path) -> None:
    def change(value: Any) -> None:
        value["optimizer"]["optimizer_state_dict"]["state"][0]["exp_avg"][3].add_(1)

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    different = {line["tensor"] for line in zckpt.verify(run)["differences"]}
    assert different == {"embedding.weight/exp_avg"}
    with pytest.raises(
        InconsistentCheckpoint, match=r"ep ranks hold different replicas of 1 parameter \(embedding"
    ):
        zckpt.convert(run, tmp_path / "universal")
    assert not (tmp_path / "universal").exists()
    report = zckpt.convert(run, tmp_path / "universal", replicas="rank0")
    assert any("rank 0's is used" in line for line in texts(report["warnings"]))


@engines
@first
def test_a_dense_copy_that_lacks_a_state(run: Path) -> None:
    def change(value: Any) -> None:
        del value["optimizer"]["optimizer_state_dict"]["state"][0]["exp_avg_sq"]

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    message = "embedding.weight has other optimizer states here than on ep rank 0"
    with pytest.raises(InconsistentCheckpoint, match=message):
        zckpt.read(run)


@engines
@first
def test_a_dense_step_that_differs(run: Path) -> None:
    def change(value: Any) -> None:
        value["optimizer"]["optimizer_state_dict"]["state"][0]["step"] += 1

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.read(run)


@engines
@first
def test_settings_that_differ(run: Path) -> None:
    def change(value: Any) -> None:
        value["optimizer"]["optimizer_state_dict"]["param_groups"][1]["lr"] = 0.5

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    with pytest.raises(InconsistentCheckpoint, match=r"states param_groups\[1\].lr 0.5"):
        zckpt.read(run)


@engines
@first
def test_files_of_two_stages(run: Path) -> None:
    (tag_of(run) / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(InconsistentCheckpoint, match="files of two runs: one of stage 0"):
        zckpt.read(run)


@engines
@first
def test_a_step_of_experts_that_differs(run: Path) -> None:
    """The groups of all ep ranks have one step, also those of other experts."""

    def change(value: Any) -> None:
        for number in value["optimizer"]["optimizer_state_dict"]["param_groups"][1]["params"]:
            value["optimizer"]["optimizer_state_dict"]["state"][number]["step"] += 1

    edit(tag_of(run) / "expp_rank_1_mp_rank_00_optim_states.pt", change)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.read(run)


@engines
@first
def test_states_of_other_shapes_of_all_ep_ranks(run: Path, tmp_path: Path) -> None:
    """Without ZeRO each state has a place: those of every rank's experts, and copies of others."""
    for rank in range(2):

        def change(value: Any, rank: int = rank) -> None:
            optimizer = value["optimizer"]["optimizer_state_dict"]
            experts = optimizer["param_groups"][1]["params"]
            for number, state in optimizer["state"].items():
                state["rows"] = torch.arange(3) + number + 100 * rank * (number in experts)

        edit(tag_of(run) / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", change)
    zckpt.reshard(run, tmp_path / "other", ep=4)
    manifest = zckpt.read(tmp_path / "other")
    trained = {name for name, parameter in manifest.parameters.items() if parameter.trainable}
    assert manifest.states.other_values.keys() == trained
    assert zckpt.verify(tmp_path / "other", run)["equal"]
