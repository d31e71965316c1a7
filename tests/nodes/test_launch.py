"""Which process is this? The variables of every launcher, alone and inside of each other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from zckpt.cli import launched as launched_command
from zckpt.errors import WrongOption
from zckpt.nodes.launch import Launch, launched, restarts

from ..conftest import ROOT

CASES: dict[str, tuple[dict[str, str], Launch | None]] = {
    "nothing": ({}, None),
    "a lone rank": ({"RANK": "3"}, None),
    "a world of one": ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "4"}, Launch(1, 4, "torchrun")),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),
    "a step of one task": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        None,
    ),
    "srun": (
        {
            "SLURM_PROCID": "2",
            "SLURM_STEP_NUM_TASKS": "8",
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
        },
        Launch(2, 8, "srun", "7-0"),
    ),
    "mpirun": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "PMIX_NAMESPACE": "prterun-a-5@1",
        },
        Launch(1, 2, "mpirun", "prterun-a-5-1"),
    ),
    "mpirun in a job, whose daemons srun has started": (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
        },
        Launch(5, 8, "mpirun"),
    ),
    "torchrun in a step": (
        {"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        Launch(5, 8, "torchrun"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_variables(case: str) -> None:
    environment, expected = CASES[case]
    assert launched(environment) == expected


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("0", 0), ("x", 0), (None, 0)])
def test_restarts(text: str | None, count: int) -> None:
    assert restarts({} if text is None else {"TORCHELASTIC_RESTART_COUNT": text}) == count


@pytest.mark.parametrize("numbers", [("4", "4"), ("-1", "4"), ("x", "4"), ("0", "0")])
def test_numbers_that_do_not_fit(numbers: tuple[str, str]) -> None:
    with pytest.raises(WrongOption, match="RANK is"):
        launched(dict(zip(("RANK", "WORLD_SIZE"), numbers, strict=True)))


def test_only_processes_of_a_launch_continue_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that a restarted training starts by itself is another run."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for single in (False, True):
        words = {"single": single, "part": None, "resume": False}
        report = launched_command.write(lambda *_, **given: given, "source", "target", **words)
        assert report == {"resume": False}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_has_not_joined_ends_without_a_word(number: signal.Signals) -> None:
    """If rank 0 fails at once, its launcher ends the others while they begin."""
    with socket.create_server(("localhost", 0)) as silent:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "convert", "source", "target"],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(silent.getsockname()[1]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(number)
            out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (-number, b"")


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
from zckpt.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "rank", "expected"),
    [
        (["convert", "a", "b"], "1", True),
        (["convert", "a", "b"], "0", False),
        (["convert", "a", "b", "--single"], "1", False),
        (["convert", "a", "b", "--part=1/2"], "1", False),
        (["convert", "a", "b"], "x", False),
        (["verify", "a", "--against", "b", "--gather"], "1", False),
        (["inspect", "a"], "1", False),
        ([], "1", False),
    ],
)
def test_who_joins_later(
    words: list[str], rank: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_command.joins_later(words) is expected
