"""Averages that ranks of FSDP2 have saved as plain slices, beside the model's DTensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of

from ...conftest import Once, texts
from ...engines import slices


@pytest.fixture(scope="module")
def fsdp2(once: Once) -> Path:
    return once("slices", "fsdp2", partial(slices.saved, "fsdp2", 4))


@pytest.mark.parametrize(
    ("name", "place", "front"),
    [
        ("ema", "client_state.ema.{}", ""),
        ("ema_wrapped", "client_state.ema.shadow.{}", "module."),
        ("ema_files", "client_state.ema.{}", ""),
    ],
)
def test_are_joined_as_the_models(name: str, place: str, front: str, fsdp2: Path) -> None:
    manifest = zckpt.read(fsdp2 / name)
    assert any(
        "joined like the model's DTensors" in line for line in texts(manifest.notices.warnings)
    )
    assert not any(line.startswith("ema") for line in texts(manifest.notices.omitted))
    for weight, whole in torch.load(fsdp2 / "averages.pt").items():
        keys = [
            key for key in map(name_of, manifest.entries) if key.endswith(f"{front}{weight}'/state")
        ]
        (key,) = keys or [f"{place.format(front + weight)}/state"]
        assert torch.equal(zckpt.load(fsdp2 / name, key), whole)


@pytest.mark.parametrize("name", ["ema_list", "ema_renamed"])
def test_others_are_left_out_as_a_whole(name: str, fsdp2: Path) -> None:
    manifest = zckpt.read(fsdp2 / name)
    assert sum(line.startswith("ema is left out") for line in texts(manifest.notices.warnings)) == 1
    assert not any("ema" in name for name, _ in manifest.entries)
    assert not any(line.startswith("ema") for line in texts(manifest.notices.omitted))
    assert "ema" not in (manifest.state.get("client_state") or {})


def test_whole_ones_stay(fsdp2: Path) -> None:
    manifest = zckpt.read(fsdp2 / "ema_whole")
    assert not any("ema" in line for line in texts(manifest.notices.warnings))
    assert len([name for name, _ in manifest.entries if "ema" in name]) == 5
