"""Trainer, Accelerate and Lightning go on at another size without a copy, as they do with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import equal

from ..conftest import Once, needs
from ..engines import trainers

pytestmark = pytest.mark.engines
Saved = Callable[[str, int], Path]
EMPTY = "*_states.pt"


@pytest.fixture
def saved(once: Once) -> Saved:
    """What a trainer saved at dp 2."""

    def save(trainer: str, stage: int) -> Path:
        needs("deepspeed", "transformers", "accelerate", "lightning", "peft")
        return once(trainer, stage, lambda root: trainers.train(trainer, root, stage, 2))

    return save


@pytest.mark.parametrize(
    ("trainer", "stage", "dp"),
    [
        ("hf_trainer", 2, 3),
        ("accelerate", 3, 1),
        ("lightning", 2, 1),
        (trainers.LORA, 2, 3),
        (trainers.LORA, 3, 1),
        ("hf_trainer", 3, 1),
        ("hf_trainer", 3, 3),
        ("accelerate", 2, 3),
        ("lightning", 3, 3),
    ],
)
def test_it_goes_on_as_with_a_copy(
    trainer: str, stage: int, dp: int, saved: Saved, tmp_path: Path
) -> None:
    directory = saved(trainer, stage)
    copied, loaded = (
        trainers.resume(trainer, directory, tmp_path / str(copy), stage, dp, copy)
        for copy in (True, False)
    )
    assert sorted(copied["tensors"]) == sorted(loaded["tensors"])
    for name, tensor in copied["tensors"].items():
        assert equal(tensor, loaded["tensors"][name]), name
    for key in ("steps", "scalars", "groups", "counters", "lr_scheduler", "frozen", "aliases"):
        assert copied[key] == loaded[key], key
    assert copied["losses"] == loaded["losses"]
    assert len(loaded["losses"]) == 5
    for path in (tmp_path / "False").rglob(EMPTY):
        assert path.stat().st_size == 0, path
