"""The samples of ONNX Runtime's files, what they hold, and how a checkpoint is judged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zckpt

from ...conftest import ROOT
from ...engines.onnxruntime_files import State
from ..equality import assert_proven, load, same_bits

DATA = ROOT / "tests" / "data" / "onnxruntime"
REAL = DATA / "real-ort-1.16.3__fp32__adam__dp1"
SIZES = (1, 2, 3, 4, 8)
SETS = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("hdf5", "legacy")))
KINDS = [
    ("l1", "fp32"),
    ("l1", "fp16"),
    ("l1", "bf16"),
    ("l2", "fp32"),
    ("l2", "fp16"),
    ("l2", "bf16"),
    ("hdf5", "fp32"),
    ("hdf5", "fp16"),
    ("december", "fp32"),
    ("december", "fp16"),
]
OPTIMIZERS = ("Adam", "Lamb")
LAMB = "the state is exact, but later updates differ"


def sizes(*usual: int) -> list[Any]:
    """All data-parallel sizes, some of them in the default run."""
    return [pytest.param(dp, marks=engines(dp in usual)) for dp in SIZES]


def engines(first: bool) -> list[Any]:
    """Marks of the full matrix, of which some cases are of the default run too."""
    return [pytest.mark.engines, *([pytest.mark.first] if first else [])]


def expected_of(folder: Path) -> dict[str, Tensor]:
    """A sample's tensors by `parameter/slot`; an fp32 run's weights are what the module holds."""
    fp32 = "fp32" in folder.name
    renamed = {"master": "param" if fp32 else "master", "model16": "param"}
    expected = {}
    for key, tensor in load_file(folder / "expected.safetensors").items():
        slot, _, name = key.partition("/")
        if not (slot == "model16" and "hdf5" in folder.name):  # these store no 16-bit copies
            expected[f"{name}/{renamed.get(slot, slot)}"] = tensor
    return expected


def assert_is(universal: Path, expected: dict[str, Tensor], step: int | None = 5) -> None:
    tensors = load(universal)
    assert sorted(tensors) == sorted(expected)
    assert [name for name in expected if not same_bits(tensors[name], expected[name])] == []
    assert json.loads((universal / "manifest.json").read_text())["step"] == step


def assert_reads(
    folder: Path, expected: dict[str, Tensor], tmp_path: Path, harmless: tuple[str, ...] = ()
) -> dict[str, Any]:
    report: dict[str, Any] = zckpt.convert(folder, tmp_path / "read")
    assert_is(tmp_path / "read", expected)
    assert_proven(folder, tmp_path / "read", harmless=harmless)
    shutil.rmtree(tmp_path / "read")
    return report


def state_of(folder: Path) -> State:
    """The state that a sample was made from."""
    case = json.loads((folder / "case.json").read_text())
    tensors = load_file(folder / "expected.safetensors")

    def slot(name: str) -> dict[str, Tensor]:
        return {
            key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")
        }

    return State(
        case["precision"],
        case["optimizer"].removesuffix("Optimizer"),
        slot("master"),
        {"Moment_1": slot("exp_avg"), "Moment_2": slot("exp_avg_sq")},
        dict.fromkeys(slot("master"), case["completed_steps"]),
        initial=slot("master"),
    )


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    contents = torch.load(path, weights_only=True)
    change(contents["model"])
    torch.save(contents, path)
