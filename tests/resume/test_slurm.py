"""A job of Slurm is requeued, gets fewer tasks, and its training goes on.

`pytest -m slurm`, by hand: it needs Debian's packages slurm-wlm, slurmctld and slurmd, and root.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..conftest import ROOT
from ..engines import resumed
from ..engines.resumed import KILLED_AT, Program
from .conftest import BESIDE

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
JOB = """#!/bin/sh
#SBATCH --requeue --ntasks=4 --output={folder}/printed --open-mode=append
export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT={port}
cd {root}
TASKS=$([ "$SLURM_RESTART_COUNT" ] && echo 3 || echo 4)
srun --ntasks=$TASKS --kill-on-bad-exit=1 sh -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec {python} -m tests.engines.slurm_rank 2 {run} {log} {port}'
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def said(*command: str, check: bool = True) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.5)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of this machine, with eight processors."""
    folder = tmp_path / "slurm"
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = {"controller": free_port(), "node": free_port()}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    daemons = [subprocess.Popen([name, "-D"]) for name in ("slurmctld", "slurmd")]
    try:
        until(lambda: "idle" in said("sinfo", "-h", check=False))
        yield
    finally:
        said("scancel", "--user=root", check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def test_a_requeued_job_goes_on_with_fewer_tasks(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = resumed.start(Program("zero-2", "zero", 2), tmp_path / "whole" / "run", 4)
    run, log = tmp_path / "run", tmp_path / "losses"
    script = tmp_path / "job.sh"
    words = {"folder": tmp_path, "run": run, "log": log, "port": free_port()}
    script.write_text(JOB.format(root=ROOT, python=sys.executable, **words))
    job = said("sbatch", "--parsable", str(script)).strip()

    def state() -> str:
        return said("squeue", "-h", "--states=all", "-j", job, "-o", "%T").strip()

    until(lambda: state() == "FAILED")
    assert resumed.logged(log).losses.keys() == {*range(KILLED_AT + 1)}
    log.unlink()
    said("scontrol", "requeue", job)
    until(lambda: state() in ("COMPLETED", "FAILED"))  # Slurm lets a requeued job wait a minute
    again = resumed.logged(log)
    assert state() == "COMPLETED", (tmp_path / "printed").read_text()[-3000:]
    assert again.report["sizes"]["dp"] == 3
    expected = {step: loss for step, loss in whole.losses.items() if step >= 4}
    assert again.losses == pytest.approx(expected, rel=1e-5)
    assert (run / BESIDE).is_dir()
