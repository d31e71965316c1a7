"""The updates of an optimizer in a directory, by which the checkpoints of a run are ordered."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from zckpt import formats
from zckpt.formats.dcp.files import detect, updates
from zckpt.formats.dcp.read import read
from zckpt.formats.reading import Reading

from ...conftest import ROOT

DATA = ROOT / "tests" / "data"
SAVED = sorted({file.parent for file in DATA.rglob(".metadata")})
WHOLE = [folder.parent if folder.name == "optim" else folder for folder in SAVED]


def save(path: Path, steps: dict[str, float], **more: Any) -> None:
    slots = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2))
    state = {name: {"step": torch.tensor(step), **slots} for name, step in steps.items()}
    groups = [{"lr": 1e-3, "params": [*steps]}]
    value = {
        "model": {name: torch.ones(2) for name in steps},
        "optimizer": {"state": state, "param_groups": groups},
    }
    dcp.save({**value, **more}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("path", [p for p in WHOLE if detect(str(p))], ids=lambda path: path.name)
def test_it_is_the_largest_step_of_the_manifest(path: Path) -> None:
    steps = [item.step for item in read(str(path), Reading(nameless=True)).parameters.values()]
    assert updates(str(path)) == max(step for step in steps if step is not None)


def test_parameters_that_differ_and_keys_that_are_no_optimizers(tmp_path: Path) -> None:
    """Of two layouts: the second has one weight less. Paths of other lengths change a frame."""
    more = {"trainer": {"state": {"loop": {"step": torch.tensor(90.0)}}, "step": 70}}
    save(tmp_path / "a", {"late": 3.0, "early": 5.0}, **more)
    save(tmp_path / "a-long-name", {"late": 8.0, "early": 12.0}, **more)
    save(tmp_path / "b", {"late": 6.0}, **more)
    names = ("a", "a-long-name", "b", "a")
    assert [updates(str(tmp_path / name)) for name in names] == [5, 12, 6, 5]


def test_an_optimizer_without_steps_is_read_whole(tmp_path: Path) -> None:
    """Groups may state them instead, as Apex's do."""
    value = {
        "model": {"w": torch.ones(2)},
        "optimizer": {
            "state": {"w": {"exp_avg": torch.ones(2)}},
            "param_groups": [{"params": ["w"], "lr": 1.0, "step": 7}],
        },
    }
    dcp.save(value, checkpoint_id=tmp_path / "1-2", no_dist=True)
    assert updates(str(tmp_path / "1-2")) is None
    assert formats._optimizer_updates(str(tmp_path / "1-2")) == 7


def test_metadata_of_one_layout_is_parsed_once(tmp_path: Path) -> None:
    """The names have two numbers, and no file states a counter: the optimizer decides.

    To read each of them whole took 50 ms.
    """
    names = [f"epoch={step}-loss={step * 37 % 100 / 100}" for step in range(9, 39)]
    for step, name in enumerate(names):
        save(tmp_path / name, {f"layers.{n}.weight": float(step) for n in range(50)})
    start = time.process_time()
    found = formats.oldest_first(str(tmp_path), sorted(os.listdir(tmp_path)))
    assert time.process_time() - start < 0.5
    assert found == names


def test_a_file_that_is_gone_leaves_the_order_to_times(tmp_path: Path) -> None:
    save(tmp_path / "1-2", {"w": 4.0})
    for file in (tmp_path / "1-2").glob("*.distcp"):
        file.unlink()
    assert [one.is_timed for one in formats.by_age([str(tmp_path / "1-2")])] == [True]
