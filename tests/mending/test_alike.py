"""A lost file that all other ranks have is written, byte for byte, and no other one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED
from zckpt.errors import IncompleteCheckpoint

from ..conftest import ROOT, Result
from ..engines.cases import Case
from .damaging import contents, flip
from .test_losses import MODEL, OPTIMIZER, remove, told

CASE = Case("z3_dp3_plain", "mending", 3, 3, model="plain")
TAG = "global_step3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks at stage 3, without frozen weights."""
    from ..engines import deepspeed

    return deepspeed.train(CASE, tmp_path_factory.mktemp("alike"), losses=3)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("left", [None, 1000])
def test_it_is_written(
    rank: int, left: int | None, run: Path, trained: Path, tmp_path: Path
) -> None:
    path = run / TAG / MODEL.replace("rank_1", f"rank_{rank}")
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    before = contents(run)
    report = package.mend(run, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(trained)
    assert contents(run) == before
    (line,) = report["lost"]
    assert (line["state"], line["file"]) == ("restored", str(path))
    assert report["problems"] == []
    assert "zckpt-" not in json.dumps(report).replace(MENDED, "")
    assert report["warnings"] == []
    (own,) = json.loads((tmp_path / "mended" / TAG / MENDED).read_text())["mended"]
    assert own["file"] == f"{TAG}/{path.name}"
    assert (own["by"], own["bytes"]) == ("witness", (trained / TAG / path.name).stat().st_size)
    assert own["witness"] == "the same file of all 2 other ranks"
    (said,) = package.verify(tmp_path / "mended")["warnings"]
    assert (said["code"], said["subject"]) == ("mended", own["file"])


def test_the_engine_goes_on(run: Path, trained: Path, tmp_path: Path) -> None:
    """It has the state and the losses that it had with the original."""
    from ..engines import deepspeed

    remove(run, MODEL)
    package.mend(run, tmp_path / "mended")
    ours = deepspeed.resume(CASE, tmp_path / "mended", tmp_path / "ours", losses=3)
    theirs = deepspeed.resume(CASE, trained, tmp_path / "theirs", losses=3)
    assert ours["losses"] == theirs["losses"]
    oracle = torch.load(trained.parent / "oracle.pt", weights_only=False)
    assert ours["losses"] == oracle["losses"]


def test_before_it_is_written(run: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    remove(run, MODEL)
    shown = zckpt("mend", run, tmp_path / "mended", "--dry-run")
    assert (shown.code, shown.err) == (3, "")
    assert shown.out.startswith(
        "can be restored exactly:\n  global_step3/zero_pp_rank_1_mp_rank_00"
    )
    assert "the same file of all 2 other ranks has the same bytes [mended]" in shown.out
    assert "cannot be restored" not in shown.out
    assert not (tmp_path / "mended").exists()
    ended = zckpt("mend", run, tmp_path / "mended")
    assert (ended.code, ended.err) == (0, "")
    assert shown.out in ended.out
    document = zckpt("mend", run, tmp_path / "again", "--json").document
    assert document["written"]
    resumed = zckpt("mend", run, tmp_path / "again", "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    assert "is complete already" in resumed.out


def test_beside_a_flipped_bit(run: Path, trained: Path, tmp_path: Path) -> None:
    remove(run, MODEL)
    flip(run / TAG / f"bf16_{OPTIMIZER}", 4200, 3)
    report = package.mend(run, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(trained)
    assert [place["state"] for place in report["places"]] == ["restored"]
    assert str(run) in report["places"][0]["file"]
    listed = json.loads((tmp_path / "mended" / TAG / MENDED).read_text())["mended"]
    assert len(listed) == 2


def test_another_rank_differs(run: Path, tmp_path: Path) -> None:
    """Then the file is a rank's own, and nothing says what this rank's had."""
    path = run / TAG / MODEL.replace("rank_1", "rank_2")
    state = torch.load(path, weights_only=False)
    torch.save({**state, "seen": 3}, path)
    remove(run, MODEL)
    with pytest.raises(IncompleteCheckpoint):
        package.mend(run, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_an_optimizer_file_is_lost_too(run: Path, tmp_path: Path) -> None:
    """What can be restored is said, and nothing is written."""
    remove(run, MODEL, f"bf16_{OPTIMIZER}")
    report = package.mend(run, tmp_path / "mended", dry_run=True)
    assert {line["state"] for line in report["lost"]} == {"restored", "elsewhere", "gone"}
    assert set(told(report).values()) == {"gone"}
    with pytest.raises(IncompleteCheckpoint):
        package.mend(run, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


@pytest.mark.parametrize(
    "source",
    [
        "tests/data/zckpt-0.1-z3_dp3",  # parts of frozen weights
        "tests/data/deepspeed-0.11.0-z3_dp2_sub_groups/run",  # one other rank, which shows nothing
    ],
)
def test_of_which_others_say_nothing(source: str, tmp_path: Path) -> None:
    run = shutil.copytree(ROOT / source, tmp_path / "run")
    remove(run, MODEL)
    with pytest.raises(IncompleteCheckpoint):
        package.mend(run, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_links(run: Path, trained: Path, tmp_path: Path) -> None:
    """The copy is made from links: others would be followed that nobody has asked for."""
    remove(run, MODEL)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", run / TAG / "notes.txt")
    with pytest.raises(IncompleteCheckpoint):
        package.mend(run, tmp_path / "mended")
    package.mend(run, tmp_path / "mended", follow_links=True)
    copied = contents(tmp_path / "mended")
    assert copied.pop(f"{TAG}/notes.txt") == b"secret"
    assert copied == contents(trained)
