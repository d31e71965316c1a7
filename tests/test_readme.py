"""Every command and every line of Python in the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zckpt.cli import cli

from .conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, one after the other."""
    made = tmp_path_factory.mktemp("readme")
    for name in ("examples", "tests"):
        (made / name).symlink_to(ROOT / name)
    return made


def test_commands_run_as_printed(folder: Path) -> None:
    commands = [line for block in blocks("console") for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "zckpt"
        arguments = [sys.executable, "-m", "zckpt", *words[1:]]
        ended = subprocess.run(
            arguments, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        assert (ended.returncode, ended.stderr) == (0, ""), command
        assert ended.stdout, command


def test_python_runs_as_printed(folder: Path) -> None:
    for block in blocks("python"):
        subprocess.run(
            [sys.executable, "-c", block], cwd=folder, check=True, env={"PYTHONPATH": str(ROOT)}
        )


def test_set_up_commands_install_what_they_need() -> None:
    main, tests = blocks("sh")
    assert main.startswith("python3 -m venv")
    assert "zckpt convert examples/run" in main
    assert tests.rstrip().endswith(".venv/bin/pytest")


def test_every_command_and_option_is_mentioned() -> None:
    for name, command in cli.commands.items():
        assert f"zckpt {name}" in TEXT, name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                options = [*parameter.opts, *parameter.secondary_opts]
                assert any(option in TEXT for option in options), (name, options)
