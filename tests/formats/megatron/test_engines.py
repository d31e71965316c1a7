"""What Megatron-Core's optimizers held is what zckpt reads, bit for bit, at every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ...engines import megatron

pytestmark = pytest.mark.engines


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    megatron.train([*megatron.READABLE, megatron.CORRUPT, *megatron.OTHERS], root)
    return root


@pytest.mark.parametrize("name", [case["name"] for case in megatron.READABLE])
def test_state_is_the_optimizers(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    expected, steps = megatron.expected(runs / name)
    target = tmp_path / "universal"
    ended = zckpt("convert", runs / name, target, "--json")
    assert ended.code == 0, ended.err
    assert zckpt("verify", runs / name, "--against", target).code == 0
    assert steps == {ended.document["step"]} == {3}
    read = {}
    for slot in ("model", "master", "exp_avg", "exp_avg_sq"):
        file = target / f"{slot}.safetensors"
        if file.exists():
            entry = "param" if slot == "model" else slot
            read |= {f"{key}/{entry}": tensor for key, tensor in load_file(file).items()}
    if name == "not_distributed_fp32":  # the weights are the masters
        assert not any(key.endswith("/master") for key in read)
        read |= {f"{key[:-6]}/master": read[key] for key in list(read) if key.endswith("/param")}
    assert read.keys() == expected.keys()
    different = [key for key in expected if not _same(expected[key], read[key])]
    assert different == []


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_corruption_is_found(runs: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Megatron-Core's file of several buckets has other masters than its optimizer had."""
    source, target = runs / "corrupt", tmp_path / "target"
    ended = zckpt("convert", source, target, "--json")
    assert ended.code == 1
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "32 of 36 parameters" in ended.document["message"]
    assert "embedding.word_embeddings.weight" in ended.document["message"]
    assert not target.exists()
    ended = zckpt("verify", source, "--json")
    assert ended.code == 3
    assert len(ended.document["differences"]) == 32
    assert zckpt("convert", source, target, "--weights-only").code == 0
    expected, _ = megatron.expected(source)
    weights = load_file(target / "model.safetensors")
    assert all(_same(expected[f"{name}/param"], tensor) for name, tensor in weights.items())
    assert len(weights) == 36


@pytest.mark.parametrize("name", [case["name"] for case in megatron.OTHERS])
def test_other_types_are_refused(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    ended = zckpt("convert", runs / name, tmp_path / "target", "--json")
    assert ended.document["error"] == "UnsupportedCheckpoint"
    assert name in ended.document["message"]
    assert zckpt("convert", runs / name, tmp_path / "target", "--weights-only").code == 0
