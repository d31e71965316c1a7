"""Of several checkpoints in one place, the error lists the oldest first and proposes the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import errors

from ..conftest import EXAMPLE, ROOT

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2" / "iter_0000003"
Place = Callable[[Path, Path], object]


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def universal_tag(source: Path, target: Path) -> None:
    """A tag of DeepSpeed's own universal checkpoints."""
    zckpt.convert(source, target.with_suffix(".run"), to="deepspeed-universal")
    os.rename(target.with_suffix(".run") / "global_step7", target)
    shutil.rmtree(target.with_suffix(".run"))


def one_file(source: Path, target: Path) -> None:
    zckpt.convert(source, target.parent / "new", to="gathered")
    states = {path.stem: torch.load(path) for path in (target.parent / "new").glob("*.pt")}
    torch.save({"model": states["model"], "optimizer": states["optim"]}, target)
    shutil.rmtree(target.parent / "new")


def sharded(source: Path, target: Path) -> None:
    zckpt.convert(source, target.parent / "new", to="onnxruntime", dp=1)
    (file,) = (target.parent / "new").iterdir()
    os.rename(file, target)
    (target.parent / "new").rmdir()


def items(source: Path, target: Path) -> None:
    zckpt.convert(source, target, to="dcp")


@pytest.mark.parametrize(
    ("source", "place", "older", "newer"),
    [
        (EXAMPLE / "global_step7", copy, "global_step9", "global_step11"),
        (EXAMPLE, universal_tag, "global_step9", "global_step11"),
        (TRAINER, copy, "checkpoint-9", "checkpoint-11"),
        (EXAMPLE, items, "step-9", "step-11"),
        (MEGATRON, copy, "iter_9999999", "iter_10000000"),
        (EXAMPLE, one_file, "epoch9.pt", "epoch11.pt"),
        (EXAMPLE, sharded, "epoch9.ortcp", "epoch11.ortcp"),
    ],
)
def test_the_newest_is_proposed(
    source: Path, place: Place, older: str, newer: str, tmp_path: Path
) -> None:
    for name in (newer, older):
        place(source, tmp_path / name)
    with pytest.raises(errors.AmbiguousCheckpoint) as caught:
        zckpt.read(tmp_path)
    message = caught.value.message
    assert message.index(older) < message.index(newer), message
    first, _, _ = caught.value.hint.partition(";")
    assert first.endswith((f" {newer}", f"/{newer}"))
