"""Fine-tunes of real trainers, moved to another size and another engine: every cell of the matrix.

    rows       {full, LoRA} x {one GPU, DDP, ZeRO-1, 2, 3, FSDP2 sharded, FSDP2 whole}
    columns    same size, another size, each other engine, export

A cell resumes in the unmodified program, holds what the original held, and goes on with the losses
of the run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

from ..engines import finetunes
from ..engines.finetunes import ENGINES, Run
from .equality import same_bits

Trained = Callable[[Run], Path]
NUMBERED = ("one", "ddp")  # their optimizers know parameters by number


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a program saved, once per session; oracle.pt is two folders above."""
    made: dict[Run, Path] = {}

    def train(run: Run) -> Path:
        if run not in made:
            made[run] = finetunes.train(run, tmp_path_factory.mktemp("finetune") / run.name)
        return made[run]

    return train


def oracle_of(directory: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(directory.parents[1] / "oracle.pt", weights_only=False)
    return oracle


def names_of(run: Run, directory: Path) -> dict[str, Any]:
    """Names, where the optimizer knows its parameters by number."""
    if run.engine not in NUMBERED:
        return {}
    return {"param_names": [n for group in oracle_of(directory)["groups"] for n in group["params"]]}


def to(run: Run) -> dict[str, Any]:
    """How a checkpoint is converted for an engine."""
    if run.engine in NUMBERED:
        return {"to": "gathered", "dialect": "safetensors"}
    if run.engine.startswith("zero"):
        stage = int(run.engine.removeprefix("zero"))
        return {"to": "deepspeed", "stage": stage, "dp": run.ranks}
    if run.engine == "fsdp":
        return {"to": "dcp", "dialect": "accelerate", "dp": run.ranks}
    return {"to": "gathered", "dialect": "accelerate"}


def assert_goes_on(run: Run, target: Path, source: Path, root: Path) -> None:
    """The program resumes with what the original held, and with its losses."""
    expected, found = oracle_of(source), finetunes.resume(run, target, root)
    assert found["tensors"].keys() == expected["tensors"].keys()
    different = [n for n, t in expected["tensors"].items() if not same_bits(found["tensors"][n], t)]
    assert different == []
    assert found["steps"] == expected["steps"]
    groups = [[g for g in held["groups"] if g["params"]] for held in (expected, found)]
    assert groups[0] == groups[1]
    pairs = zip(expected["losses"], found["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5


def rows(**more: Any) -> list[Run]:
    return [
        Run(weights, engine, 1 if engine == "one" else 2, **more)
        for weights in ("full", "lora")
        for engine in ENGINES
    ]


def directory_like(source: Path, root: Path) -> Path:
    return root / source.name


@pytest.mark.engines
@pytest.mark.parametrize("run", rows(), ids=lambda run: run.name)
class TestTrainer:
    def test_same_size(self, run: Run, finetuned: Trained, tmp_path: Path) -> None:
        source = finetuned(run)
        target = directory_like(source, tmp_path)
        options = {} if run.engine in (*NUMBERED, "fsdp_full") else {"dp": run.ranks}
        zckpt.reshard(source, target, **options, **names_of(run, source))
        assert_goes_on(run, target, source, tmp_path / "resumed")

    def test_another_size(self, run: Run, finetuned: Trained, tmp_path: Path) -> None:
        source = finetuned(run)
        target, resumed = directory_like(source, tmp_path), run.on(ranks=3)
        if run.engine == "one":
            resumed = run.on("ddp", 2)
        options = {} if run.engine in (*NUMBERED, "fsdp_full") else {"dp": 3}
        zckpt.reshard(source, target, **options, **names_of(run, source))
        assert_goes_on(resumed, target, source, tmp_path / "resumed")

    @pytest.mark.parametrize("engine", ENGINES)
    def test_another_engine(
        self, run: Run, engine: str, finetuned: Trained, tmp_path: Path
    ) -> None:
        if engine == run.engine:
            pytest.skip("the same engine")
        source = finetuned(run)
        target, resumed = directory_like(source, tmp_path), run.on(engine, 2)
        zckpt.convert(source, target, **to(resumed), **names_of(run, source))
        assert_goes_on(resumed, target, source, tmp_path / "resumed")
