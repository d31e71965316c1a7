"""Tensors with a class of their own in an optimizer's state, as quantized ones of torchao."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of

from ...conftest import ROOT, Result, texts
from ..equality import same_bits

Program = Callable[..., Result]
DATA = ROOT / "tests" / "data" / "torchao-0.18.0"  # two layers, AdamW8bit, three updates
CLASS = "torchao.optim.subclass_8bit.OptimState8bit"
load, read = zckpt.load, zckpt.read  # a fixture has the module's name


class Quantized(torch.Tensor):
    """A tensor whose elements are codes in an inner one."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantized:
        result: Quantized = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32
        )
        return result

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Quantized(args[0].codes)
        raise NotImplementedError(function)


@pytest.mark.parametrize("name", ["adamw8bit.pt", "adamw8bit"])
def test_the_class_is_named(name: str, tmp_path: Path, zckpt: Program) -> None:
    source = DATA / name
    report = zckpt("inspect", source, "--json").document
    assert report["objects"][0] == CLASS
    assert report["step"] == 3
    assert report["inferred"] == []  # the record states the shape of the weight
    assert zckpt("inspect", source).code == 0
    assert zckpt("verify", source).code == 0
    assert zckpt("convert", source, tmp_path / "u", "--weights-only").code == 0
    assert zckpt("convert", source, tmp_path / "t", "--to", "gathered", "--weights-only").code == 0
    weights = torch.load(tmp_path / "t" / "model.pt", weights_only=True)
    assert [tuple(w.shape) for w in weights.values()] == [(64, 64), (64,), (2, 64), (2,)]
    assert all(same_bits(load(source, f"{key}/param"), w) for key, w in weights.items())


def test_pieces_of_fsdp2_are_named_and_not_read(tmp_path: Path, zckpt: Program) -> None:
    """Two ranks of FSDP2 saved halves of the states of one weight; the others are plain."""
    source = DATA / "adamw8bit_fsdp2"
    shown = zckpt("inspect", source)
    assert shown.code == 0
    assert f"not read: sharded tensors of the class {CLASS}" in shown.out
    assert zckpt("verify", source).code == 0
    assert zckpt("convert", source, tmp_path / "u", "--weights-only").code == 0
    for words in (("reshard",), ("convert", "--to", "deepspeed", "--stage", 2)):
        command, *options = words
        refused = zckpt(command, source, tmp_path / "t", "--dp", 3, *options)
        assert refused.code == 1
        assert "the target cannot store the optimizer's exp_avg and exp_avg_sq of" in refused.err
        assert f"(sharded tensors of the class {CLASS})" in refused.err
        assert not (tmp_path / "t").exists()


def test_pieces_are_compared_as_they_are(tmp_path: Path, zckpt: Program) -> None:
    source, copy = DATA / "adamw8bit_fsdp2", tmp_path / "copy"
    shutil.copytree(source, copy)
    report = zckpt("verify", source, "--against", copy, "--json").document
    assert report["equal"]
    assert (
        "exp_avg of 2.weight: zckpt does not support this state; only its bytes were compared"
        in texts(report["notes"])
    )
    tensors = [entry for item in read(copy).states.of_form("unsupported") for entry in item.tensors]
    assert len(tensors) == 12  # codes, scale and qmap of two moments, on two ranks
    extent = next(iter(tensors[-1].fragments)).extent
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)[0]
        file.seek(extent.offset)
        file.write(bytes([byte ^ 1]))
    report = zckpt("verify", source, "--against", copy, "--json").document
    assert [line["tensor"] for line in report["differences"]] == [tensors[-1].name]


def test_both_containers_have_the_same_states() -> None:
    a, b = (zckpt.read(DATA / name) for name in ("adamw8bit.pt", "adamw8bit"))
    assert a.entries.keys() == b.entries.keys()
    inside = [name for name in map(name_of, a.entries) if name.endswith("/state")]
    assert len(inside) == 6  # codes, scale and qmap of two moments
    for name in inside:
        assert same_bits(load(a.root, name), load(b.root, name))


def test_a_difference_inside_is_seen(tmp_path: Path, zckpt: Program) -> None:
    codes = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    for name, values in (("a.pt", codes), ("b.pt", codes + 1)):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": Quantized(values)}}
        optimizer = {"state": state, "param_groups": [{"params": [0], "lr": 0.1}]}
        torch.save({"model": {"w": torch.ones(2, 3)}, "optim": optimizer}, tmp_path / name)
    assert zckpt("verify", tmp_path / "a.pt").code == 0
    differing = zckpt("verify", tmp_path / "a.pt", "--against", tmp_path / "b.pt")
    assert differing.code == 3
    assert "codes/state" in differing.out
