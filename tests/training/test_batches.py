"""Batch sizes and random states of a target for another number of ranks, which states neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import ROOT, Result

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"  # of 2 ranks, with a global batch of 8
SET = "set per_device_train_batch_size times gradient_accumulation_steps to {} to keep"
STATES = {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(None, []), (2, []), (4, [SET.format(2)]), (3, ["cannot be divided among 3"])],
)
def test_from_deepspeed_to_fsdp(
    ranks: int | None, said: list[str], tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """As DeepSpeed's targets: their advice, and no random state of another number of ranks."""
    sizes = () if ranks is None else ("--dp", ranks)
    words = ("--to", "dcp", "--dialect", "accelerate", *sizes, "--json")
    report = zckpt("convert", TRAINER, tmp_path / "target", *words).document
    batches = [line for line in report["warnings"] if line["code"] == "batch-size-changes"]
    assert len(batches) == len(said)
    assert all(part in line["message"] for part, line in zip(said, batches, strict=True))
    arrived = {path.name for path in (tmp_path / "target").iterdir()}
    assert arrived & STATES == (STATES if ranks in (None, 2) else set())
    omitted = [line["code"] for line in report["left_out"] if "rng_state" in line["message"]]
    assert omitted == ["rank-state-omitted"] * (2 - len(arrived & STATES))
