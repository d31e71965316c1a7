"""Two checkpoints: changes by layer, the places where they differ, and what was compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import zckpt

from ..faults import change
from .conftest import Document, faults_of

Make = Callable[..., Document]


@pytest.fixture
def other(example: Path, tmp_path: Path) -> Path:
    """Another checkpoint, in which a fifth of one layer's masters has moved."""
    path = Path(shutil.copytree(example, tmp_path / "other"))
    generator = np.random.default_rng(3)

    def moved(data: bytes) -> bytes:
        values = np.frombuffer(data, "f4").copy()
        values[::5] += generator.normal(0, 0.01, len(values[::5])).astype("f4")
        return values.tobytes()

    change(path, "fc1.weight/master", moved)
    return path


def test_changes_by_layer(example: Path, other: Path, document: Make) -> None:
    made = document(example, against=other)["against"]
    a, b = (
        torch.cat(
            [
                zckpt.load(path, f"fc1.{kind}/master", accept_weights=True).double().flatten()
                for kind in names
            ]
        )
        for path, names in ((example, ("weight", "bias")), (other, ("weight", "bias")))
    )
    weight = zckpt.load(example, "fc1.weight/master").double()
    change_of = (a - b).abs()
    rows = {row["layer"]: row for row in made["layers"]}
    row = rows["fc1"]
    assert row["rms"] == pytest.approx(float(change_of.square().mean().sqrt()))
    assert row["largest"] == pytest.approx(float(change_of.max()))
    assert row["relative"] == pytest.approx(float(change_of.norm() / weight.norm()))
    assert (row["elements"], row["changed"]) == (len(a), int((change_of > 0).sum()))
    assert all(row["changed"] == 0 == row["rms"] for name, row in rows.items() if name != "fc1")
    powers = torch.floor(torch.log2(change_of[change_of > 0])).int().tolist()
    histogram = made["histogram"]
    assert histogram["first"] == min(powers)
    assert histogram["counts"] == [
        powers.count(power) for power in range(min(powers), max(powers) + 1)
    ]
    first = int(torch.nonzero(a - b)[0])
    assert made["first"]["element"] == first
    assert made["first"]["a"] == pytest.approx(float(a[first]))
    assert made["worst"]["largest"] == row["largest"]


def test_what_was_compared(example: Path, other: Path, document: Make) -> None:
    made = document(example, against=other)["against"]
    proof = {line["what"]: line["result"] for line in made["proof"]}
    assert proof["5 tensors of exp_avg"] == "equal"
    assert proof["5 tensors of master"] == "1 tensor differs"
    assert proof["steps"] == "equal"
    assert (made["path"], made["step"]) == (str(other), 7)


def test_another_that_cannot_be_read(example: Path, tmp_path: Path, document: Make) -> None:
    made = document(example, against=tmp_path / "nothing")
    (line,) = faults_of(made, "unreadable")
    assert "nothing" in line["message"]
    assert made["numbers"]["measures"]
    assert "against" not in made
