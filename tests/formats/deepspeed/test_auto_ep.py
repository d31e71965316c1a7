"""AutoEP: experts of a Hugging Face model that real DeepSpeed spread over ranks, and took back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    WrongOption,
)

from ...conftest import Once, texts
from ...engines.autoep import CASES, AutoEPCase, resume, train
from ..equality import is_equal, load, same_bits
from .test_experts import oracle_of, swap, tag_of
from .test_grid import edit

Trained = Callable[[str], Path]
FIRST = "autoep_dp2_ep2"
READ = [name for name, case in CASES.items() if case.stage in (1, 2) and case.tp == 1]
LAYER = "model.layers.1.mlp"

engines, first = pytest.mark.engines, pytest.mark.first


@pytest.fixture(scope="session")
def trained_auto(once: Once) -> Trained:
    """Trains a case: a folder with run/ and oracle.pt."""
    return lambda name: once("auto_ep", name, partial(train, CASES[name])).parent


@pytest.fixture
def run(trained_auto: Trained, tmp_path: Path) -> Path:
    """A copy of the first case's run: dp 2, ep 2, two layers of four experts."""
    return Path(shutil.copytree(trained_auto(FIRST) / "run", tmp_path / "run"))


def slices(oracle: dict[str, Any]) -> dict[str, Tensor]:
    """What the ranks held, with a tensor for each expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in oracle["tensors"].items():
        parameter, _, slot = name.rpartition("/")
        if parameter in oracle["aliases"]:
            continue
        if parameter.rpartition(".")[0].endswith(".experts"):
            tensors |= {f"{parameter}.{n}/{slot}": each for n, each in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


@engines
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=[first] if name == FIRST else []) for name in READ],
)
def test_universal_is_what_all_ranks_held(
    case: AutoEPCase, trained_auto: Trained, tmp_path: Path
) -> None:
    root, universal = trained_auto(case.name), tmp_path / "universal"
    oracle = oracle_of(root)
    report = zckpt.convert(root / "run", universal)
    assert (report["warnings"], report["left_out"]) == ([], [])
    tensors = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    expected = slices(oracle)
    assert sorted(tensors) == sorted(expected)
    different = [n for n, t in expected.items() if not same_bits(tensors[n], t.contiguous())]
    assert different == []
    manifest = zckpt.read(root / "run")
    aliases = {alias: name for name, p in manifest.parameters.items() for alias in p.aliases}
    assert aliases == oracle["aliases"]
    steps = {name: p.step for name, p in manifest.parameters.items() if ".experts." not in name}
    assert steps == {n: step for n, step in oracle["steps"].items() if ".experts." not in n}
    for paths in ([root / "run"], [root / "run", universal], [universal, root / "run"]):
        report = zckpt.verify(*paths)
        assert report["equal"], report
    gathered = zckpt.verify(root / "run", universal, gather=True, device="cpu")
    assert gathered["equal"], gathered


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks, another `ep` and `stage`."""

    case: str
    dp: int
    ep: int
    stage: int
    through: str | None = None  # by way of a checkpoint of this format

    @property
    def name(self) -> str:
        return f"{self.case}-dp{self.dp}-ep{self.ep}-z{self.stage}-{self.through}"


MOVES = [
    Move(FIRST, 4, 4, 1),
    Move(FIRST, 2, 1, 2, through="universal"),
    Move(FIRST, 4, 2, 2, through="dcp"),
    Move("autoep_dp4_ep2", 2, 2, 2),
    Move("autoep_dp4_ep2", 1, 1, 1),
    Move("autoep_dp4_ep2_z1_fp32", 4, 4, 1),
    Move("autoep_dp4_ep4_bf16_optimizer", 2, 1, 1),
    Move("autoep_dp2_ep1_qwen", 4, 4, 2),
]


def marks_of(move: Move) -> list[Any]:
    if move == MOVES[0]:
        return [engines, first]
    return [engines] if move in MOVES[1:3] or "qwen" in move.case else [pytest.mark.matrix]


@pytest.mark.parametrize(
    "move", [pytest.param(move, id=move.name, marks=marks_of(move)) for move in MOVES]
)
def test_the_engine_resumes(move: Move, trained_auto: Trained, tmp_path: Path) -> None:
    case, root = CASES[move.case], trained_auto(move.case)
    before, source = oracle_of(root), root / "run"
    if move.through:
        zckpt.convert(source, tmp_path / move.through, to=move.through)
        source = tmp_path / move.through
    sizes = {"dp": move.dp, "ep": move.ep, "stage": move.stage}
    bare = {"dtype": case.dtype} if move.through == "dcp" else {}  # which has no ds_config
    report = zckpt.convert(source, tmp_path / "run", to="deepspeed", **sizes, **bare)
    changed = any("autoep_size" in line for line in texts(report["warnings"]))
    assert changed == (move.ep != case.ep or move.through == "dcp")  # which states no size
    after = resume(case, tmp_path / "run", tmp_path, **sizes)
    assert sorted(after["tensors"]) == sorted(before["tensors"])
    different = [n for n, t in before["tensors"].items() if not same_bits(t, after["tensors"][n])]
    assert different == []
    for key in ("steps", "counters", "trainable", "aliases"):
        assert after[key] == before[key], key
    tolerance = 1e-5 if case.dtype == "fp32" else 2e-3
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)
    for reports in ([tmp_path / "run"], [root / "run", tmp_path / "run"]):
        assert is_equal(zckpt.verify(*reports), move.through)
    universal = tmp_path / "whole"
    zckpt.convert(root / "run", universal)
    report = zckpt.verify(tmp_path / "run", universal, gather=True, device="cpu")
    assert is_equal(report, move.through), report


# -- what is refused


@engines
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("autoep_dp2_ep2_z3", "AutoEP in ZeRO stage 3"),
        ("autoep_dp2_ep2_z0", "AutoEP in ZeRO stage 0"),
    ],
)
def test_other_stages_are_refused_by_name(name: str, what: str, trained_auto: Trained) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=what) as caught:
        zckpt.read(trained_auto(name) / "run")
    assert "stages 1 and 2" in str(caught.value.hint)


@engines
@first
def test_unknown_layouts_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        ranks = model["ds_autoep_layers"][1]["expert_placement"]["ranks"]
        ranks[0]["experts"], ranks[1]["experts"] = [0, 2], [1, 3]

    with pytest.raises(WrongOption, match="AutoEP's experts in ZeRO stage 0"):
        zckpt.reshard(run, tmp_path / "other", stage=0)
    with pytest.raises(WrongOption, match="layers of experts in ZeRO stage 3"):
        zckpt.reshard(run, tmp_path / "other", stage=3)
    edit(tag_of(run) / "mp_rank_00_model_states.pt", change)
    with pytest.raises(
        UnsupportedCheckpoint, match=f"AutoEP experts of {LAYER} that are not assigned in order"
    ):
        zckpt.read(run)


@engines
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tp > 1])
def test_folded_tensor_ranks_are_refused_by_name(name: str, trained_auto: Trained) -> None:
    """AutoEP beside AutoTP. Experts and optimizers of a model rank are not counted from 0."""
    with pytest.raises(UnsupportedCheckpoint, match="AutoEP beside tensor ranks") as caught:
        zckpt.read(trained_auto(name) / "run")
    assert "without AutoTP" in str(caught.value.hint)


# -- damaged


@engines
@first
def test_damaged_files(run: Path, tmp_path: Path) -> None:
    one, other = (tag_of(run) / f"layer_1_expert_{n}_mp_rank_00_model_states.pt" for n in (1, 2))
    swap(one, other)
    with pytest.raises(InconsistentCheckpoint, match="holds expert 2"):
        zckpt.read(run)
    swap(one, other)
    edit(one, lambda value: value[f"{LAYER}.experts.w2.1"].mul_(2))
    differences = zckpt.verify(run)["differences"]
    assert [line["tensor"] for line in differences] == [f"{LAYER}.experts.w2.1/param"]
    other.unlink()
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_1_expert_2"):
        zckpt.read(run)


@engines
@first
def test_swapped_ranks(run: Path) -> None:
    names = (f"bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(2))
    swap(*(tag_of(run) / name for name in names))
    different = {line["tensor"] for line in zckpt.verify(run)["differences"]}
    assert f"{LAYER}.experts.w1.0/param" in different or f"{LAYER}.experts.w1.0/master" in different


@engines
@first
def test_a_slice_in_the_files_is_a_slice_of_the_stack(run: Path, tmp_path: Path) -> None:
    """What the engine stacks has the layout of its own files."""
    zckpt.reshard(run, tmp_path / "other", ep=1)
    model = torch.load(
        tag_of(tmp_path / "other") / "mp_rank_00_model_states.pt", weights_only=False
    )
    assert tuple(model["param_shapes"][1][f"{LAYER}.experts.w1"]) == (4, 20, 16)
    (layer,) = (each for each in model["ds_autoep_layers"] if each["module_path"] == LAYER)
    assert (layer["ep_size"], layer["num_local_experts"]) == (1, 4)
    assert model["ds_config"]["expert_parallel"]["autoep_size"] == 1
