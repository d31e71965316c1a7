"""Options of a run whose model ranks are kept apart act as they do elsewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint, WrongOption
from zckpt.formats.reading import Reading
from zckpt.reading import read

from ...conftest import ROOT, Once
from ...engines import megatron_layouts as layouts
from .test_grid import edit

Trained = Callable[[str], Path]
DATA = ROOT / "tests/data/zckpt-0.1-pp2_tp2/run"
TENSOR = "tensor_tp2_dp1_bf16"
NORMS = [("norm", "normed")]
RULES = {"slices": "neox"}  # nothing in these files says how slices were cut
BOTH = ["stages", "slices", pytest.param("trained", marks=pytest.mark.engines)]


def sliced(root: Path) -> Path:
    layouts.write(layouts.SEQUENTIAL, root)
    return root


def staged(root: Path) -> Path:
    zckpt.reshard(DATA, root / "run", tp=1)
    return root / "run"


WRITTEN = {"slices": sliced, "stages": staged}


@pytest.fixture
def run_of(once: Once, grid_trained: Trained) -> Callable[[str], Path]:
    """Two stages of a pipeline, two tensor ranks of GPT-NeoX's program, or two of DeepSpeed's."""

    def of(name: str) -> Path:
        if name == "trained":
            return grid_trained(TENSOR) / "run"
        root: Path = once("kept", name, WRITTEN[name])
        return root

    return of


def ranks_of(run: Path) -> tuple[Any, ...]:
    return read(run, Reading(ranks_apart=True)).ranks


def shapes_of(run: Path) -> list[list[str]]:
    """The names of the trained parameters of each model rank, as its file lists them, by group."""
    with layouts.under_engine_names():
        models = [
            torch.load(path, weights_only=False) for path in sorted(run.glob("*/mp_rank_*_model_*"))
        ]
    return [[name for group in model["param_shapes"] for name in group] for model in models]


def test_no_name_has_the_number_of_its_rank() -> None:
    manifest = read(DATA, Reading(ranks_apart=True))
    assert [rank.place.number for rank in manifest.ranks] == [0, 1, 2, 3]
    assert (manifest.entries, manifest.parameters) == ({}, {})
    whole = zckpt.read(DATA)
    for rank in manifest.ranks:
        assert rank.entries.keys() <= whole.entries.keys()
        assert rank.parameters.keys() <= whole.parameters.keys()
    assert ("tied_modules.embed.weight", "master") in manifest.ranks[2].entries


@pytest.mark.parametrize("name", BOTH)
def test_renamed(name: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The files have the other names, and what says how slices were cut is of these too."""
    run, rules = run_of(name), RULES.get(name)
    report = zckpt.reshard(run, tmp_path / "out", dp=2, rename=NORMS)
    assert report["records"]["unchecked"] == 0
    found = zckpt.verify(run, tmp_path / "out", rename=NORMS, tp_rules=rules)
    assert found["equal"], found
    before, after = shapes_of(run), shapes_of(tmp_path / "out")
    pattern, new = NORMS[0]
    assert after == [[re.sub(pattern, new, each) for each in names] for names in before]
    assert after != before
    if name == "stages":
        (layer,) = tmp_path.glob("out/*/layer_04-*")
        assert {"normed.weight", "normed.bias"} < torch.load(layer).keys()
        zckpt.reshard(run, tmp_path / "one", pp=1, rename=NORMS)
        assert zckpt.verify(run, tmp_path / "one", rename=NORMS)["equal"]
    with pytest.raises(WrongOption, match=r"'\^0:' matches no name"):
        zckpt.reshard(run, tmp_path / "wrong", dp=2, rename=[("^0:", "")])


def test_files_of_layers_keep_their_numbers(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    for rename in ([(r"^4\.", "14.")], [("tied_modules.embed", "tied_modules.head")]):
        with pytest.raises(UnsupportedCheckpoint, match="no longer have the names of its layers"):
            zckpt.reshard(run_of("stages"), tmp_path / "out", dp=2, rename=rename)


def test_stages_and_slices_are_renamed_together(tmp_path: Path) -> None:
    """Files of layers are written anew if the number of tensor ranks is given."""
    with pytest.raises(WrongOption, match="--rename does not apply") as raised:
        zckpt.reshard(DATA, tmp_path / "out", dp=2, rename=NORMS)
    assert "give --tp 2 too" in str(raised.value.hint)
    zckpt.reshard(DATA, tmp_path / "out", dp=2, tp=2, rename=NORMS)
    assert zckpt.verify(DATA, tmp_path / "out", rename=NORMS)["equal"]
    zckpt.convert(DATA, tmp_path / "universal", rename=NORMS)
    zckpt.reshard(tmp_path / "universal", tmp_path / "again", tp=2)
    assert zckpt.verify(tmp_path / "out", tmp_path / "again")["equal"]


@pytest.mark.parametrize(
    "options", [{"frozen": ["*norm*"]}, {"tie": [("a", "b")]}, {"family": "llama"}], ids=str
)
def test_options_that_are_for_a_whole_model(options: dict[str, Any], tmp_path: Path) -> None:
    why = "its tensor ranks and pipeline stages are written without joining them"
    says = f"--{next(iter(options))} does not apply to .*: {why}"
    with pytest.raises(WrongOption, match=says):
        zckpt.reshard(DATA, tmp_path / "out", dp=2, **options)


@pytest.mark.parametrize("name", BOTH)
def test_in_another_order(name: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A list of all names orders those that each rank has."""
    run, rules = run_of(name), RULES.get(name)
    before = shapes_of(run)
    names = list(dict.fromkeys(each for own in before for each in own))[::-1]
    zckpt.reshard(run, tmp_path / "out", dp=2, param_names=names)
    places = {each: place for place, each in enumerate(names)}
    for own, now, rank in zip(before, shapes_of(tmp_path / "out"), ranks_of(run), strict=True):
        groups = {each: item.group or 0 for each, item in rank.parameters.items()}
        assert now == sorted(own, key=lambda each: (groups[each], places[each]))
        assert now != own
    assert zckpt.verify(run, tmp_path / "out", tp_rules=rules)["equal"]
    for wrong in (names[1:], [f"module.{each}" for each in names]):
        with pytest.raises(WrongOption, match="--param-names does not name"):
            zckpt.reshard(run, tmp_path / "wrong", dp=2, param_names=wrong)


@pytest.mark.parametrize("name", BOTH)
def test_a_step_policy(name: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The last rank counts one update more."""
    run = Path(shutil.copytree(run_of(name), tmp_path / "run"))

    def count(value: Any) -> None:
        base = value["optimizer_state_dict"]["base_optimizer_state"]
        for state in (*base["state"].values(), *base["param_groups"]):
            if "step" in state:
                state["step"] += 1

    step = zckpt.read(run, tp_rules=RULES.get(name)).step
    for path in sorted(run.glob("*/*optim_states.pt"))[-1:]:
        edit(path, count)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.reshard(run, tmp_path / "out", dp=3)
    report = zckpt.reshard(run, tmp_path / "out", dp=3, step_policy="max")
    assert report["step"] == step + 1
    assert zckpt.read(tmp_path / "out", tp_rules=RULES.get(name)).step == step + 1


@pytest.mark.parametrize("name", [each for each in BOTH if each != "slices"])
def test_a_dropped_state(name: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    report = zckpt.reshard(run_of(name), tmp_path / "out", dp=2, drop_state=["exp_avg"])
    assert [line["state"] for line in report["dropped"]] == ["exp_avg"]
    lines = {line["code"]: line["message"] for line in report["warnings"]}
    assert "cannot take a step without exp_avg" in lines.pop("state-dropped")
    assert lines.keys() <= {"batch-size-changes"}
    for rank in ranks_of(tmp_path / "out"):
        assert "exp_avg" not in {entry.slot for entry in rank.entries.values()}
