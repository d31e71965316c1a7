"""Which process is this? The variables of every launcher, alone and inside of each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

from zckpt import api
from zckpt.cli import launched as launched_command
from zckpt.errors import WrongOption
from zckpt.processes.launcher import LAUNCHERS, Launch, address, launched

CASES: dict[str, tuple[dict[str, str], Launch | None]] = {
    "nothing": ({}, None),
    "a lone rank": ({"RANK": "3"}, None),
    "a world of one": ({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1)),
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "4"}, Launch(1, 4)),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),
    "a step of one task": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        Launch(0, 1),
    ),
    "srun": ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}, Launch(2, 8)),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launch(1, 2)),
    "mpirun in a job, whose daemons srun has started": (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
        },
        Launch(5, 8),
    ),
    "torchrun in a step": (
        {"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        Launch(5, 8),
    ),
}


Setting = Callable[[Mapping[str, str]], None]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Sets variables of a launcher; all others are unset."""

    def these(variables: Mapping[str, str]) -> None:
        every = {name for names in LAUNCHERS.values() for name in names}
        for name in {*every, "MASTER_ADDR", "MASTER_PORT"}:
            monkeypatch.setenv(name, "")  # so that what a command sets goes with the test too
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return these


@pytest.mark.parametrize("case", CASES)
def test_variables(case: str, setting: Setting) -> None:
    environment, expected = CASES[case]
    setting(environment)
    assert launched() == expected


@pytest.mark.parametrize("numbers", [("4", "4"), ("-1", "4"), ("x", "4"), ("0", "0")])
def test_numbers_that_do_not_fit(numbers: tuple[str, str], setting: Setting) -> None:
    setting(dict(zip(("RANK", "WORLD_SIZE"), numbers, strict=True)))
    with pytest.raises(WrongOption, match="RANK is"):
        launched()


MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}


@pytest.mark.parametrize("case", ["srun", "mpirun", "torchrun"])
def test_gathering_processes_are_those_of_the_launch(
    case: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch knows them by torchrun's variables, whoever began them."""
    environment, launch = CASES[case]
    assert launch is not None

    def seen(*paths: object, **words: object) -> dict[str, object]:
        assert (paths, words) == (("path", None), {"gather": True})
        return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}

    monkeypatch.setattr(api, "verify", seen)
    setting({**environment, **MEETING})
    report = launched_command.verify("path", None, single=False, gather=True)
    assert report == {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.size)}
    setting({**environment, **MEETING})
    report = launched_command.verify("path", None, single=True, gather=True)
    assert report is not None
    assert report["WORLD_SIZE"] is None  # and this process gathers alone
    setting(environment)
    with pytest.raises(WrongOption, match="do not say where the processes meet") as refused:
        launched_command.verify("path", None, single=False, gather=True)
    assert "--single" in refused.value.hint


def test_only_processes_of_a_launch_continue_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that a restarted training starts by itself is another run."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for single in (False, True):
        words = {"single": single, "part": None, "resume": False}
        report = launched_command.write(lambda *_, **given: given, "source", "target", **words)
        assert report == {"resume": False}


@pytest.mark.parametrize("part", [None, "part"])
def test_a_launch_of_one_process_shares_nothing(
    part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    report = launched_command.write(
        lambda *_, **given: given, "source", "target", part=part, single=False
    )
    assert report == {"resume": False, **({"sharing": part} if part else {})}


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_no_address(missing: str, setting: Setting) -> None:
    both = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    setting(both)
    assert address() == ("node1", 29500)
    setting({**both, missing: ""})
    assert address() is None
    del both[missing]
    setting(both)
    assert address() is None


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "x"])
def test_impossible_ports(port: str, setting: Setting) -> None:
    setting({"MASTER_ADDR": "node1", "MASTER_PORT": port})
    with pytest.raises(WrongOption, match=r"MASTER_PORT is .*, which is not a port"):
        address()
