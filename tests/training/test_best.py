"""The best checkpoint of a Trainer's run, and its path in later checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt

from ..conftest import EXAMPLE, Result
from ..engines import finetunes
from ..engines.deepspeed import EngineError
from ..engines.finetunes import Run

Program = Callable[..., Result]


def run_directory(root: Path, best: int | None = 3, steps: tuple[int, ...] = (3, 6, 10)) -> Path:
    """A Trainer's output directory, of the small real checkpoint under its names."""
    for step in steps:
        folder = root / "run" / f"checkpoint-{step}"
        shutil.copytree(EXAMPLE, folder)
        named = str(root / "run" / f"checkpoint-{best}") if best is not None else None
        state = {
            "global_step": step,
            "best_model_checkpoint": named,
            "log_history": [{"loss": 1.5}],
        }
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return root / "run"


def best_of(folder: Path) -> Any:
    return json.loads((folder / "trainer_state.json").read_text())["best_model_checkpoint"]


@pytest.mark.parametrize(
    ("which", "best", "written"),
    [
        ("all", 3, ["checkpoint-10", "checkpoint-3", "checkpoint-6"]),
        ("best-and-last", 3, ["checkpoint-10", "checkpoint-3"]),
        ("best-and-last", 10, ["checkpoint-10"]),
        ("best-and-last", None, ["checkpoint-10"]),
    ],
)
def test_several_checkpoints_at_once(
    which: str, best: int | None, written: list[str], tmp_path: Path, zckpt: Program
) -> None:
    source, target = run_directory(tmp_path, best), tmp_path / "out"
    words = ("reshard", source, target, "--dp", "2", "--checkpoints", which)
    planned = zckpt(*words, "--dry-run", "--json").document
    assert not target.exists()
    report = zckpt(*words, "--json").document
    assert (report["files"], report["bytes"]) == (planned["files"], planned["bytes"])
    assert sorted(path.name for path in target.iterdir()) == written
    for name in written:
        expected = None if best is None else str(target / f"checkpoint-{best}")
        assert best_of(target / name) == expected
        state = json.loads((target / name / "trainer_state.json").read_text())
        assert state["log_history"] == [{"loss": 1.5}]
    assert not list(tmp_path.glob("*.partial"))


def test_one_checkpoint_says_where_the_best_one_is(tmp_path: Path, zckpt: Program) -> None:
    source = run_directory(tmp_path)
    done = zckpt("reshard", source / "checkpoint-6", tmp_path / "six", "--dp", "2")
    assert f"best checkpoint {source / 'checkpoint-3'}" in done.err
    assert f"zckpt reshard {source} DST --checkpoints best-and-last" in done.err
    best = zckpt("reshard", source / "checkpoint-3", tmp_path / "three", "--dp", "2")
    assert "best checkpoint" not in best.err
    assert best_of(tmp_path / "three") == str(tmp_path / "three")


def test_a_run_that_lost_its_best_checkpoint(tmp_path: Path, zckpt: Program) -> None:
    source = run_directory(tmp_path)
    shutil.rmtree(source / "checkpoint-3")
    words = ("reshard", source, tmp_path / "out", "--dp", "2", "--checkpoints")
    lost = zckpt(*words, "best-and-last")
    assert (lost.code, "has no checkpoint-3" in lost.err) == (1, True)
    assert not (tmp_path / "out").exists()
    nothing = zckpt("reshard", EXAMPLE, tmp_path / "out", "--checkpoints", "all")
    assert "contains no checkpoint-N folder" in nothing.err


def test_a_failure_in_one_leaves_nothing(tmp_path: Path, zckpt: Program) -> None:
    source = run_directory(tmp_path)
    file = next((source / "checkpoint-10").rglob("*zero_pp_rank_1*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    failed = zckpt("reshard", source, tmp_path / "out", "--dp", "2", "--checkpoints", "all")
    assert failed.code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.engines
def test_the_trainer_loads_the_best_one_at_its_end(tmp_path: Path) -> None:
    run = Run("full", "zero2", 2)
    best = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "greater_is_better": False,  # it rises: the first is the best
    }  # fmt: skip
    source = finetunes.train(run, tmp_path / "trained", **best).parent
    for later in range(4, 9):
        shutil.rmtree(source / f"checkpoint-{later}", ignore_errors=True)
    assert Path(best_of(source / "checkpoint-3")).name in ("checkpoint-1", "checkpoint-2")
    file = source / "checkpoint-3" / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"best_metric": -1.0}))
    alone = tmp_path / "alone" / "checkpoint-3"
    zckpt.reshard(source / "checkpoint-3", alone, dp=3)
    with pytest.raises(EngineError):
        finetunes.resume(run.on(ranks=3), alone, tmp_path / "a", **best)
    zckpt.reshard(source, tmp_path / "all", dp=3, checkpoints="best-and-last")
    resumed = finetunes.resume(
        run.on(ranks=3), tmp_path / "all/checkpoint-3", tmp_path / "b", **best
    )
    assert len(resumed["losses"]) == 5
