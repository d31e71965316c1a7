"""Proofs of what pipelines and tensor ranks saved: a wrong reader and planted faults are seen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint import slicing
from zckpt.core.checkpoint.entries import Entry, Key
from zckpt.core.checkpoint.placement import Cut, Shapes, Sliced
from zckpt.core.checkpoint.slicing import Slicing
from zckpt.core.ranks import merge

from ...conftest import texts
from ...engines.deepspeed import submit
from ...faults import swap_files
from ..equality import same_bits
from .test_grid import BOTH, RULES, edit

Trained = Callable[[str], Path]
pytestmark = pytest.mark.engines
first = pytest.mark.first


@pytest.fixture
def run(grid_trained: Trained, tmp_path: Path) -> Path:
    """A copy of the run with both axes, which a test may damage."""
    return Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(RULES)
    return path


def gathered(run: Path, against: Path, **options: Any) -> dict[str, Any]:
    report: dict[str, Any] = zckpt.verify(
        run, against=against, gather=True, device="cpu", **options
    )
    return report


# -- a wrong reader


def swapped(outer: int, inner: int, widths: Sequence[Sequence[int]]) -> Slicing:
    """Each slice is at the place of the other rank's."""
    right = RIGHT_CUT(outer, inner, widths)
    return replace(
        right, pieces=tuple(replace(piece, rank=1 - piece.rank) for piece in right.pieces)
    )


def shifted(outer: int, inner: int, widths: Sequence[Sequence[int]]) -> Slicing:
    """The first sub-parameter of rank 0 begins one element too late, in its own slice."""
    right = RIGHT_CUT(outer, inner, widths)
    if len(widths) != 3:
        return right
    inside = [piece for piece in right.pieces if piece.rank == 0][:2]
    exchanged = {
        inside[0]: replace(inside[0], inside=(0, inside[1].sizes[1], 0)),
        inside[1]: replace(inside[1], inside=(0, 0, 0)),
    }
    return replace(right, pieces=tuple(exchanged.get(piece, piece) for piece in right.pieces))


def unfused(outer: int, inner: int, widths: Sequence[Sequence[int]]) -> Slicing:
    """Slices behind each other, as if no halves were fused."""
    return RIGHT_CUT(outer, inner, [[sum(part[rank] for part in widths) for rank in range(2)]])


def of_other_ranks(key: Key, held: Any, *others: Any) -> list[Entry]:
    """What each rank holds is taken for the other rank's, when they become a whole."""
    return RIGHT_TENSOR(key, held[::-1], *others)


RIGHT_CUT = slicing.cut
RIGHT_TENSOR = merge.tensor
RIGHT_SLICES = Cut.sliced


def other_dimension(cut: Cut, shapes: Shapes, says: str) -> Sliced:
    """Rows instead of columns, in the shape that columns have."""
    right = RIGHT_SLICES(cut, shapes, says)
    if cut.axis != 1:
        return right
    rows = RIGHT_SLICES(replace(cut, axis=0), shapes, says)
    return replace(right, slicing=rows.slicing)


@pytest.mark.parametrize(
    ("module", "what", "wrong", "seen"),
    [
        pytest.param(
            *(slicing, "cut", swapped, r"\.fused\.|\.gate_up\.|\.(dense|down)\.weight|embed"),
            marks=first,
        ),
        (merge, "tensor", of_other_ranks, r"\.fused\.|\.gate_up\.|\.(dense|down)\.weight|embed"),
        (slicing, "cut", shifted, r"\.fused\."),
        (slicing, "cut", unfused, r"\.fused\.|\.gate_up\."),
        (Cut, "sliced", other_dimension, r"\.(dense|down)\.weight"),
    ],
    ids=["swapped", "of_other_ranks", "shifted", "unfused", "other_dimension"],
)
@pytest.mark.parametrize("given", [pytest.param("the checkpoint"), pytest.param("a file")])
def test_a_wrong_reader_is_found(
    run: Path,
    rules: Path,
    tmp_path: Path,
    module: Any,
    what: str,
    wrong: Any,
    seen: str,
    given: str,
) -> None:
    """By the checkpoint's own rule, and by that of --tp-rules."""
    options = {"tp_rules": rules} if given == "a file" else {}
    names = [name for name in zckpt.read(run).parameters if re.search(seen, name)]
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(module, what, wrong)
        zckpt.convert(run, tmp_path / "out", **options)
        assert zckpt.verify(run, tmp_path / "out", **options)["equal"]  # both sides are wrong
        report = gathered(run, tmp_path / "out", **options)
    assert {line["tensor"] for line in report["differences"]} == {
        f"{name}/{slot}" for name in names for slot in ("param", "master", "exp_avg", "exp_avg_sq")
    }
    assert gathered(run, run, **options)["equal"]


@first
def test_rules_of_a_run_that_states_none(run: Path, rules: Path, grid_trained: Trained) -> None:
    for path in run.glob("*/mp_rank_*"):
        edit(path, lambda model: model.pop("universal_checkpoint_info"))
    report = gathered(run, grid_trained(BOTH) / "run", tp_rules=rules)
    assert report["equal"], report


# -- planted faults


def edit_state(run: Path, rank: int, change: Callable[[Any], object], group: int = 0) -> None:
    """Changes the states of the optimizer of one model rank."""
    (path,) = run.glob(f"*/bf16_zero_pp_rank_0_mp_rank_{rank:02d}_*")

    def of_group(value: Any) -> None:
        change(value["optimizer_state_dict"]["base_optimizer_state"]["state"][group])

    edit(path, of_group)


def place_of(run: Path, rank: int, name: str, group: int) -> int:
    """Where a parameter begins in the flat group of a model rank."""
    (model,) = run.glob(f"*/mp_rank_{rank:02d}_*")
    shapes = torch.load(model, weights_only=False)["param_shapes"][group]
    names = list(shapes)
    return sum(shapes[each].numel() for each in names[: names.index(name)])


def drift(run: Path, slot: str) -> None:
    at = place_of(run, 1, "4.norm.weight", 1)
    edit_state(run, 1, lambda state: state[slot][at : at + 1].add_(0.5), 1)


def tie(run: Path, slot: str) -> None:
    edit_state(run, 2, lambda state: state[slot][5:6].add_(1))


def layer(run: Path, name: str, key: str) -> None:
    (path,) = run.glob(f"*/{name}")
    edit(path, lambda value: value[key].view(-1)[1:2].add_(2))


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        pytest.param(lambda run: drift(run, "exp_avg"), "4.norm.weight/exp_avg", marks=first),
        (lambda run: drift(run, "exp_avg_sq"), "4.norm.weight/exp_avg_sq"),
        (lambda run: tie(run, "exp_avg"), "tied_modules.embed.weight/exp_avg"),
        (lambda run: layer(run, "layer_04-model_01-*", "down.weight"), "4.down.weight/param"),
        (lambda run: layer(run, "layer_04-model_00-*", "norm.bias"), "4.norm.bias/param"),
        (lambda run: layer(run, "layer_03-model_01-*", "weight"), "3.weight/param"),
    ],
    ids=["norm", "norm's square", "tied copy", "slice", "replica", "frozen"],
)
def test_a_changed_value_is_named(
    run: Path, grid_trained: Trained, fault: Callable[[Path], None], tensor: str
) -> None:
    """Alone, and by the engine's rule."""
    fault(run)
    alone = zckpt.verify(run)
    assert {line["tensor"] for line in alone["differences"]} == {tensor}
    assert not alone["equal"]
    report = gathered(run, grid_trained(BOTH) / "run")
    assert {line["tensor"] for line in report["differences"]} == {tensor}
    report = zckpt.verify(run, against=grid_trained(BOTH) / "run")
    assert {line["tensor"] for line in report["differences"]} == {tensor}


@first
def test_diff_names_what_differs(run: Path, grid_trained: Trained) -> None:
    for rank in (0, 1):
        layer(run, f"layer_04-model_0{rank}-*", "down.weight")
    report = zckpt.diff(grid_trained(BOTH) / "run", run)
    assert [line["tensor"] for line in report["differences"]] == ["4.down.weight/param"]
    assert not report["equal"]


@first
def test_a_buffer_that_drifted_is_a_note(run: Path, grid_trained: Trained) -> None:
    layer(run, "layer_05-model_01-*", "running_mean")
    for report in (zckpt.verify(run), gathered(run, grid_trained(BOTH) / "run")):
        assert report["equal"], report
        assert [
            "5.running_mean differs between ranks" in line for line in texts(report["notes"])
        ] == [True]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        pytest.param("*mp_rank_01_*", "mp_rank_01", marks=first),
        ("mp_rank_03_*", "mp_rank_03"),
        ("bf16_zero_pp_rank_0_mp_rank_02_*", "mp_rank_02"),
        ("layer_04-model_01-*", "layer_04-model_01-"),
        ("layer_04-*", "the file of the layer of 4."),
    ],
)
@pytest.mark.parametrize("gather", [False, True])
def test_a_lost_file_is_named(
    run: Path, grid_trained: Trained, lost: str, said: str, gather: bool
) -> None:
    for path in run.glob(f"*/{lost}"):
        path.unlink()
    report = gathered(run, grid_trained(BOTH) / "run") if gather else zckpt.verify(run)
    assert not report["equal"]
    (problem,) = report["problems"]
    assert problem["error"] == "IncompleteCheckpoint"
    assert said in problem["message"]


@first
def test_swapped_tensor_ranks_of_one_stage_are_found(run: Path, grid_trained: Trained) -> None:
    """Their optimizer files alone: masters no longer round to the weights of the layers."""
    (tag,) = run.glob("*/")
    swap_files(*(tag / f"bf16_zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt" for rank in (2, 3)))
    report = zckpt.verify(run)
    changed = {line["tensor"] for line in report["differences"]}
    assert "6.fused.weight/param" in changed
    assert not gathered(run, grid_trained(BOTH) / "run")["equal"]


# -- what is shown


@first
def test_inspect_draws_which_model_rank_has_what(run: Path, zckpt: Callable[..., Any]) -> None:
    words = ["inspect", run, "--layout", "--tensors", "4.gate_up.weight/master"]
    found = zckpt(*words, "--json").document
    assert [found[key] for key in ("pp", "tp", "dp")] == [2, 2, 1]
    (tensor,) = found["tensors"]
    ranks = [re.search(r"mp_rank_(\d+)", piece["file"])[1] for piece in tensor["fragments"]]  # type: ignore[index]
    bounds = [(piece["start"], piece["stop"]) for piece in tensor["fragments"]]
    assert ranks == ["00", "01", "00", "01"]  # two fused halves, each cut in two
    assert bounds == [(0, 140), (140, 280), (280, 420), (420, 560)]
    assert re.search(r"0{12}[12]{12}0{12}[12]{12}", zckpt(*words).out)


@first
def test_stats_are_those_of_whole_tensors(run: Path, grid_trained: Trained) -> None:
    tensors = torch.load(grid_trained(BOTH) / "oracle.pt", weights_only=False)["tensors"]
    lines = {line["tensor"]: line for line in zckpt.stats(run)["tensors"]}
    for name, tensor in tensors.items():
        if name in lines:
            assert lines[name]["max"] == pytest.approx(float(tensor.max())), name
            assert lines[name]["norm"] == pytest.approx(float(tensor.double().norm())), name
    assert len(lines) >= 88


# -- another engine


@pytest.mark.parametrize(
    "name",
    [BOTH, pytest.param("pipe_pp2_tp2_dp2", marks=pytest.mark.matrix)],
)
def test_fsdp2_loads_a_grid(name: str, grid_trained: Trained, rules: Path, tmp_path: Path) -> None:
    """Two ranks of FSDP2 have what all ranks of DeepSpeed had, joined by the model's own rules."""
    root = grid_trained(name)
    run = Path(shutil.copytree(root / "run", tmp_path / "bare"))
    for path in run.glob("*/mp_rank_*"):
        edit(path, lambda model: model.pop("universal_checkpoint_info"))
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    live = oracle["tensors"]
    groups = {n: number for number, own in enumerate(oracle["groups"]) for n in own["params"]}
    names = [
        (name, tuple(live[f"{name}/param"].shape), groups.get(name))
        for name in oracle["trainable"] + oracle["frozen"]
    ]
    output = tmp_path / "held.pt"
    submit("grid_fsdp", "load", 2, (run, str(rules), names, output), tmp_path)
    loaded = torch.load(output, weights_only=False)
    assert loaded["rates"] == [group["lr"] for group in oracle["groups"]]
    held = loaded["tensors"]
    steps = {key.removesuffix("/step"): held.pop(key) for key in [*held] if key.endswith("/step")}
    assert {key: int(step) for key, step in steps.items()} == oracle["steps"]
    wanted = {
        key: tensor.float()
        for key, tensor in live.items()
        if not key.endswith("/param") or key.rpartition("/")[0] in oracle["frozen"]
    }
    assert held.keys() == wanted.keys()
    assert [key for key in held if not same_bits(held[key], wanted[key])] == []
