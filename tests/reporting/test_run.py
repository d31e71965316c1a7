"""A run: the newest checkpoint's page, and all of them over time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt

from ..conftest import ROOT
from ..faults import optimizer_files
from .conftest import Document

Make = Callable[..., Document]
CHECKPOINT = ROOT / "examples" / "trainer" / "checkpoint-4"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 10):
        shutil.copytree(CHECKPOINT, tmp_path / "out" / f"checkpoint-{step}")
    return tmp_path / "out"


def test_one_checkpoint_is_its_page(document: Make) -> None:
    made = document(CHECKPOINT.parent)
    assert "run" not in made
    assert made["path"].endswith("checkpoint-4/global_step4")


def test_several_checkpoints(run: Path, document: Make) -> None:
    optimizer_files(run / "checkpoint-4")[1].unlink()
    made = document(run)
    strip = made["run"]
    assert [each["name"] for each in strip["checkpoints"]] == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-10",
    ]
    assert strip["shown"] == 2
    assert [each["whole"] for each in strip["checkpoints"]] == [True, False, True]
    why = strip["checkpoints"][1]["why"]
    assert "is missing" in why
    (fault,) = made["faults"]
    assert fault["message"] == f"checkpoint-4: {why}"
    newest = strip["checkpoints"][2]
    weights = [
        zckpt.load(run / "checkpoint-10", f"{name}/param").double().square().sum()
        for name in zckpt.read(run / "checkpoint-10").parameters
        if ".layers.1." in name
    ]
    assert newest["norms"]["1"] == pytest.approx(math.sqrt(sum(weights)))
    assert newest["updates"].keys() == {"embed_tokens", "0", "1", "norm"}
    assert (newest["step"], newest["dp"], newest["bytes"]) == (4, 2, 84207)
    assert set(strip["rows"]) >= newest["norms"].keys()
    assert made["path"] == str(run)


def test_a_tag_is_one_checkpoint(example: Path, document: Make) -> None:
    shutil.copytree(example / "global_step7", example / "global_step9")
    assert len(document(example)["run"]["checkpoints"]) == 2
    made = document(example, tag="global_step9")
    assert "run" not in made
    assert made["line"]["name"] == "global_step9"
