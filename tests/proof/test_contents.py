"""A copy equals its original, also if names in it are inferred."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..conftest import Result

Program = Callable[..., Result]
FORMS = {"a file": (), "dcp": ("--to", "dcp"), "universal": ("--to", "universal")}


def content() -> dict[str, Any]:
    """Shapes repeat, so that the order alone shows the names."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    torch.save(content(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def made(original: Path, form: str, zckpt: Program) -> tuple[Path, Path]:
    """A checkpoint of a form, and its copy under another name."""
    path = original
    if FORMS[form]:
        path = original.with_name("target")
        assert zckpt("convert", original, path, *FORMS[form]).code == 0
    copy = path.with_name("y.pt" if path.is_file() else "copy")
    (shutil.copy if path.is_file() else shutil.copytree)(path, copy)
    return path, copy


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_equal(form: str, original: Path, zckpt: Program) -> None:
    path, copy = made(original, form, zckpt)
    proof = original.with_name("proof.json")
    assert zckpt("verify", path, "--save-proof", proof).code == 0
    for against in (path, proof):
        said = zckpt("verify", copy, "--against", against)
        assert said.code == 0, said.out
        assert "proves nothing" not in said.out
        assert "not compared" not in said.out


@pytest.mark.parametrize("form", ["dcp", "universal"])
def test_what_rests_on_one_inference_proves_nothing(
    form: str, original: Path, zckpt: Program
) -> None:
    path, _ = made(original, form, zckpt)
    proof = original.with_name("proof.json")
    assert zckpt("verify", original, "--save-proof", proof).code == 0
    for against in (original, proof):
        said = zckpt("verify", path, "--against", against)
        assert said.code == 3
        assert "proves nothing" in said.out


def test_other_bytes_beside_equal_tensors(original: Path, zckpt: Program) -> None:
    other = original.with_name("other.pt")
    torch.save(content(), other, pickle_protocol=4)
    said = zckpt("verify", other, "--against", original)
    assert said.code == 3
    assert "proves nothing" in said.out


def test_the_name_of_a_file_is_not_how_it_was_saved(original: Path, zckpt: Program) -> None:
    saved = content()
    saved["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(saved, original.with_name("other.pt"))
    said = zckpt("verify", original.with_name("other.pt"), "--against", original)
    assert said.code == 3
    assert "lr" in said.out
    assert "differ in how they were saved" not in said.out
