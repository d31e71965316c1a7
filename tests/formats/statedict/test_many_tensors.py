"""The time of reading grows with the number of tensors, and not with its square.

SECURITY.md promises that a file below 10 MB is read within 5 seconds, of whatever small tensors it
consists. The CPU time of four times the tensors is compared, since a machine may be slow.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

FEW, MANY = 4000, 16000
NOISE = 0.3  # seconds


def weights(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.tensor([n + 1.0, 2.0]) for n in range(count)}


def trained(count: int, group_of: Callable[[int], int], key: str) -> dict[str, Any]:
    """A model and its optimizer, in groups, with a state whose key may have the number."""
    model = weights(count)
    groups: dict[int, list[str]] = {}
    for number, name in enumerate(model):
        groups.setdefault(group_of(number), []).append(name)
    states = {n: {key.format(i): 2 * w, "step": 3} for i, (n, w) in enumerate(model.items())}
    param_groups = [{"lr": 1e-3, "params": names} for names in groups.values()]
    return {"model": model, "optimizer": {"state": states, "param_groups": param_groups}}


def tied(count: int) -> dict[str, torch.Tensor]:
    weight = torch.ones(2)
    return dict.fromkeys(weights(count), weight)


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "weights": weights,
    "second names": tied,
    "buffers": lambda n: {f"bn.{i}.num_batches_tracked": torch.tensor(i) for i in range(n)},
    "one group": lambda n: trained(n, lambda _: 0, "exp_avg"),
    "many groups": lambda n: trained(n, lambda number: number, "exp_avg"),
    "models": lambda n: {f"model_{i}": {"w": torch.tensor([i + 1.0, 2])} for i in range(n)},
    "of the program": lambda n: {"model": weights(1), "own": weights(n)},
}


def seconds(path: Path) -> float:
    start = time.process_time()
    zckpt.inspect(zckpt.read(path))
    return time.process_time() - start


def assert_linear(write: Callable[[Path, int], None], folder: Path) -> None:
    for count in (FEW, MANY):
        (folder / str(count)).mkdir()
        write(folder / str(count), count)
    seconds(folder / str(FEW))  # modules are imported
    few = min(seconds(folder / str(FEW)) for _ in range(3))
    many = min(seconds(folder / str(MANY)) for _ in range(2))
    assert many < 8 * few + NOISE


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_torch(kind: str, tmp_path: Path) -> None:
    assert_linear(lambda path, count: torch.save(KINDS[kind](count), path / "a.pt"), tmp_path)


def safetensors(path: Path, count: int) -> None:
    """Weights of one element, in two types."""
    header, offset = {}, 0
    for number in range(count):
        size, dtype = ((4, "F32"), (2, "BF16"))[number % 2]
        header[f"layers.{number}.w"] = {
            "dtype": dtype,
            "shape": [1],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def test_safetensors(tmp_path: Path) -> None:
    """Types were counted once for each weight."""
    assert_linear(safetensors, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        {"to": "universal"},
        {"to": "dcp"},
        {"to": "gathered"},
        *({"to": "deepspeed", "dp": 2, "stage": stage} for stage in (0, 1, 3)),
    ],
    ids=str,
)
def test_what_is_written(words: dict[str, Any], tmp_path: Path) -> None:
    """The same tensors in each format."""

    def write(path: Path, count: int) -> None:
        torch.save(trained(count, lambda _: 0, "exp_avg"), path / "a.pt")
        zckpt.convert(path / "a.pt", path / "universal")
        if words["to"] != "universal":
            zckpt.convert(path / "universal", path / "out", **words)
            (path / "universal" / "manifest.json").unlink()
            (path / "a.pt").unlink()

    def seconds_of(path: Path) -> float:
        return seconds(path / ("universal" if words["to"] == "universal" else "out"))

    few, many = FEW // 4, MANY // 4
    for count in (few, many):
        (tmp_path / str(count)).mkdir()
        write(tmp_path / str(count), count)
    seconds_of(tmp_path / str(few))
    least = min(seconds_of(tmp_path / str(few)) for _ in range(2))
    assert seconds_of(tmp_path / str(many)) < 8 * least + NOISE


@pytest.mark.exhaustive
def test_ten_megabytes_of_weights(tmp_path: Path) -> None:
    """The promise of SECURITY.md, with as many weights as fit."""
    safetensors(tmp_path, 110_000)
    assert 9e6 < (tmp_path / "model.safetensors").stat().st_size < 10e6
    assert seconds(tmp_path) < 5
