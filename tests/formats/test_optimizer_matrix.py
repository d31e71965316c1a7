"""Every optimizer, moved to another size and to another engine: each cell of the matrix.

    rows       torch's optimizers, those of pytorch_optimizer, 8-bit ones
    columns    {FSDP2, torch.save, DeepSpeed stages 0 to 3} x {same format, the other engine}

A run of 2 ranks resumes on 3 and on 1 with the losses of the run that went on, or a state is
refused by its name before the first byte, or the engine itself cannot train. `optimizer_matrix.py`
says which. `-m engines` takes one row, `-m matrix` all of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors

from .. import optimizer_matrix
from ..conftest import ROOT, needs
from ..engines import deepspeed
from ..engines.many_optimizers import ROWS
from ..optimizer_matrix import ENGINES, Outcome, outcome_of, targets_of

CLOSE = 1e-4  # of losses near 1; bfloat16 inside Muon rounds, a lost state shows above 1e-3


def run_engine(work: str, ranks: int, root: Path, *arguments: Any) -> list[float]:
    """Trains or resumes; the losses of the three steps after the checkpoint."""
    output = root / "losses.pt"
    deepspeed.submit("optimizer_rank", work, ranks, (ranks, *arguments, output), root)
    losses: list[float] = torch.load(output)
    return losses


def differ_by(a: list[float], b: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(a, b, strict=True))


def options_for(engine: str, dp: int) -> dict[str, Any]:
    """What convert is told of an engine at a size; torch loads its files at any."""
    if engine.startswith("DeepSpeed"):
        return {"to": "deepspeed", "stage": int(engine[-1]), "dp": dp, "dtype": "fp32"}
    return {"to": "dcp"} if engine == "FSDP2" else {"to": "gathered"}


def convert(source: Path, engine: str, dp: int, target: Path, optimizer: str, kind: str) -> None:
    unnamed = kind == "DeepSpeed 0" and optimizer in optimizer_matrix.UNNAMED
    names = ROWS[optimizer].names if kind == "torch.save" or unnamed else None
    if kind == engine == "torch.save":  # one file that any number of ranks loads
        shutil.copytree(source, target)
    else:
        zckpt.convert(source, target, param_names=names, **options_for(engine, dp))


CELLS = [
    pytest.param(
        optimizer,
        source,
        id=f"{optimizer}-{source}",
        marks=[pytest.mark.matrix, *([pytest.mark.engines] if optimizer == "AdamW" else [])],
    )
    for optimizer in ROWS
    for source in ENGINES
]


@pytest.mark.parametrize(("optimizer", "source"), CELLS)
def test_cell(optimizer: str, source: str, tmp_path: Path) -> None:
    needs(ROWS[optimizer].package.partition(".")[0])
    trains = outcome_of(optimizer, source, source)
    if trains.kind == "engine":
        with pytest.raises(deepspeed.EngineError) as ended:
            run_engine("train", 2, tmp_path, optimizer, source, tmp_path / "run")
        assert str(ended.value).startswith(trains.words)
        return
    expected = run_engine("train", 2, tmp_path, optimizer, source, tmp_path / "run")
    outcomes = {target: outcome_of(optimizer, source, target) for target in targets_of(source)}
    own = expected
    if any(outcome.kind in ("yes", "own") for outcome in outcomes.values()):
        own = run_engine("resume", 2, tmp_path, optimizer, source, tmp_path / "run")
    for target, outcome in outcomes.items():
        for ranks in (3, 1) if target == source else (3,):
            folder = tmp_path / f"{target}-{ranks}"
            if outcome.kind == "refused":
                with pytest.raises(errors.ZckptError) as refused:
                    convert(tmp_path / "run", target, ranks, folder, optimizer, source)
                assert outcome.words in refused.value.message
                assert not folder.exists()
                continue
            convert(tmp_path / "run", target, ranks, folder, optimizer, source)
            check_goes_on(optimizer, source, target, ranks, folder, outcome, (expected, own))


def check_goes_on(
    optimizer: str,
    source: str,
    target: str,
    ranks: int,
    folder: Path,
    outcome: Outcome,
    losses: tuple[list[float], list[float]],
) -> None:
    root = folder.parent
    if outcome.kind == "target engine":
        with pytest.raises(deepspeed.EngineError) as ended:
            run_engine("resume", ranks, root, optimizer, target, folder)
        assert str(ended.value).startswith(outcome.words)
        return
    after = run_engine("resume", ranks, root, optimizer, target, folder)
    if outcome.kind == "yes":
        assert min(differ_by(after, each) for each in losses) < CLOSE
        return
    assert outcome.kind == "own"  # the engine's arithmetic there is another one
    home = "DeepSpeed 0" if source == "torch.save" else source
    back = root / f"{target}-{ranks}-back"
    convert(folder, home, 2, back, optimizer, target)
    again = run_engine("resume", 2, root, optimizer, home, back)
    assert differ_by(again, losses[1]) < 1e-6


def test_the_page_has_the_matrix() -> None:
    assert optimizer_matrix.table() in (ROOT / "tests" / "PROVEN.md").read_text(), (
        "run `python -m tests.proven_page > tests/PROVEN.md`"
    )


def test_every_outcome_is_of_a_cell() -> None:
    """No line of the table is without use."""
    used = {
        outcome_of(optimizer, source, target)
        for optimizer in ROWS
        for source in ENGINES
        for target in targets_of(source)
    }
    assert {each for listed in optimizer_matrix.OUTCOMES.values() for each in listed} <= used
