"""A manifest becomes a checkpoint: what is read for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.writing import conversion

from .conftest import EXAMPLE, texts
from .formats.gathered.plain_torch import names_by_group, save, trained_pair

Paths = list[Any]


@pytest.fixture
def paths_read(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """The paths that a conversion reads, in order."""
    read: Callable[..., Manifest] = conversion.read
    paths: Paths = []

    def counted(path: Any, reading: Any) -> Manifest:
        paths.append(path)
        return read(path, reading)

    monkeypatch.setattr(conversion, "read", counted)
    return paths


def test_a_source_that_states_its_names_is_read_once(tmp_path: Path, paths_read: Paths) -> None:
    path = tmp_path / "source"
    zckpt.convert(EXAMPLE, path)
    paths_read.clear()
    source = zckpt.read(path)
    names = [f"net.{name}" for name in source.parameters]
    zckpt.convert(path, tmp_path / "u", param_names=names, rename=[("^", "net.")])
    assert paths_read == [path]
    assert zckpt.read(tmp_path / "u").entries.keys() == {
        (f"net.{name}", slot) for name, slot in source.entries
    }


def test_options_of_tensor_ranks_are_not_used_without_any(tmp_path: Path) -> None:
    report = zckpt.convert(EXAMPLE, tmp_path / "u", tp_rules="llama", replicas="rank0")
    said = [line for line in texts(report["warnings"]) if "is not used" in line]
    assert [line.split()[0] for line in said] == ["--tp-rules", "--replicas"]


def test_a_source_that_numbers_parameters_gets_the_names_from_before_a_renaming(
    tmp_path: Path, paths_read: Paths
) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair, "model.pt", "optim.pt")
    before = zckpt.read(folder, param_names=names_by_group(pair))
    names = [f"net.{name}" for name in names_by_group(pair)]
    zckpt.convert(folder, tmp_path / "u", param_names=names, rename=[("^", "net.")])
    assert paths_read == [folder, folder]
    assert zckpt.read(tmp_path / "u").entries.keys() == {
        (f"net.{name}", slot) for name, slot in before.entries
    }


@pytest.mark.parametrize("to", ["universal", "deepspeed", "gathered", "dcp"])
def test_a_conversion_leaves_no_cycles(tmp_path: Path, to: str) -> None:
    """Tensors in cycles would stay in memory until the garbage collector runs."""
    zckpt.convert(EXAMPLE, tmp_path / "warm", to=to)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        zckpt.convert(EXAMPLE, tmp_path / "target", to=to)
        gc.collect()
        kinds = {type(value).__name__ for value in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kinds & {"Entry", "Manifest", "Parameter", "Pair", "TargetPiece", "Tensor"}
