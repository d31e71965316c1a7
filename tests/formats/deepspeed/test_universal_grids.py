"""Universal directories of pipelines and tensor ranks: what DeepSpeed's loader makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import CorruptCheckpoint, InconsistentCheckpoint, MissingData

from ...conftest import texts
from ...engines import deepspeed, grids
from ...engines.grid_models import PADDED, VOCABULARY
from ...engines.grids import CASES
from ..equality import same_bits
from .conftest import Trained
from .test_grid import edit

pytestmark = pytest.mark.engines

TENSOR = "tensor_tp2_dp2"
LLAMA = "llama_tp2_dp2"
BOTH = "pipe_pp2_tp2_dp1"
FORMAT = "deepspeed-universal"


def converted(run: Path, target: Path, **options: Any) -> dict[str, Any]:
    return zckpt.convert(run, target, to=FORMAT, **options)


def merged(run: Path, root: Path) -> Path:
    """What DeepSpeed's own converter makes of a run; strict, it refuses patterns of frozen ones."""
    tag = (run / "latest").read_text()
    words = ["--no_strict", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    words += ["--input_folder", str(run / tag), "--output_folder", str(root / tag)]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env={**os.environ, **deepspeed.ENVIRONMENT},
        check=True,
        capture_output=True,
    )
    return root


def without_padding(root: Path, tmp_path: Path) -> Path:
    """A copy of a run whose info counts all rows of the vocabulary as used."""
    run = Path(shutil.copytree(root / "run", tmp_path / "full"))

    def change(value: Any) -> None:
        value["universal_checkpoint_info"]["original_vocab_size"] = PADDED

    for path in run.glob("*/*model_states.pt"):
        if "mp_rank_" in path.name:
            edit(path, change)
    return run


def same_state(held: Any, root: Path, most: float | None, padding: bool = False) -> None:
    """The engine has what the source's engine had; with `padding`, zeros in rows of padding."""
    expected = torch.load(root / "oracle.pt", weights_only=False)
    for key in ("steps", "scalars", "counters", "trainable", "frozen"):
        assert held[key] == expected[key], key
    for name, tensor in expected["tensors"].items():
        if padding and name.startswith(("embedding.", "head.", "tied_modules.embed.")):
            tensor = torch.cat([tensor[:VOCABULARY], torch.zeros_like(tensor[VOCABULARY:])])
        assert same_bits(held["tensors"][name], tensor), name
    for name, tensor in expected["buffers"].items():
        assert same_bits(held["buffers"][name], tensor), name
    if most is not None:
        assert abs(held["losses"][0] - expected["losses"][0]) < most


def resumed(
    root: Path, run: Path, tmp_path: Path, tp: int, dp: int, pp: int = 1, stage: int | None = None
) -> dict[str, Any]:
    case = CASES[root.name]
    # with round_robin_gradients the engine loads to wrong places
    config = {key: value for key, value in case.config.items() if key != "zero_optimization"}
    case = replace(case, tp=tp, stage=stage or case.stage, config=config)
    return grids.resume(case, run, tmp_path / "engine", dp, pp, (root / "oracle.pt").resolve())


matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("name", "tp", "dp", "pp", "stage"),
    [
        ("tensor_tp2_dp2_z2", 2, 1, 1, None),
        ("tensor_tp2_dp2_z2", 1, 3, 1, 1),
        ("tensor_tp2_dp2_z2", 4, 1, 1, None),
        pytest.param(TENSOR, 2, 2, 1, 2, marks=matrix),
        pytest.param(TENSOR, 1, 2, 1, 3, marks=matrix),
        pytest.param("tensor_tp2_dp1_bf16", 1, 2, 1, None, marks=matrix),
        pytest.param(LLAMA, 4, 1, 1, None, marks=matrix),
        (LLAMA, 1, 2, 1, None),
        pytest.param("llama_tp4_dp1", 2, 1, 1, None, marks=matrix),
        ("llama_tp2_dp1_z3", 1, 2, 1, None),
        pytest.param("llama_tp2_dp1_z3", 2, 2, 1, None, marks=matrix),
        (f"{BOTH}_fp32", 1, 1, 2, None),
        pytest.param(f"{BOTH}_fp32", 2, 1, 1, None, marks=matrix),
        pytest.param(f"{BOTH}_fp32", 4, 1, 1, None, marks=matrix),
        pytest.param(f"{BOTH}_fp32", 1, 3, 1, None, marks=matrix),
        pytest.param(BOTH, 2, 1, 2, None, marks=matrix),
        pytest.param("pipe_pp2_dp2_fp32", 1, 3, 1, None, marks=matrix),
        pytest.param("pipe_pp2_dp2", 1, 1, 3, None, marks=matrix),
        pytest.param("pipe_pp1_dp2", 1, 1, 2, None, marks=matrix),
    ],
)
def test_the_engine_loads_another_grid(
    name: str,
    tp: int,
    dp: int,
    pp: int,
    stage: int | None,
    grid_trained: Trained,
    tmp_path: Path,
) -> None:
    root = grid_trained(name)
    keeps = name.startswith("llama") or not CASES[name].info
    run = root / "run" if keeps else without_padding(root, tmp_path)
    report = converted(run, tmp_path / "out", **({} if stage is None else {"stage": stage}))
    assert not any("only pad the vocabulary" in line for line in texts(report["left_out"]))
    held = resumed(root, tmp_path / "out", tmp_path, tp, dp, pp, stage)
    case = CASES[name]
    most = 2e-3 if (tp, pp) == (case.tp, case.pp) else 5e-3  # sums of bf16 in another order
    same_state(held, root, 1e-5 if case.dtype == "fp32" else most)
    if stage != 3:  # there all groups get the settings of group 0
        expected = torch.load(root / "oracle.pt", weights_only=False)
        assert held["groups"] == expected["groups"]


def test_a_run_of_one_rank_for_two(grid_trained: Trained, tmp_path: Path) -> None:
    """Rules cut it as AutoTP's loader and Megatron's want it."""
    root = grid_trained("tensor_tp2_dp2_z2")
    zckpt.reshard(without_padding(root, tmp_path), tmp_path / "one", tp=1, dp=1)
    converted(tmp_path / "one", tmp_path / "out")
    same_state(resumed(root, tmp_path / "out", tmp_path, 2, 1), root, 1e-5)


@pytest.mark.parametrize("name", [TENSOR, LLAMA, pytest.param(BOTH, marks=matrix)])
def test_files_are_those_of_the_converter(name: str, grid_trained: Trained, tmp_path: Path) -> None:
    """Equal dictionaries; beside AutoTP's tensors the converter does not say how they are cut."""
    run = grid_trained(name) / "run"
    tag = (run / "latest").read_text()
    report = converted(run, tmp_path / "ours")
    theirs, ours = merged(run, tmp_path / "theirs") / tag / "zero", tmp_path / "ours" / tag / "zero"
    lost = [line for line in texts(report["left_out"]) if "only pad the vocabulary" in line]
    assert len(lost) == {TENSOR: 2, LLAMA: 0, BOTH: 1}[name]
    names = {path.relative_to(ours) for path in ours.glob("*/*.pt")}
    rest = {path.relative_to(theirs) for path in theirs.glob("*/*.pt")} - names
    manifest = zckpt.read(run)
    assert {path.parent.name for path in rest} <= {
        *manifest.buffers, *(n for n, p in manifest.parameters.items() if not p.trainable)
    }  # fmt: skip
    for path in sorted(names):
        a, b = (torch.load(root / path, weights_only=False) for root in (theirs, ours))
        if path.name == "step.pt":
            assert same_bits(a, b)
            continue
        assert same_bits(a.pop("param"), b.pop("param")), path
        if name == LLAMA:
            a = {**b, **a}
        assert a == b, path
    a, b = (torch.load(root / "optimizer_state.pt", weights_only=False) for root in (theirs, ours))
    assert [{**group, "params": 0} for group in a["param_groups"]] == [
        {**group, "params": 0} for group in b["param_groups"]
    ]


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        (TENSOR, "theirs"),
        ("llama_tp2_dp1_z3", "theirs"),
        ("tensor_tp2_dp2_z2", "ours"),
        pytest.param(LLAMA, "theirs", marks=matrix),
        pytest.param(LLAMA, "ours", marks=matrix),
    ],
)
def test_read_for_tensor_ranks(
    name: str, whose: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """No rules are needed; rows of padding come back as zeros."""
    root = grid_trained(name)
    if whose == "ours":
        converted(root / "run", tmp_path / "universal")
    else:
        merged(root / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "run", to="deepspeed", tp=2, dp=1)
    held = grids.resume(CASES[name], tmp_path / "run", tmp_path / "engine", 1)
    is_padded = not name.startswith("llama")
    same_state(held, root, None if is_padded else 2e-3, is_padded)


def test_read_for_another_directory(grid_trained: Trained, tmp_path: Path) -> None:
    """Through zckpt's universal format, and with the rules that a user gave."""
    root = grid_trained("tensor_tp2_dp2_z2")
    zckpt.convert(without_padding(root, tmp_path), tmp_path / "universal")
    converted(tmp_path / "universal", tmp_path / "out")
    again = zckpt.read(tmp_path / "out").run.tensor_parallel
    assert again is not None
    assert again == zckpt.read(tmp_path / "universal").run.tensor_parallel
    assert zckpt.verify(tmp_path / "out", against=tmp_path / "full")["equal"]


class TestFaults:
    def test_no_rule(self, grid_trained: Trained, tmp_path: Path) -> None:
        run = Path(shutil.copytree(grid_trained(TENSOR) / "run", tmp_path / "run"))
        for path in run.glob("*/mp_rank_*"):
            edit(path, lambda value: value.pop("universal_checkpoint_info"))
        with pytest.raises(MissingData, match="nothing says how"):
            converted(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_rules_have_the_names_that_are_given(
        self, grid_trained: Trained, tmp_path: Path
    ) -> None:
        """The files say how each parameter is cut, also one that no pattern matches any more."""
        run, rename = grid_trained(TENSOR) / "run", [("dense", "out"), ("norm", "ln")]
        paths = [tmp_path / "own", tmp_path / "out"]
        converted(run, paths[0])
        converted(run, paths[1], rename=rename)
        found = zckpt.verify(*paths, rename=rename)
        assert (
            found["differences"]
            == [line for line in found["states"] if "layout" not in line["key"]]
            == []
        )
        facts = [zckpt.read(path).run.tensor_parallel for path in paths]
        before, after = (each.placements for each in facts if each is not None)
        names = {name: name.replace("dense", "out").replace("norm", "ln") for name in before}
        assert after == {names[name]: rule for name, rule in before.items()}

    def test_a_vocabulary_that_does_not_fit(self, grid_trained: Trained, tmp_path: Path) -> None:
        run = Path(shutil.copytree(grid_trained(TENSOR) / "run", tmp_path / "run"))
        for path in run.glob("*/mp_rank_*"):
            edit(path, lambda v: v["universal_checkpoint_info"].update(original_vocab_size=37))
        with pytest.raises(InconsistentCheckpoint, match="the ranks hold 36 rows"):
            converted(run, tmp_path / "out")

    @pytest.mark.parametrize("rules", [7, {"rules": {"head.weight": 0}, "vocabulary": {}}])
    def test_rules_that_zckpt_did_not_write(
        self, rules: Any, grid_trained: Trained, tmp_path: Path
    ) -> None:
        converted(grid_trained(TENSOR) / "run", tmp_path / "out")
        (path,) = tmp_path.glob("out/*/zero/optimizer_state.pt")
        edit(path, lambda value: value.update(zckpt_tensor_parallel=rules))
        with pytest.raises(CorruptCheckpoint):
            zckpt.read(tmp_path / "out")

    def test_patterns_that_zckpt_does_not_run(self, grid_trained: Trained, tmp_path: Path) -> None:
        """Tensors are whole, so that they are read without; nothing cuts them again."""
        merged(grid_trained(TENSOR) / "run", tmp_path / "universal")
        for path in tmp_path.glob("universal/*/mp_rank_*"):
            info = {"tp_replicated_parameter_patterns": ["(a+)+$"]}
            edit(path, lambda value, info=info: value["universal_checkpoint_info"].update(info))
        manifest = zckpt.read(tmp_path / "universal")
        assert any("may run for hours" in line for line in texts(manifest.notices.warnings))
        with pytest.raises(MissingData, match="nothing says how"):
            zckpt.convert(tmp_path / "universal", tmp_path / "out", to="deepspeed", tp=2)

    def test_a_wrong_rule_is_seen_by_the_engine(
        self, grid_trained: Trained, tmp_path: Path
    ) -> None:
        """The loader cuts by what stands beside a tensor."""
        root = grid_trained("tensor_tp2_dp2_z2")
        converted(without_padding(root, tmp_path), tmp_path / "out")
        (path,) = tmp_path.glob("out/*/zero/attention.dense.weight/fp32.pt")
        edit(path, lambda value: value.update(cat_dim=0))
        held = resumed(root, tmp_path / "out", tmp_path, 2, 1)
        with pytest.raises(AssertionError, match=r"attention\.dense\.weight"):
            same_state(held, root, None)

    def test_stage_3_without_autotp(self, grid_trained: Trained, tmp_path: Path) -> None:
        report = converted(grid_trained(TENSOR) / "run", tmp_path / "out", stage=3, dry_run=True)
        assert any("only for AutoTP" in line for line in texts(report["warnings"]))
