"""What the files of one model rank state alike: a rank that contradicts the first one is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import InconsistentCheckpoint

from ...conftest import EXAMPLE, ROOT
from .test_grid import edit

DATA = ROOT / "tests" / "data"
Z1 = DATA / "deepspeed-0.13.1-z1_dp2_bf16_optimizer" / "run"
Z3 = DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run"


def other_shape(model: dict[str, Any]) -> None:
    name, shape = next(iter(model["param_shapes"][0].items()))
    model["param_shapes"][0][name] = type(shape)((*shape[:-1], shape[-1] + 1))


def other_order(model: dict[str, Any]) -> None:
    shapes = model["param_shapes"][0]
    shapes.move_to_end(next(iter(shapes)))


def of_state(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["optimizer_state_dict"].update(facts)


def of_groups(**facts: Any) -> Callable[[dict[str, Any]], object]:
    def change(value: dict[str, Any]) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1].update(facts)

    return change


MODEL, OPTIMIZER = "*zero_pp_rank_1_*model_states.pt", "*zero_pp_rank_1_*optim_states.pt"
FACTS: dict[str, tuple[Path, str, Callable[[Any], object], str]] = {
    "shapes": (
        Z3, MODEL, other_shape,
        r"param_shapes\[0\]\.filter\.weight \(2, 1, 4\), but .* \(2, 1, 3\)"),
    "order": (Z3, MODEL, other_order, r"param_shapes\[0\] "),
    "model ranks": (
        Z3, MODEL, lambda model: model.update(mp_world_size=2), "mp_world_size 2, but .* 1"),
    "buffers": (
        Z3, MODEL, lambda model: model.update(buffer_names=["a"]), r"buffer_names\[0\] 'a', but "),
    "steps": (Z3, MODEL, lambda model: model.update(global_steps=9), "global_steps 9, but .* 3"),
    "stage": (Z3, OPTIMIZER, of_state(zero_stage=2), "zero_stage 2, but .* 3"),
    "stage of flat files": (EXAMPLE, OPTIMIZER, of_state(zero_stage=1), "zero_stage 1, but .* 2"),
    "ranks": (Z3, OPTIMIZER, of_state(partition_count=4), "partition_count 4, but .* 2"),
    "ranks by group": (
        Z1, OPTIMIZER, of_state(partition_count=[2, 4]), r"partition_count\[1\] 4, but .* 2"),
    "version": (Z1, OPTIMIZER, of_state(ds_version="0.9.3"), "ds_version '0.9.3', but .* '0.0.0'"),
    "paddings": (
        EXAMPLE, OPTIMIZER, of_state(param_alignment_paddings=[[0], [8]]),
        r"param_alignment_paddings\[0\]"),
    "hyper-parameters": (
        EXAMPLE, OPTIMIZER, of_groups(lr=0.5), r"param_groups\[1\]\.lr 0.5, but .* 0.0"),
    "loss scale": (
        EXAMPLE, OPTIMIZER, of_state(overflow=True), "overflow True, but .* False"),
}  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_a_rank_that_contradicts_the_first_one(fact: str, tmp_path: Path) -> None:
    source, pattern, change, said = FACTS[fact]
    run = Path(shutil.copytree(source, tmp_path / "run"))
    (path,) = run.rglob(pattern)
    edit(path, change)
    message = f"{path.name} states {said}"
    with pytest.raises(InconsistentCheckpoint, match=message):
        zckpt.convert(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (problem,) = zckpt.verify(run)["problems"]
    assert re.search(message, problem["message"])


def test_unchanged_files_are_read(tmp_path: Path) -> None:
    """torch.save again, with the same values, changes nothing."""
    changed = {(source, pattern) for source, pattern, _, _ in FACTS.values()}
    for number, (source, pattern) in enumerate(changed):
        run = Path(shutil.copytree(source, tmp_path / str(number)))
        (path,) = run.rglob(pattern)
        edit(path, lambda value: value)
        assert zckpt.verify(run)["equal"]
