"""Parameters that the optimizer of another engine lists and never updated: frozen, or unused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import read
from zckpt.errors import MissingData, WrongOption

from ...conftest import Result
from ...engines import deepspeed
from ...engines.cases import Case

Zckpt = Callable[..., Result]


def trained(file: Path, apart: bool = False) -> Path:
    """A program whose AdamW lists frozen parameters too, in a group of their own or with others."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 9))
    model[0].requires_grad_(False)
    groups = [{"params": [*model[0].parameters()], "lr": 0.5}, {"params": [*model[1].parameters()]}]
    optimizer = torch.optim.AdamW(groups if apart else model.parameters(), lr=0.05)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_told_what_is_frozen(stage: int, apart: bool, tmp_path: Path, zckpt: Zckpt) -> None:
    source, to = trained(tmp_path / "run.pt", apart), ("--to", "deepspeed", "--stage", stage)
    ended = zckpt("convert", source, tmp_path / "new", *to, "--dp", 2)
    assert ended.code == 1
    assert "0.weight, 0.bias" in ended.err
    hint = "--frozen 0.weight --frozen 0.bias"
    assert hint in ended.err
    done = zckpt("convert", source, tmp_path / "new", *to, "--dp", 2, *hint.split())
    assert done.code == 0
    assert ("without that group" in done.err) == apart
    proof = zckpt("verify", tmp_path / "new", "--against", source)
    assert proof.code == 0, proof.out


def test_what_was_trained_is_not_frozen(tmp_path: Path) -> None:
    source = trained(tmp_path / "run.pt")
    for pattern, said in (("1.*", "which was trained"), ("2.*", "names no parameter")):
        with pytest.raises(WrongOption, match=said):
            zckpt.convert(source, tmp_path / "new", to="deepspeed", stage=2, frozen=[pattern])


@pytest.mark.engines
@pytest.mark.parametrize("stage", [2, 3])
def test_the_engine_goes_on(stage: int, tmp_path: Path) -> None:
    case = Case(f"z{stage}_dp2_listed", "listed", stage, 2)
    source = deepspeed.train(case, tmp_path / "trained")
    own = deepspeed.resume(case, source, tmp_path / "own")
    zckpt.convert(source, tmp_path / "state", to="gathered")
    held: dict[str, Any] = torch.load(tmp_path / "state" / "optim.pt")
    parameters = zckpt.read(source).parameters.items()
    frozen = [name for name, parameter in parameters if not parameter.trainable]
    first = held["param_groups"][0]
    first["param_names"] += frozen
    last = max(number for group in held["param_groups"] for number in group["params"])
    first["params"] += [last + number for number, _ in enumerate(frozen, 1)]
    torch.save(held, tmp_path / "state" / "optim.pt")
    to: dict[str, Any] = {"to": "deepspeed", "dp": 2, "stage": stage}
    with pytest.raises(MissingData, match="never updated"):
        zckpt.convert(tmp_path / "state", tmp_path / "run", **to)
    zckpt.convert(tmp_path / "state", tmp_path / "run", frozen=["bottleneck.*"], **to)
    after = deepspeed.resume(case, tmp_path / "run", tmp_path / "resumed")
    assert after["losses"] == own["losses"]


def test_zero_3_is_told_what_is_a_buffer(tmp_path: Path, zckpt: Zckpt) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 9))
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.AdamW([(f"1.{name}", w) for name, w in model[1].named_parameters()])
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    source = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    words = ("convert", source, tmp_path / "new", "--to", "deepspeed", "--stage", 3, "--dp", 2)
    (tmp_path / "trained").write_text("1.weight\n1.bias\n")
    (tmp_path / "all").write_text("0.weight\n0.bias\n1.weight\n1.bias\n")
    old = zckpt(*words, "--param-names", tmp_path / "all")  # had two meanings
    assert old.code == 2
    assert "if the unlisted tensors are buffers, add --buffers scale" in old.err
    for pattern in ("other", "1.*"):
        refused = zckpt(*words, "--buffers", pattern)
        assert refused.code == 2
        assert "these may be: scale, 0.weight, 0.bias" in refused.err
    asked = zckpt(*words, "--param-names", tmp_path / "trained", "--dry-run")
    assert (
        "scale, 0.weight, 0.bias: assumed to be frozen parameters; if any is a buffer" in asked.err
    )
    done = zckpt(*words, "--param-names", tmp_path / "trained", "--buffers", "sc*")
    assert done.code == 0
    assert "scale" not in done.err
    manifest = read(tmp_path / "new")
    assert manifest.buffers == ("scale",)
    assert list(manifest.parameters) == ["1.weight", "1.bias", "0.weight", "0.bias"]
