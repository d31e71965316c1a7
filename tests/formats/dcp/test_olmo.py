"""Numbered folders of OLMo-core, written and loaded by its own Checkpointer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt

from ...engines import olmo


@pytest.mark.engines
def test_olmo_core_goes_on_from_what_it_gets_back(tmp_path: Path) -> None:
    """By way of a universal checkpoint, and for another number of ranks."""
    losses = olmo.run(2, tmp_path / "trained")
    run = tmp_path / "trained" / "run"
    first, last = (run / f"step{step}" for step in olmo.SAVED_AT)
    assert zckpt.auto_resume(run, dp=3) == str(last)
    rows = zckpt.list_checkpoints(run)["checkpoints"]
    assert [(row["path"], row["whole"]) for row in rows] == [(str(first), True), (str(last), True)]
    zckpt.convert(last, tmp_path / "universal")
    for ranks, source in ((3, last), (2, tmp_path / "universal")):
        target = tmp_path / f"on{ranks}" / last.name
        target.parent.mkdir()
        zckpt.reshard(source, target, dp=ranks)
        assert zckpt.verify(target, against=last)["equal"]
        metadata = (target / ".metadata.json").read_text()
        assert json.loads(metadata) == json.loads((last / ".metadata.json").read_text())
        resumed = olmo.run(ranks, tmp_path / f"from{ranks}", target.parent)
        assert resumed == pytest.approx(losses[olmo.SAVED_AT[-1] :], abs=1e-5)
