"""One bit of a checkpoint is flipped: that is an error, a warning, or it changes nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from . import tiny
from .flips import counted, flips, survey, table

ALL = [kind for kind in (*tiny.TARGETS, *tiny.SMALLER) if kind not in ("dcp", "onnxruntime")]


@pytest.fixture
def checkpoint(kind: str, smallest: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(smallest(kind), tmp_path / kind))


@pytest.mark.parametrize("kind", [*tiny.TARGETS, *tiny.SMALLER])
def test_some_bits(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """A few bits in each kind of bytes."""
    bits = list(flips(checkpoint))
    chance, wanted = random.Random(kind), []
    for where in sorted({flip.where for flip in bits}):
        wanted += chance.sample([flip for flip in bits if flip.where == where], 4)
    counts, faults = counted(survey(checkpoint, tmp_path / "target", wanted))
    print(table(kind, counts))
    assert faults == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ALL)
def test_every_bit(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    counts, faults = counted(survey(checkpoint, tmp_path / "target", flips(checkpoint)))
    print(table(kind, counts))
    assert faults == []
