"""MosaicML's Composer, which keeps its whole state in a sharded checkpoint, goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt

from ...engines import composer


@pytest.mark.engines
@pytest.mark.parametrize("version", [1, 2])
def test_composer_goes_on_at_other_numbers_of_ranks(version: int, tmp_path: Path) -> None:
    """FSDP of either kind writes, and FSDP of the other kind resumes, on 1 and 3 ranks."""
    losses = composer.run(version, 2, tmp_path / "trained")
    source = tmp_path / "trained" / "run" / f"ep0-ba{composer.SAVED_AT}"
    target = tmp_path / "target"
    report = zckpt.reshard(source, target, dp=3)
    assert not report["left_out"]
    assert zckpt.diff(target, source)["equal"]
    for ranks in (1, 3):
        resumed = composer.run(3 - version, ranks, tmp_path / f"on{ranks}", target)
        assert resumed == pytest.approx(losses[composer.SAVED_AT :], abs=1e-5)
