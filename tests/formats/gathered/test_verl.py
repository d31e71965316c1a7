"""Actor folders of verl, written and loaded by its own FSDPCheckpointManager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import UnsupportedCheckpoint

from ...conftest import Result
from ...engines import verl
from . import torch_ranks

Zckpt = Callable[..., Result]
WORLD = 2


def flat_folder(folder: Path) -> dict[str, torch.Tensor]:
    """An actor's folder of FSDP1; the weights in it."""
    weights = {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6), "b.weight": torch.randn(4)}
    folder.mkdir(parents=True)
    make = torch_ranks.sharded_tensors(WORLD)
    for rank in range(WORLD):
        with torch_ranks.as_rank(rank, WORLD):
            model = {name: make(rank, weight) for name, weight in weights.items()}
            rest = f"world_size_{WORLD}_rank_{rank}.pt"
            torch.save(model, folder / f"model_{rest}")
        flat = torch.nn.Parameter(torch.randn(17))
        optimizer = torch.optim.AdamW([flat])
        flat.sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / f"optim_{rest}")
        torch.save({"lr_scheduler": None, "rng": rank}, folder / f"extra_state_{rest}")
    return weights


def test_flat_parameters_are_named_as_the_reason(tmp_path: Path, zckpt: Zckpt) -> None:
    folder = tmp_path / "actor"
    flat_folder(folder)
    (tmp_path / "names").write_text("a.weight\na.bias\nb.weight")
    for words in (("inspect",), ("verify",), ("verify", "--param-names", tmp_path / "names")):
        printed = zckpt(words[0], folder, *words[1:])
        assert printed.code != 0
        assert "has an optimizer of FSDP1's flat parameters, cut over the ranks" in printed.err
        assert f"zckpt convert {folder} DST --weights-only" in printed.err
        assert "--param-names names.txt" not in printed.err


def test_the_weights_beside_flat_parameters_are_converted(tmp_path: Path) -> None:
    weights = flat_folder(tmp_path / "actor")
    zckpt.convert(tmp_path / "actor", tmp_path / "out", to="gathered", weights_only=True)
    converted: dict[str, Any] = torch.load(tmp_path / "out" / "model.pt")
    assert weights.keys() == converted.keys()
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())


@pytest.mark.engines
def test_flat_parameters_of_verl(tmp_path: Path) -> None:
    verl.run(1, WORLD, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match="FSDP1's flat parameters"):
        zckpt.read(tmp_path / "actor")
    report = zckpt.convert(tmp_path / "actor", tmp_path / "out", to="gathered", weights_only=True)
    assert report["tensors"] == 21
