"""A damaged checkpoint in an object store is mended into the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import zckpt

from ..conftest import EXAMPLE
from ..remote.memory import Memory
from .damaging import flip

OPTIMIZER = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("place", [(9000, 3), (238, 1)], ids=["data", "pickle"])
def test_a_store(
    place: tuple[int, int], example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    flip(example / OPTIMIZER, *place)
    store = Memory.of(example, "run")
    report = zckpt.mend(zckpt.At(store, "run"), zckpt.At(store, "out/mended"))
    (line,) = report["places"]
    assert line["file"] == f"store://Memory/run/{OPTIMIZER}"
    assert report["target"] == "store://Memory/out/mended"
    assert report["sent"] == len(report["files"])
    for path in (each for each in EXAMPLE.rglob("*") if each.is_file()):
        assert store.objects[f"out/mended/{path.relative_to(EXAMPLE)}"] == path.read_bytes()
    assert "out/mended/global_step7/zckpt-mended.json" in store.objects
    assert store.objects[f"run/{OPTIMIZER}"] == (example / OPTIMIZER).read_bytes()


@pytest.mark.parametrize("lost", [OPTIMIZER, "global_step7/mp_rank_00_model_states.pt"])
def test_a_lost_file(
    lost: str, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run in a store, with an older checkpoint there."""
    (folder := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    shutil.copytree(example, tmp_path / "runs" / "older")
    run = shutil.move(example, tmp_path / "runs" / "run")
    (run / lost).unlink()
    store = Memory.of(tmp_path / "runs", "runs")
    every = ("masters", "moments=older", "model")
    report = zckpt.mend(
        zckpt.At(store, "runs/run"),
        zckpt.At(store, "mended"),
        older=zckpt.At(store, "runs/older"),
        rebuild=every,
    )
    assert {line["state"] for line in report["lost"]} == {"elsewhere", "rebuilt"}
    assert str(tmp_path) not in json.dumps(report)
    assert str(tmp_path).encode() not in store.objects["mended/global_step7/zckpt-mended.json"]
    for path in (each for each in EXAMPLE.rglob("*") if each.is_file()):
        name = str(path.relative_to(EXAMPLE))
        assert (store.objects[f"mended/{name}"] == path.read_bytes()) == (name != lost), name
