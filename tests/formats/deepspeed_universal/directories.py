"""Universal directories for these tests: ours, and those of DeepSpeed's own converter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.inert import to_json

from ...conftest import Result, texts
from ...engines import deepspeed
from ...engines.cases import Case
from ...manifests import changed
from ..equality import load, same_bits

Trained = Callable[[Case], Path]
Zckpt = Callable[..., Result]
FORMAT = "deepspeed-universal"
TAG = "global_step7"  # of examples/run
LOAD = {"checkpoint": {"load_universal": True}}


def convert(source: Path, target: Path, **options: Any) -> Path:
    zckpt.convert(source, target, to=FORMAT, **options)
    return target


def warnings(source: Path, target: Path, **options: Any) -> str:
    report = zckpt.convert(source, target, to=FORMAT, **options, dry_run=True)
    return "\n".join(texts(report["warnings"]))


def same_universal(a: Path, b: Path) -> None:
    """Two of our own universal checkpoints, but for where they came from."""
    one, other = (json.loads((path / "manifest.json").read_text()) for path in (a, b))
    for key in ("parameters", "entries", "groups", "buffers", "optimizer", "step", "tuples"):
        assert one[key] == other[key], key
    assert list(one["parameters"]) == list(other["parameters"])
    assert one["state"] == other["state"]
    tensors, others = load(a), load(b)
    for name, tensor in tensors.items():
        assert same_bits(tensor, others[name]), name


def rename_parameter(path: Path, new: str) -> None:
    """The first one, in all lists of a model file."""
    value = torch.load(path, weights_only=False)
    name = next(iter(value["param_shapes"][0]))
    for dictionary in (*value["param_shapes"], value["module"]):
        items = [(new if key == name else key, item) for key, item in dictionary.items()]
        dictionary.clear()
        dictionary.update(items)
    value["shared_params"] = {
        alias: new if owner == name else owner for alias, owner in value["shared_params"].items()
    }
    torch.save(value, path)


def with_info(run: Path, target: Path, info: Mapping[str, Any]) -> Path:
    """A universal checkpoint whose client state has what Megatron tells DeepSpeed's converter."""
    zckpt.convert(run, target)
    with changed(target) as manifest:
        manifest["state"]["client_state"]["universal_checkpoint_info"] = to_json(dict(info))
    return target


def merge(run: Path, target: Path) -> Path:
    """What DeepSpeed's own converter makes of the run's latest."""
    tag = (run / "latest").read_text()
    shutil.copytree(run, target)
    words = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    words += ["--input_folder", str(target / tag), "--output_folder", str(target / "merged")]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env={**os.environ, **deepspeed.ENVIRONMENT},
        check=True,
        capture_output=True,
    )
    return target


def first_of_each(rows: list[tuple[str, Any]]) -> list[Any]:
    """All are of the full matrix; the first of each kind is of the default run too."""
    seen: set[str] = set()
    marked = []
    for kind, row in rows:
        marks = [pytest.mark.engines] + ([] if kind in seen else [pytest.mark.first])
        seen.add(kind)
        marked.append(pytest.param(row, id=getattr(row, "name", row), marks=marks))
    return marked
