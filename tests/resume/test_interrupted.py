"""Of an interrupted save: which files are complete, and what of an older checkpoint fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import Result

LOST = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
CUT = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"


@pytest.fixture
def run(example: Path) -> Path:
    """A run whose last save was killed: a file is missing, another one cut, `latest` not moved."""
    newer = Path(shutil.copytree(example / "global_step7", example / "global_step9"))
    (newer / LOST).unlink()
    (newer / CUT).write_bytes((newer / CUT).read_bytes()[:3000])
    return example


@pytest.mark.parametrize("words", [("list",), ("mend", "DST", "--dry-run")])
def test_a_run(
    words: tuple[str, ...], run: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    command, *rest = (str(tmp_path / "mended") if word == "DST" else word for word in words)
    shown = zckpt(command, run, *rest)
    assert (
        f"global_step9: 3 of 5 files are complete; missing: {LOST}; unreadable: {CUT}\n"
        f"  {run / 'global_step7'} is the newest complete one: 23 of 23 tensors have the same "
        "name, type and shape there, including the frozen weights embedding.weight"
    ).replace("embedding.weight", "") in shown.out.replace("embedding.weight", "")
    assert "there, including the frozen weights " in shown.out
    report = zckpt(command, run, *rest, "--json").document["interrupted"]
    assert report["name"] == "global_step9"
    assert report["older"] == str(run / "global_step7")
    states = {each["file"]: each["state"] for each in report["files"]}
    assert (states.pop(LOST), states.pop(CUT)) == ("missing", "unreadable")
    assert set(states.values()) == {"ok"}
    assert (report["tensors"], report["alike"]) == (23, 23)


def test_a_tag(run: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    shown = zckpt("mend", run, tmp_path / "mended", "--tag", "global_step9", "--dry-run")
    assert shown.code == 3
    assert "global_step9: 3 of 5 files are complete" in shown.out
    whole = zckpt("mend", run, tmp_path / "mended", "--tag", "global_step7", "--dry-run")
    assert "are complete" not in whole.out


def test_another_model(run: Path, zckpt: Callable[..., Result]) -> None:
    """What has other shapes does not fit."""
    other = Path(__file__).parents[1] / "data/deepspeed-0.9.3-z2_dp3_fused_adam/run"
    (tag,) = other.glob("global_step*")
    shutil.rmtree(run / "global_step7")
    shutil.copytree(tag, run / tag.name)
    (run / "latest").write_text(tag.name)
    report = zckpt("list", run, "--json").document["interrupted"]
    assert report["older"] == str(run / tag.name)
    assert report["alike"] < report["tensors"]


def test_a_whole_run(example: Path, zckpt: Callable[..., Result]) -> None:
    assert zckpt("list", example, "--json").document["interrupted"] is None
    assert "are complete" not in zckpt("list", example).out


def test_nothing_else_is_whole(run: Path, zckpt: Callable[..., Result]) -> None:
    shutil.rmtree(run / "global_step7")
    (run / "latest").write_text("global_step9")
    shown = zckpt("list", run)
    assert "no other checkpoint of the run is complete" in shown.out
