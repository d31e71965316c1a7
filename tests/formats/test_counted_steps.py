"""Steps that stand in groups: DeepSpeed's stage 3 counts one update once for each sub-group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

from ..conftest import texts
from .test_odd_states import save

WARNING = "Each update adds {} to it in the target's engine, but {} in the source's"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two groups of an optimizer like AdEMAMix, which keeps its step there alone."""
    path = save(tmp_path / "source", "gathered", lambda _: {})
    count_in_groups(path, alpha=2.0)
    return path


def count_in_groups(path: Path, **more: Any) -> None:
    optim = torch.load(path / "optim.pt")
    for state in optim["state"].values():
        del state["step"]
    for group in optim["param_groups"]:
        group |= {"step": 6, **more}
    torch.save(optim, path / "optim.pt")


def counts_in(report: dict[str, Any]) -> list[str]:
    return [line for line in texts(report["warnings"]) if "stores its step in the groups" in line]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("through", [False, True])
def test_a_move_to_stage_3_is_warned_of(
    source: Path, tmp_path: Path, through: bool, dry_run: bool
) -> None:
    if through:
        assert not counts_in(zckpt.convert(source, tmp_path / "universal"))
        source = tmp_path / "universal"
    options: dict[str, Any] = {"to": "deepspeed", "dp": 2}
    assert not counts_in(zckpt.convert(source, tmp_path / "two", stage=2, **options))
    report = zckpt.convert(source, tmp_path / "three", stage=3, dry_run=dry_run, **options)
    (line,) = counts_in(report)
    assert WARNING.format(2, 1) in line


@pytest.mark.parametrize("through", [False, True])
def test_a_move_from_stage_3_is_warned_of(source: Path, tmp_path: Path, through: bool) -> None:
    three = tmp_path / "three"
    zckpt.convert(source, three, to="deepspeed", dp=2, stage=3)
    assert not counts_in(zckpt.reshard(three, tmp_path / "more", dp=3))
    if through:
        assert not counts_in(zckpt.convert(three, tmp_path / "universal"))
        three = tmp_path / "universal"
    for number, to in enumerate(({"to": "dcp"}, {"to": "deepspeed", "dp": 2, "stage": 1})):
        (line,) = counts_in(zckpt.convert(three, tmp_path / str(number), **to))
        assert WARNING.format(1, 2) in line
        assert zckpt.verify(three, tmp_path / str(number))["equal"]


def test_optimizers_that_skip_empty_groups_count_once(tmp_path: Path) -> None:
    """Apex's FusedAdam; `bias_correction` is its own."""
    source = save(tmp_path / "source", "gathered", lambda _: {})
    count_in_groups(source, bias_correction=True)
    options: dict[str, Any] = {"to": "deepspeed", "dp": 2, "stage": 3}
    assert not counts_in(zckpt.convert(source, tmp_path / "three", **options))
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 18}}
    report = zckpt.convert(source, tmp_path / "small", **options, config=config)
    assert WARNING.format(2, 1) in "".join(counts_in(report))


def test_stage_3_may_be_ahead_of_its_counter(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    zckpt.convert(source, run, to="deepspeed", dp=2, stage=3)
    for counted, is_warned in ((3, False), (1, True)):
        for file in run.rglob("*model_states.pt"):
            held = torch.load(file, weights_only=False)
            torch.save(held | {"global_steps": counted}, file)
        (line,) = texts(zckpt.read(run).notices.warnings) or [""]
        assert ("of different saves" in line) is is_warned
