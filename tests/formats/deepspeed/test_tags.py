"""Tags of a run: with folders in them, and with a lost `latest`."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.errors import NotACheckpoint, ZckptError

from ...conftest import EXAMPLE, Result
from ...engines import deepspeed
from ...engines.cases import CASES, Case
from .test_reshard import assert_same_state

TAG, NEWEST = "epoch_1/step_3", "epoch_2/step_6"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tags with folders in them, as `save_checkpoint(run, tag="epoch_1/step_3")` makes them."""
    for tag in (TAG, NEWEST):
        shutil.copytree(EXAMPLE / "global_step7", tmp_path / "run" / tag)
    (tmp_path / "run" / "latest").write_text(NEWEST)
    return tmp_path / "run"


@pytest.mark.engines
@pytest.mark.first
def test_the_engine_resumes_from_a_tag_with_a_folder(
    trained: Callable[[Case], Path], tmp_path: Path
) -> None:
    """DeepSpeed saves it, and loads what is resharded, by `latest` and by the tag."""
    named = {"name": "z2_dp2_nested_tag", "save": {"tag": TAG}}
    case = dataclasses.replace(CASES["z2_dp2_bf16"], **named)
    root = trained(case)
    before = torch.load(root / "oracle.pt", weights_only=False)
    assert (root / "run" / "latest").read_text() == TAG
    out = tmp_path / "out"
    zckpt.reshard(root / "run", out, dp=1)
    after = deepspeed.resume(case, out, tmp_path, dp=1, load={"tag": TAG})
    assert_same_state(before, after, weights=True)
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=1e-6)


def test_each_command_takes_them(run: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    assert f"tag                 {NEWEST}" in zckpt("inspect", run).out
    assert f"tag                 {TAG}" in zckpt("inspect", run, "--tag", TAG).out
    assert f"tag                 {TAG}" in zckpt("inspect", run / TAG).out  # as the run calls it
    rows = zckpt("list", run).out.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == [TAG, NEWEST]
    assert f"--dp 3 --tag {NEWEST}" in zckpt("check", run, "--dp", "3").out
    resumed = Path(zckpt("auto-resume", run, "--dp", "2").out.strip())
    assert resumed == run / ".zckpt" / "epoch_2-step_6-dp2"
    assert zckpt("list", run).out.count(TAG) == 1
    for number, (to, back) in enumerate(
        (("deepspeed", None), ("universal", "reshard"), ("deepspeed-universal", None))
    ):
        target = tmp_path / f"{number}"
        assert zckpt("convert", run, target, "--to", to).code == 0
        if back:
            assert zckpt("reshard", target, tmp_path / "back", "--dp", "2").code == 0
            target = tmp_path / "back"
        assert (target / NEWEST).is_dir()
        assert (target / f"latest{'_universal' if to == 'deepspeed-universal' else ''}").read_text()
        assert zckpt("verify", target, "--against", run).code == 0


@pytest.mark.parametrize("tag", ["../run", "/tmp", "epoch_1/../..", "epoch_1//step_3", "a/b/c/d/e"])
def test_a_tag_leads_out_of_no_run(tag: str, run: Path) -> None:
    with pytest.raises(NotACheckpoint, match="cannot be a folder's name"):
        zckpt.read(run, tag=tag)
    (run / "latest").write_text(tag)
    with pytest.raises(ZckptError):
        zckpt.read(run)


def test_a_lost_latest(example: Path, zckpt: Callable[..., Result]) -> None:
    """DeepSpeed would begin anew, and say so in its log alone."""
    (example / "latest").unlink()
    for command in ("inspect", "check", "verify"):
        said = zckpt(command, example)
        assert said.code == 0
        line = said.err.strip().rpartition("this writes the file: ")[2]
        assert line == f"printf global_step7 > {shlex.quote(str(example / 'latest'))}"
    subprocess.run(line, shell=True, check=True)
    assert zckpt("check", example).err == ""
    shutil.copytree(example / "global_step7", example / "global_step9")
    (example / "latest").unlink()
    line = zckpt("inspect", example).err.rpartition("write the pointer file: ")[2]
    subprocess.run(line, shell=True, check=True)
    assert "global_step9" in zckpt("inspect", example).out
