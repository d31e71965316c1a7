"""A file that was copied over another one, where nothing in it says whose it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from zckpt.errors import InconsistentCheckpoint

from ..conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

LEGACY = ROOT / "tests" / "data" / "megatron-0.16.1-legacy-tp2"
Fill = Callable[[int, int], torch.Tensor]


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns)


def save(root: Path, weight: Fill, moment: Fill) -> Path:
    """Two layers of one shape, each tensor in a file of its own."""
    weights = {name: weight(4, 3) for name in ("first.weight", "second.weight")}
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": moment(4, 3), "exp_avg_sq": moment(4, 3)}
        for name in weights
    }
    groups = [{"params": list(weights), "lr": 0.1, "betas": (0.9, 0.999)}]
    tree = {"model": weights, "optim": {"state": state, "param_groups": groups}}
    writer = dcp.FileSystemWriter(root, single_file_per_rank=False)
    dcp.save(tree, storage_writer=writer)
    return root


def file_of(root: Path, name: str) -> Path:
    (fragment,) = zckpt.read(root).entries[name].fragments
    return Path(fragment.extent.file)


def test_a_copied_file_is_refused(tmp_path: Path) -> None:
    root = save(tmp_path / "run", random, random)
    assert zckpt.verify(root)["equal"]
    one, other = (file_of(root, f"{name}.weight/exp_avg") for name in ("first", "second"))
    shutil.copy(one, other)
    with pytest.raises(InconsistentCheckpoint, match="holds the same bytes as") as refused:
        zckpt.convert(root, tmp_path / "target")
    assert one.name in refused.value.message
    assert other.name in refused.value.message
    (problem,) = zckpt.verify(root)["problems"]
    assert problem["message"] == refused.value.message


@pytest.mark.parametrize("equal", ["weights", "moments"])
def test_files_that_are_equal_by_nature(equal: str, tmp_path: Path) -> None:
    """Layers that were made of one, and an optimizer whose moments are zero."""
    one = torch.randn(4, 3)
    weight: Fill = (lambda *_: one.clone()) if equal == "weights" else random
    moment: Fill = torch.zeros if equal == "moments" else random
    root = save(tmp_path / "run", weight, moment)
    slot = "param" if equal == "weights" else "exp_avg"
    paths = [file_of(root, f"{name}.weight/{slot}") for name in ("first", "second")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    zckpt.convert(root, tmp_path / "target")
    assert zckpt.verify(root)["equal"]


def test_a_copied_rank(tmp_path: Path) -> None:
    """All files of one model-parallel rank: weights, masters and moments fit each other."""
    root = tmp_path / "run"
    shutil.copytree(LEGACY, root)
    ranks = [root / "iter_0000003" / f"mp_rank_0{rank}" for rank in (0, 1)]
    shutil.copytree(ranks[0], ranks[1], dirs_exist_ok=True)
    with pytest.raises(InconsistentCheckpoint, match=r"mp_rank_01.* holds the same bytes as"):
        zckpt.convert(root, tmp_path / "target")
    assert "holds the same bytes" in zckpt.verify(root)["problems"][0]["message"]
