"""States of other shapes than the parameters, in runs of several model ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import UnsupportedState

from ...conftest import texts
from .conftest import Trained
from .test_grid import edit

pytestmark = [pytest.mark.engines, pytest.mark.first]


def plant(root: Path, folder: Path, first: float = 0.0) -> Path:
    """A copy of a run in which every state of the optimizer has a matrix of its own."""
    shutil.copytree(root / "run", folder)
    files = sorted(folder.glob("*/*mp_rank_*_optim_states.pt"))
    files = files or sorted(folder.glob("*/mp_rank_*_model_states.pt"))
    for number, file in enumerate(files):

        def change(value: Any, number: int = number) -> None:
            optimizer = value.get("optimizer_state_dict") or value["optimizer"]
            if "base_optimizer_state" in optimizer:
                optimizer = optimizer["base_optimizer_state"]
            optimizer = optimizer.get("optimizer_state_dict", optimizer)
            for key, state in optimizer["state"].items():
                state["Q"] = [torch.full((2, 3), first + 100.0 * number + key)]

        edit(file, change)
    return folder


def matrices(folder: Path) -> list[list[float]]:
    """By model rank, the matrices' values."""
    result = []
    for file in sorted(folder.glob("*/mp_rank_*_model_states.pt")):
        optimizer = torch.load(file, weights_only=False)["optimizer"]
        optimizer = optimizer.get("optimizer_state_dict", optimizer)
        result.append([float(state["Q"][0][0, 0]) for state in optimizer["state"].values()])
    return result


def test_tensor_ranks_without_zero(grid_trained: Trained, tmp_path: Path) -> None:
    """The same grid keeps the states of each model rank; the whole model cannot have them."""
    run = plant(grid_trained("tensor_tp2_dp2_z0"), tmp_path / "planted")
    zckpt.reshard(run, tmp_path / "dp3", dp=3)
    assert matrices(tmp_path / "dp3") == matrices(run)
    with pytest.raises(UnsupportedState, match=r"Q of .*joins states of tensor ranks only if"):
        zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(run, tmp_path / "universal", drop_state=["Q"])
    zckpt.reshard(run, tmp_path / "without", dp=3, drop_state=["Q"])
    assert b"Q" not in b"".join(map(keys_of, (tmp_path / "without").rglob("*_states.pt")))


def keys_of(path: Path) -> bytes:
    model = torch.load(path, weights_only=False)
    states = model["optimizer"]["optimizer_state_dict"]["state"].values()
    return " ".join(key for state in states for key in state).encode()


def test_stages_without_zero(grid_trained: Trained, tmp_path: Path) -> None:
    run = plant(grid_trained("pipe_pp2_dp1_z0_plain"), tmp_path / "planted")
    zckpt.convert(run, tmp_path / "universal")
    assert zckpt.verify(run, tmp_path / "universal")["equal"]
    zckpt.reshard(tmp_path / "universal", tmp_path / "again", dp=1)
    assert matrices(tmp_path / "again") == matrices(run)


def test_tensor_ranks_of_flat_buffers(grid_trained: Trained, tmp_path: Path) -> None:
    trained = grid_trained("tensor_tp2_dp2")
    run = plant(trained, tmp_path / "planted")
    for convert in (
        lambda: zckpt.convert(run, tmp_path / "universal"),
        lambda: zckpt.reshard(run, tmp_path / "run", dp=1),
    ):
        with pytest.raises(UnsupportedState, match=r"Q of .*belongs to a rank's partition"):
            convert()
    zckpt.reshard(run, tmp_path / "run", dp=1, drop_state=["Q"])
    assert {item.key for item in zckpt.read(run).states.of_form("unsupported")} == {"Q"}
    (line,) = zckpt.inspect(zckpt.read(run))["states"]
    assert line["form"].startswith(
        "not read: zckpt does not read a state that belongs to a rank's partition as a whole"
    )
    report = zckpt.verify(run)
    assert report["equal"]
    assert any(note.startswith("not read: Q of ") for note in texts(report["notes"]))
    assert zckpt.verify(run, run)["equal"]
    other = plant(trained, tmp_path / "other", 1.0)
    report = zckpt.verify(run, other)
    assert len(report["differences"]) == 8  # of two groups, on two tensor ranks and two data ranks
    assert not report["lacking"]
    assert zckpt.verify(run, other, drop_state=["Q"])["equal"]
