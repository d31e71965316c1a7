"""From Megatron-Core to DeepSpeed: real engines on both ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ...engines import megatron
from ...engines.named_rank import module

CASE = next(case for case in megatron.READABLE if case["name"] == "tp2")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    megatron.train([CASE], root)
    return root / CASE["name"]


@pytest.mark.engines
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_it(
    stage: int, source: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """Weights, masters, moments and steps are those of Megatron-Core's optimizers."""
    assert zckpt("convert", source, tmp_path / "universal").code == 0
    manifest = json.loads((tmp_path / "universal" / "manifest.json").read_text())
    shapes = {name: about["shape"] for name, about in manifest["parameters"].items()}
    aliases = {
        alias: name for name, about in manifest["parameters"].items() for alias in about["aliases"]
    }
    names = [name for name, _ in module(shapes, aliases).named_parameters()]
    (tmp_path / "names.txt").write_text("\n".join(names))
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}}')
    ended = zckpt(
        *("convert", source, tmp_path / "run", "--to", "deepspeed"),
        *("--dp", "2", "--stage", stage),
        *("--ds-config", tmp_path / "ds_config.json", "--param-names", tmp_path / "names.txt"),
    )
    assert ended.code == 0, ended.err
    group_of = {name: about["group"] for name, about in manifest["parameters"].items()}
    job = {
        "parameters": shapes,
        "aliases": aliases,
        "groups": [[n for n in names if group_of[n] == g] for g in sorted({*group_of.values()})],
        "stage": stage,
        "ranks": 2,
        "checkpoint": str(tmp_path / "run"),
        "output": str(tmp_path / "state.pt"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    loading = [sys.executable, "-m", "tests.engines.named_rank", str(tmp_path / "job.json")]
    done = subprocess.run(loading, capture_output=True, text=True, cwd=megatron.ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    expected, steps = megatron.expected(source)
    assert {*map(float, state["steps"].values())} == steps
    assert state["tensors"].keys() == expected.keys()
    different = [key for key in expected if not torch.equal(expected[key], state["tensors"][key])]
    assert different == []
