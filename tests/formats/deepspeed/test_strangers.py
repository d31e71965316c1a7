"""Models and grids that no other test here has, with real DeepSpeed on both ends."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import InconsistentCheckpoint

from ...conftest import Once, texts
from ...engines.strangers import CASES, Sizes, resume, train
from ...engines.strangers_models import RULES, WORDS
from ..equality import load, same_bits
from .test_experts import swap
from .test_grid import edit

Trained = Callable[[str], Path]
engines, matrix = pytest.mark.engines, pytest.mark.matrix

BY_RULES = {"decoder_z3"}  # its program saves no universal_checkpoint_info
BY_ORDER = {"plain_z0"}  # names of parameters are inferred
VOCABULARY = re.compile(r"(embed|wte)\.weight/")
UNSAVED = {"expert_names"}  # DeepSpeed does not save all weights of such names


@pytest.fixture(scope="session")
def trained_strangers(once: Once) -> Trained:
    """Trains a case: a folder with run/, oracle.pt and rules.txt."""

    def trained(name: str) -> Path:
        root = once("strangers", name, partial(train, CASES[name])).parent
        (root / "rules.txt").write_text(RULES)
        return root

    return trained


def options_of(root: Path) -> dict[str, Any]:
    return {"tp_rules": root / "rules.txt"} if root.name in BY_RULES else {}


def oracle_of(root: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(root / "oracle.pt", weights_only=False)
    return oracle


@engines
@pytest.mark.parametrize("name", CASES)
def test_universal_is_what_all_ranks_held(
    name: str, trained_strangers: Trained, tmp_path: Path
) -> None:
    root, case, universal = trained_strangers(name), CASES[name], tmp_path / "universal"
    oracle, options = oracle_of(root), options_of(root)
    report = zckpt.convert(root / "run", universal, **options)
    assert report["left_out"] == []
    assert len(report["warnings"]) == (name in BY_ORDER | UNSAVED)
    assert bool(report["inferred"]) == (name in BY_ORDER)
    tensors = {key: each for key, each in load(universal).items() if not key.endswith("/state")}
    expected = oracle["tensors"]
    if case.stage == 3:
        expected = {
            key: each
            for key, each in expected.items()
            if not key.endswith("/param") or key.removesuffix("/param") not in oracle["trainable"]
        }
    lost = {key for key in expected.keys() - tensors.keys() if key.endswith("/param")}
    assert bool(lost) == (name in UNSAVED)
    assert tensors.keys() == expected.keys() - lost
    different = [key for key in tensors if not same_bits(tensors[key], expected[key])]
    assert different == []
    parameters = zckpt.read(root / "run", **options).parameters
    assert {name: parameters[name].step for name in oracle["steps"]} == oracle["steps"]
    for paths in ([root / "run"], [root / "run", universal], [universal, root / "run"]):
        found = zckpt.verify(*paths, **options)
        assert found["differences"] == found["problems"] == []
        assert found["equal"] or name in BY_ORDER
    if case.stage:
        gathered = zckpt.verify(root / "run", universal, gather=True, device="cpu", **options)
        assert gathered["equal"], gathered


@dataclass(frozen=True)
class Move:
    """From a case's directory to other `sizes`, with what `zckpt.reshard` and the engine take."""

    case: str
    sizes: Sizes
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        others = [f"{key}{value}" for key, value in self.changes.items()]
        return "-".join([self.case, *map(str, self.sizes), *others])


MOVES = [
    Move("decoder_tp2", (1, 2, 3), {"tp": 3}),
    Move("decoder_tp2", (1, 1, 6), {"tp": 6}),  # a head for each rank
    Move("decoder_tp3", (1, 2, 1), {"tp": 1, "stage": 1}, {"stage": 1}),
    Move("decoder_z3", (1, 1, 3), {"tp": 3}),
    Move("ties_pp3", (4, 1, 1), {"pp_bounds": (0, 3, 6, 9, 12)}),
    Move("ties_pp3", (1, 2, 1), {"pp": 1}),
    Move("far_pp4", (2, 2, 1), {"pp": 2, "pp_partition": "type:middle"}),
    Move("far_pp4", (1, 1, 1), {"pp": 1}),
    Move("plain_z0", (2, 1, 1)),
    Move("plain_z0", (2, 2, 1), {"stage": 1}, {"stage": 1}),
    Move("blocks_pp2_tp2", (1, 1, 3), {"pp": 1, "tp": 3}),
    Move("blocks_pp2_tp2", (3, 2, 1), {"pp_bounds": (0, 3, 6, 9), "tp": 1}),
    Move("qwen_tp2", (1, 1, 3), {"tp": 3}),
    Move("qwen_tp2", (1, 1, 4), {"tp": 4}),  # a rank without a head
    Move("expert_names", (1, 4, 1), {"ep": 4}, {"ep": 4}),
]
QUICK = {1, 4, 6, 9, 11, 12, 14}
LESS = {"decoder_tp3-1-2-1-stage1", "blocks_pp2_tp2-3-2-1"}  # a rank needs no padded rows


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(move, id=move.name, marks=[engines if number in QUICK else matrix])
        for number, move in enumerate(MOVES)
    ],
)
def test_the_engine_resumes(move: Move, trained_strangers: Trained, tmp_path: Path) -> None:
    case, root = CASES[move.case], trained_strangers(move.case)
    before, options = oracle_of(root), options_of(root) if "tp" in move.options else {}
    report = zckpt.reshard(
        root / "run", tmp_path / "run", dp=move.sizes[1], **move.options, **options
    )
    fewer = [line for line in texts(report["left_out"]) if line.startswith("rows of ")]
    assert bool(fewer) == (move.name in LESS)
    report = zckpt.verify(tmp_path / "run", **options_of(root))
    assert report["equal"], report
    if not fewer:
        report = zckpt.verify(tmp_path / "run", root / "run", **options_of(root))
        assert report["differences"] == report["problems"] == report["notes"] == []
    after = resume(case, tmp_path / "run", tmp_path, sizes=move.sizes, **move.changes)
    is_new = {key.rpartition("/")[2] for key in after["tensors"].keys() - before["tensors"].keys()}
    assert is_new <= ({"master"} if case.stage == 0 else set())
    different = [
        key
        for key, tensor in before["tensors"].items()
        if not same_bits(
            tensor[:WORDS] if fewer and VOCABULARY.search(key) else tensor, after["tensors"][key]
        )
    ]
    assert different == []
    for key in ("steps", "counters", "trainable"):
        assert after[key] == before[key], key
    rel = 1e-5 if case.dtype == "fp32" else 2e-3  # of losses about 3.5
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=rel)


# -- files of another save, or swapped


@pytest.fixture
def ties(trained_strangers: Trained, tmp_path: Path) -> Path:
    """A copy of a run whose second tied layer is used three times, with a file each."""
    return Path(shutil.copytree(trained_strangers("ties_pp3") / "run", tmp_path / "ties"))


@engines
@pytest.mark.parametrize(
    ("pp", "other", "said"),
    [(3, 2, "in another order than the optimizer"), (4, 5, "with layer 5 does not have this tied")],
)
def test_swapped_tied_layers(pp: int, other: int, said: str, ties: Path, tmp_path: Path) -> None:
    """The weights of tied layers have no number in their names: only their places are wrong."""
    run = tmp_path / "run"
    zckpt.reshard(ties, run, pp_bounds=(0, 3, 6, 9, 12) if pp == 4 else (0, 4, 8, 12))
    (first,), (second,) = (run.glob(f"*/layer_{number:02d}-*") for number in (0, other))
    swap(first, second)
    for call, options in ((zckpt.convert, {}), (zckpt.reshard, {"dp": 1})):
        with pytest.raises(InconsistentCheckpoint, match=said) as raised:
            call(run, tmp_path / "out", **options)
        assert "swapped" in str(raised.value.hint)
    assert not (tmp_path / "out").exists()


@engines
@pytest.mark.parametrize("number", [2, 5, 8])
def test_a_tied_layer_of_another_save(number: int, ties: Path, tmp_path: Path) -> None:
    (path,) = ties.glob(f"*/layer_{number:02d}-*")
    edit(path, lambda weights: weights["weight"].add_(1))
    for call, options in ((zckpt.convert, {}), (zckpt.reshard, {"dp": 1})):
        lines = call(ties, tmp_path / call.__name__, **options)["warnings"]
        (warning,) = (line for line in lines if line["code"] != "batch-size-changes")
        assert f"layer_{number:02d}-model_states.pt has the shapes" in warning["message"]
        assert warning["code"] == "frozen-inferred"


@engines
def test_a_layer_of_another_save(ties: Path, tmp_path: Path) -> None:
    (path,) = ties.glob("*/layer_01-*")
    edit(path, lambda weights: weights["gain"].add_(1))
    for call, options in ((zckpt.convert, {}), (zckpt.reshard, {"dp": 1})):
        with pytest.raises(
            InconsistentCheckpoint,
            match=r"is not its rounded master: (pipeline stage \d: )?1\.gain",
        ):
            call(ties, tmp_path / call.__name__, **options)


@engines
def test_an_expert_of_another_save(trained_strangers: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_strangers("expert_names") / "run", tmp_path / "run"))
    (path,) = run.glob("*/layer_1_expert_3_*")
    edit(path, lambda weights: [each.add_(1) for each in weights.values()])
    with pytest.raises(InconsistentCheckpoint, match=r"3 weights.* in layer_1_expert_3_mp_rank"):
        zckpt.convert(run, tmp_path / "out")
