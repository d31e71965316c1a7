"""FSDP2 keeps each weight once, as its own master: what a rank's file had is lost for good."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt as package
from zckpt.errors import IncompleteCheckpoint

from ..conftest import ROOT, Result
from .test_losses import remove, told

LOST = "__1_0.distcp"
BOTH = ("masters", "moments=zero")


def test_the_newest_whole_one_is_named(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """No option makes the weights up, and --older has them as they were earlier."""
    for name in ("step-6", "step-9"):
        shutil.copytree(ROOT / "tests/data/fsdp2-2.13.0-w2", tmp_path / "run" / name)
    remove(tmp_path / "run" / "step-9", LOST)
    whole = tmp_path / "run" / "step-6"
    for words in ((), *((("--rebuild", each),) for each in BOTH), (("--older", whole),)):
        typed = [word for pair in words for word in pair]
        refused = zckpt("mend", tmp_path / "run" / "step-9", tmp_path / "mended", *typed)
        assert refused.code == 1
        assert "is lost for good" in refused.err
        assert f"resume from {whole}, which is complete according to its metadata" in refused.err
        assert "alone, and is lost for good:\n  weights of embedding.weight" in refused.out
        assert not (tmp_path / "mended").exists()


@pytest.mark.engines
def test_a_training(tmp_path: Path) -> None:
    """The run goes on from the older one with the losses of the uninterrupted run."""
    from ..engines import torch_engine
    from ..engines.torch_cases import CASES

    case = CASES["fsdp2_dcp"]
    older = dataclasses.replace(case, steps=case.steps - 1)
    whole = torch_engine.train(older, 2, tmp_path / "older")
    run = torch_engine.train(case, 2, tmp_path / "newer")
    remove(run, LOST)
    with pytest.raises(IncompleteCheckpoint, match=LOST):
        package.mend(run, tmp_path / "mended", older=whole, rebuild=BOTH)
    report = package.mend(run, tmp_path / "mended", older=whole, rebuild=BOTH, dry_run=True)
    assert "gone" in told(report).values()
    resumed = torch_engine.resume("fsdp2", whole, 2, tmp_path / "resumed", case=older)
    oracle = torch.load(tmp_path / "older" / "oracle.pt", weights_only=False)
    later = torch.load(tmp_path / "newer" / "oracle.pt", weights_only=False)
    print(resumed["losses"], oracle["losses"], later["losses"])
    assert resumed["losses"] == oracle["losses"]
    assert resumed["losses"][1:] == later["losses"][:-1]
