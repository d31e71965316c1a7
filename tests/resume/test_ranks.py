"""All ranks of a launch get the same path, or raise the same error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import WrongOption

from ..conftest import ROOT
from ..processes.conftest import free_port
from ..test_resume import files
from .conftest import BESIDE, DAMAGE, TAGS, original

PROGRAM = Path(__file__).parent / "program.py"
LIMIT = 120.0


def ranks(size: int, when: str, run: Path, verify: str = "records", **more: object) -> list[Any]:
    """What each rank of the program got."""
    place = {} if when == "file" else {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    started = []
    for rank in range(size):
        own = {"RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": 1, **place, **more}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            **{key: str(value) for key, value in own.items()},
        }
        command = [sys.executable, str(PROGRAM), when, str(run), verify]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
    found = []
    for process in started:
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    return found


@pytest.mark.engines
@pytest.mark.parametrize("when", ["after", "file", pytest.param("before", marks=pytest.mark.first)])
def test_all_ranks_get_one_path(when: str, run: Path, tmp_path: Path) -> None:
    """Before the program's own group, which meets at the same address then, and after it."""
    before = original(run)
    target = run / BESIDE / f"{TAGS[-1]}-dp3"
    assert ranks(3, when, run) == [[str(target), 7, TAGS[-1]]] * 3
    zckpt.reshard(run, tmp_path / "by-hand", dp=3)
    assert files(target) == files(tmp_path / "by-hand")
    assert original(run) == before


@pytest.mark.engines
def test_the_same_size(run: Path) -> None:
    assert ranks(4, "after", run) == [[str(run), 7, TAGS[-1]]] * 4
    assert not (run / BESIDE).exists()


@pytest.mark.engines
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_newest_one(damage: str, run: Path) -> None:
    DAMAGE[damage](run / TAGS[-1])
    target = run / BESIDE / f"{TAGS[1]}-dp2"
    assert ranks(2, "before", run) == [[str(target), 7, TAGS[1]]] * 2


@pytest.mark.engines
def test_no_checkpoint(tmp_path: Path) -> None:
    assert ranks(2, "before", tmp_path) == [None, None]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("when", "what", "fails"),
    [("before", "verify", 1), ("after", "verify", 2), ("after", "reshard", 1)],
)
def test_a_failure_of_one_rank(when: str, what: str, fails: int, run: Path) -> None:
    """While all read, and while all write; the next start goes on."""
    found = ranks(3, when, run, FAILS=fails, WHAT=what)
    assert found == [["ProcessFailed", f"rank {fails}: a.pt: Input/output error"]] * 3
    assert ranks(3, "before", run)[0][0] == str(run / BESIDE / f"{TAGS[-1]}-dp3")


@pytest.mark.engines
def test_what_rank_0_finds(run: Path) -> None:
    for tag in TAGS:
        DAMAGE["lost"](run / tag)
    first, second = ranks(2, "after", run)
    assert first == second
    assert first[0] == "IncompleteCheckpoint"
    assert "none is complete" in first[1]


def test_variables_without_an_address(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert zckpt.auto_resume(run, dp=4) == str(run)  # many clusters set RANK in every shell
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(WrongOption, match="rank 1 of 4, and MASTER_ADDR and MASTER_PORT do not"):
        zckpt.auto_resume(run)
    assert zckpt.auto_resume(run, single=True, dp=4) == str(run)


@pytest.mark.engines
def test_torchrun_starts_all_again(run: Path, tmp_path: Path) -> None:
    """A rank is killed while all write: `--max-restarts` starts all, and they go on."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["--master-port", str(free_port()), "--max-restarts", "1", str(program), str(run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as started:  # type: ignore[call-overload]
        try:
            out, err = started.communicate(timeout=LIMIT)
        finally:  # with the ranks, however it ends
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, err
    target = run / BESIDE / f"{TAGS[-1]}-dp3"
    assert out.split() == [str(target)] * 3
    assert (run / BESIDE / "killed").exists()
    zckpt.reshard(run, tmp_path / "by-hand", dp=3)
    assert files(target) == files(tmp_path / "by-hand")


KILLED = """
import os, signal, sys, time
from pathlib import Path
import zckpt
from zckpt import api
from zckpt.copying import filling

folder = Path(sys.argv[1], ".zckpt")
mark = folder / "killed"
opened, reshard = filling.TargetFile.open, api.reshard

def until(is_there):
    while not is_there():
        time.sleep(0.01)

def open(self, *rest):
    until(mark.exists)
    opened(self, *rest)

def dying(*words, **more):
    if not more.get("dry_run") and not mark.exists():
        until(lambda: [*folder.glob("*.partial/journal")])
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return reshard(*words, **more)

filling.TargetFile.open = open
if os.environ["RANK"] == "1":
    api.reshard = dying
path = zckpt.auto_resume(sys.argv[1])
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
sys.stdout.write(f"{path}\\n")  # at once: three ranks share one pipe
sys.stdout.flush()
dist.destroy_process_group()
"""
