"""What the log of a training says about `auto_resume`."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import zckpt
from zckpt.core.passes import pace
from zckpt.resume import auto

from ..conftest import ROOT
from .conftest import BESIDE, TAGS, cut

PART = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"zckpt"}
    return [f"{record.levelname} {record.message}" for record in caplog.records]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zckpt")


def test_as_it_is(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    zckpt.auto_resume(run, dp=4)
    assert said(caplog) == [f"INFO resuming from {run}/{TAGS[2]}, step 7, saved by 4 ranks"]


def test_written_and_found_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = zckpt.auto_resume(run, dp=2)
    assert path is not None
    pattern = rf"INFO resuming from {run}/{TAGS[2]}, step 7, saved by 4 ranks, written for dp 2 in "
    assert re.fullmatch(rf"{pattern}\d+\.\d s: {path}", said(caplog)[-1])
    assert BESIDE in path
    assert path.report["seconds"] > 0
    caplog.clear()
    again = zckpt.auto_resume(run, dp=2)
    assert again == path
    assert again.report["seconds"] == 0
    assert said(caplog)[-1].endswith(f"which an earlier start has written for dp 2: {path}")


def test_one_that_is_set_aside(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut(run / TAGS[2] / PART)
    with pytest.warns(UserWarning, match=f"{TAGS[2]} is skipped"):  # Python's, as before
        zckpt.auto_resume(run, dp=4)
    *told, last = said(caplog)
    assert any(line.startswith(f"WARNING {run}/{TAGS[2]} is skipped: ") for line in told)
    assert re.fullmatch(
        rf"INFO resuming from {run}/{TAGS[1]}, .*; {TAGS[2]} set aside: .*{PART}.*", last
    )


def test_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert zckpt.auto_resume(tmp_path) is None
    assert said(caplog) == [f"INFO {tmp_path} has no checkpoint: a new run"]


def test_rank_0_alone(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"message": "what rank 0 has told"}
    monkeypatch.setattr(auto, "_outcome_of_all", lambda *_: (None, [line]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zckpt.auto_resume(run)
    assert said(caplog) == []
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="what rank 0 has told"):
        zckpt.auto_resume(run)
    assert said(caplog)[0] == "WARNING what rank 0 has told"


def test_a_long_one_shows_life(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FIRST", 0.0)
    zckpt.auto_resume(run, dp=4)
    assert said(caplog)[0].startswith(f"INFO auto-resume {run}, on ")


@pytest.mark.parametrize("asks", [False, True])
def test_a_program_that_asks_for_no_log_sees_none(run: Path, asks: bool) -> None:
    """The lines of docs/auto-resume.md make it seen."""
    log = "import logging; logging.basicConfig(); logging.getLogger('zckpt').setLevel('INFO')"
    program = f"import zckpt; zckpt.auto_resume({str(run)!r}, dp=4)"
    ended = subprocess.run(
        [sys.executable, "-c", f"{log}\n{program}" if asks else program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert (f"INFO:zckpt:resuming from {run}/{TAGS[2]}" in ended.stderr) is asks
    assert asks or ended.stderr == ""


@pytest.mark.parametrize("asks", [False, True])
def test_a_warning_is_seen_once(run: Path, asks: bool) -> None:
    """By the log if the program prints it, else as Python's warning."""
    cut(run / TAGS[2] / PART)
    log = "import logging; logging.basicConfig()\n" if asks else ""
    ended = subprocess.run(
        [sys.executable, "-c", f"{log}import zckpt; zckpt.auto_resume({str(run)!r}, dp=4)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert ended.stderr.count(f"{run}/{TAGS[2]} is skipped") == 1
    assert ("WARNING:zckpt:" in ended.stderr, "UserWarning" in ended.stderr) == (asks, not asks)
