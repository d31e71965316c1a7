"""Experts on several model ranks: what real DeepSpeed held and holds again, and damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    WrongOption,
)

from ...conftest import Once, texts
from ...engines.expert_grids import CASES, ExpertGridCase, resume, train
from ..equality import load, same_bits
from .test_experts import INSIDE, oracle_of, swap, tag_of
from .test_grid import edit

Trained = Callable[[str], Path]
FIRST, _ = FIRSTS = "pp2_dp2_ep2", "tp2_dp2_sliced"
RULES = r"""
(embedding|head)\.weight = 0
attention\.fused\..* = 0:16,4,8
attention\.dense\.weight = 1
attention\.dense\.bias = replicated
.*norm\..* = replicated
.*gate\.wg\.weight = replicated
.*\.into\.(weight|bias) = 0
.*\.out\.weight = 1
.*\.out\.bias = replicated
"""

pytestmark = pytest.mark.engines
first = pytest.mark.first


@pytest.fixture(scope="session")
def trained_expert_grids(once: Once) -> Trained:
    """Trains a case: a folder with run/ and oracle.pt."""
    return lambda name: once("expert_grid", name, partial(train, CASES[name])).parent


@pytest.fixture
def run(trained_expert_grids: Trained, tmp_path: Path) -> Path:
    """A copy of the first case's run: pp 2, dp 2, ep 2, a layer of four experts in each stage."""
    return Path(shutil.copytree(trained_expert_grids(FIRST) / "run", tmp_path / "run"))


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """How tensor ranks cut the layers, also those of the experts."""
    path = tmp_path / "rules.txt"
    path.write_text(RULES)
    return path


def cases() -> list[Any]:
    return [
        pytest.param(case, id=name, marks=[first] if name in FIRSTS else [pytest.mark.matrix])
        for name, case in CASES.items()
        if case.sliced or case.tp == 1
    ]


@pytest.mark.parametrize("case", cases())
def test_universal_is_what_all_ranks_held(
    case: ExpertGridCase, trained_expert_grids: Trained, rules: Path, tmp_path: Path
) -> None:
    root, universal = trained_expert_grids(case.name), tmp_path / "universal"
    oracle = oracle_of(root)
    options: dict[str, Any] = {"tp_rules": rules} if case.tp > 1 else {}
    report = zckpt.convert(root / "run", universal, **options)
    assert (report["warnings"], report["left_out"]) == ([], [])
    tensors = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    expected = oracle["tensors"]
    assert sorted(tensors) == sorted(expected)
    assert [name for name in expected if not same_bits(tensors[name], expected[name])] == []
    manifest = zckpt.read(root / "run", **options)
    assert {name: manifest.parameters[name].step for name in oracle["steps"]} == oracle["steps"]
    trained = {name for name, about in manifest.parameters.items() if about.trainable}
    assert (trained, {*manifest.parameters} - trained) == (oracle["trainable"], oracle["frozen"])
    for paths in ([root / "run"], [root / "run", universal], [universal, root / "run"]):
        report = zckpt.verify(*paths, **options)
        assert report["equal"], report["differences"]
    gathered = zckpt.verify(root / "run", universal, gather=True, device="cpu", **options)
    assert gathered["equal"], gathered["differences"]


# -- writing


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks and another `ep`; None keeps the source's.

    `bounds` are those of other stages.
    """

    case: str
    dp: int
    ep: int | None = None
    tp: int | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        others = (("tp", self.tp), ("pp", self.bounds and len(self.bounds) - 1))
        parts = [f"{key}{value}" for key, value in others if value]
        return "-".join([f"{self.case}-dp{self.dp}-ep{self.ep}", *parts])


UNIFORM = (0, 4, 7)
MOVES = [
    Move("pp2_dp2_ep2", 1, 1),
    Move("pp2_dp2_ep2", 2),
    Move("pp2_dp2_ep2", 2, 1),
    Move("pp2_dp2_ep2", 4, 4),
    Move("pp2_dp2_ep1", 2, 2),
    Move("pp2_dp2_fp32", 2, 1),
    Move("pp2_dp2_counts", 1, 1),
    Move("pp2_dp2_bf16_optimizer", 2, 1),
    Move("pp2_dp2_round_robin", 2, 1),
    Move("pp1_dp4_ep2", 2, 1),
    Move("pp2_dp4_ep2", 4, 4),
    Move("pp2_dp4_ep2", 2),
    Move("pp2_dp4_data_first", 4, 4),
    Move("pp2_dp4_data_first", 2, 1),
    Move("tp2_dp2_sliced", 1, 1),
    Move("tp2_dp2_sliced", 2, 1),
    Move("tp2_dp2_sliced", 4, 4),
    Move("tp2_dp2_sliced_z1", 4),
    Move("tp2_dp2_sliced", 2, 2, tp=1),
    Move("pp2_dp2_ep2", 4, 4, bounds=(0, 7)),
    Move("pp2_dp2_fp32", 2, bounds=(0, 7)),
    Move("pp2_dp2_counts", 2, 2, bounds=(0, 7)),
    Move("pp2_dp2_bf16_optimizer", 1, 1, bounds=(0, 7)),
    Move("pp2_dp2_round_robin", 2, bounds=(0, 7)),
    Move("pp2_dp4_data_first", 4, bounds=(0, 7)),
    Move("pp1_dp4_ep2", 2, bounds=UNIFORM),
    Move("pp1_dp2_ep1", 2, 2, bounds=UNIFORM),
]

FIRST_CUT = Move("pp2_dp2_ep2", 4, 4, bounds=(0, 7))


def moves() -> list[Any]:
    return [
        pytest.param(
            move,
            id=move.name,
            marks=[first] if move in (MOVES[0], FIRST_CUT) else [pytest.mark.matrix],
        )
        for move in MOVES
    ]


@pytest.mark.parametrize("move", moves())
def test_the_engine_resumes(
    move: Move, trained_expert_grids: Trained, rules: Path, tmp_path: Path
) -> None:
    case, root = CASES[move.case], trained_expert_grids(move.case)
    before = oracle_of(root)
    options: dict[str, Any] = {} if move.ep is None else {"ep": move.ep}
    if move.tp is not None:
        options |= {"tp": move.tp, "tp_rules": rules}
    if move.bounds is not None:
        options |= {"pp_bounds": move.bounds}
    report = zckpt.reshard(root / "run", tmp_path / "run", dp=move.dp, **options)
    guesses = move.bounds == UNIFORM and case.tied  # where a tied layer is used
    assert any("tied layer embed" in line for line in texts(report["warnings"])) == guesses
    sizes = case.ep if move.ep is None else (move.ep, move.ep)
    tp = move.tp or case.tp
    pp = case.pp if move.bounds is None else len(move.bounds) - 1
    after = resume(case, tmp_path / "run", tmp_path, dp=move.dp, ep=sizes, tp=tp, pp=pp)
    assert sorted(after["tensors"]) == sorted(before["tensors"])
    different = [
        name
        for name, tensor in before["tensors"].items()
        if not same_bits(tensor, after["tensors"][name])
    ]
    assert different == []
    for key in ("steps", "counters", "trainable", "frozen", "settings"):
        assert after[key] == before[key], key
    tolerance = 1e-5 if case.dtype == "fp32" else 2e-3
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)
    if (move.dp, sizes, tp, pp) == (case.dp, case.ep, case.tp, case.pp):
        assert after["losses"] == before["losses"]
    options = {"tp_rules": rules} if case.tp > 1 else {}
    for report in (
        zckpt.verify(tmp_path / "run", **options),
        zckpt.verify(root / "run", tmp_path / "run", **options),
        zckpt.diff(tmp_path / "run", root / "run", **options),
    ):
        assert report["equal"], report


@first
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 4}, "2 ranks cannot share the 4 experts of 1.moe"),
        ({"pp": 3}, "--pp 3 needs the first layer of each stage"),
        ({"pp_bounds": (0, 3, 5, 7)}, "would have none of the layers of experts"),
        ({"pp_bounds": (0, 2, 3, 7)}, r"layers 2 to 2 .* have no trained parameter"),
        ({"pp_bounds": (0, 2, 6)}, r"an unknown layer\. By the bounds, it is one of the layers"),
        ({"pp_partition": "parameters"}, "counts the tied layer embed wherever it is used"),
    ],
)
def test_what_cannot_be_written(
    options: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(WrongOption, match=message):
        zckpt.reshard(run, tmp_path / "other", **options)
    assert not (tmp_path / "other").exists()


# -- damaged, and unknown


@first
def test_a_lost_expert(run: Path) -> None:
    (tag_of(run) / "layer_0_expert_2_mp_rank_01_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_0_expert_2_mp_rank_01"):
        zckpt.read(run)


@first
def test_an_expert_of_another_stage(run: Path) -> None:
    """The names in the file show the layer, and so the stage."""
    names = (f"layer_0_expert_1_mp_rank_{stage:02d}_model_states.pt" for stage in range(2))
    swap(*(tag_of(run) / name for name in names))
    with pytest.raises(InconsistentCheckpoint, match=r"holds expert 1 of 4\.moe"):
        zckpt.read(run)


@first
def test_all_experts_of_another_stage(run: Path) -> None:
    for expert in range(4):
        names = (f"layer_0_expert_{expert}_mp_rank_{n:02d}_model_states.pt" for n in range(2))
        swap(*(tag_of(run) / name for name in names))
    with pytest.raises(InconsistentCheckpoint, match=r"of 4\.moe, but .* belongs to another layer"):
        zckpt.read(run)


@first
def test_swapped_ranks_of_a_stage(run: Path) -> None:
    """Ranks 0 and 1 of the second stage have other experts: bytes show it."""
    names = (f"bf16_zero_pp_rank_{n}_mp_rank_01_optim_states.pt" for n in range(2))
    swap(*(tag_of(run) / name for name in names))
    different = {line["tensor"] for line in zckpt.verify(run)["differences"]}
    assert any(name.startswith(f"4.moe{INSIDE}0.") for name in different)
    assert any(name.startswith(f"4.moe{INSIDE}2.") for name in different)
    assert not any(name.startswith(f"1.moe{INSIDE}") for name in different)


@first
def test_a_tied_copy_that_drifted(run: Path) -> None:
    def change(value: Any) -> None:
        states = value["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["exp_avg"][3:4].add_(1)

    edit(tag_of(run) / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", change)
    different = {line["tensor"] for line in zckpt.verify(run)["differences"]}
    assert different == {"tied_modules.embed.weight/exp_avg"}


@first
def test_a_stage_without_experts(run: Path) -> None:
    """The engine would write a file for each layer of such a stage."""
    torch.save({}, tag_of(run) / "layer_05-model_states.pt")
    with pytest.raises(UnsupportedCheckpoint, match="in only some stages of a pipeline"):
        zckpt.read(run)


@first
def test_older_files_state_no_sizes(run: Path) -> None:
    """Before DeepSpeed 0.19.7 the parameters alone tell stages from tensor ranks."""
    for path in tag_of(run).glob("mp_rank_*"):
        edit(path, lambda model: model.pop("checkpoint_parallel_dimensions"))
    manifest = zckpt.read(run)
    assert (manifest.source["pp"], manifest.source["tp"]) == (2, 1)


def test_experts_that_tensor_ranks_share_are_refused(trained_expert_grids: Trained) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="are spread over tensor ranks"):
        zckpt.read(trained_expert_grids("tp2_dp2_spread") / "run")


@first
def test_a_layer_that_no_expert_file_has(run: Path) -> None:
    for path in tag_of(run).glob("mp_rank_*"):
        edit(path, lambda model: model.update(num_experts=[3]))
    with pytest.raises(InconsistentCheckpoint, match=r"layer_0_expert_3_.* one file too many"):
        zckpt.read(run)


@first
def test_weights_only(run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / "weights", weights_only=True)
    weights = load(tmp_path / "weights")
    file = torch.load(tag_of(run) / "layer_0_expert_3_mp_rank_01_model_states.pt")
    name = f"4.moe{INSIDE}3.into.weight"
    assert same_bits(weights[f"{name}/param"], file[name])
