"""Whatever becomes of the output: the target is there, and the exit code says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import EXAMPLE, ROOT
from .faults import tree

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
CLOSED, BROKEN, FULL = ">&-", "| true", "> /dev/full"


def start(words: list[object], stdout: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose stdout is closed, a pipe that nobody reads, or a full disk."""
    command = [sys.executable, "-m", "zckpt", *map(str, words)]
    if stdout == CLOSED:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reading, writing = os.pipe()
    os.close(reading)
    target = os.open("/dev/full", os.O_WRONLY) if stdout == FULL else writing
    try:
        return subprocess.run(
            command, stdout=target, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60
        )
    finally:
        for file in {target, writing}:
            os.close(file)


@pytest.fixture
def good(smallest: Callable[[str], Path], tmp_path: Path) -> dict[str, bytes]:
    target = tmp_path / "good"
    command = [sys.executable, "-m", "zckpt", "convert", smallest("dcp"), target, "--quiet"]
    subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    return tree(target)


@pytest.mark.parametrize("stdout", [CLOSED, BROKEN])
@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_a_complete_target_is_exit_code_0(
    stdout: str,
    options: tuple[str, ...],
    good: dict[str, bytes],
    smallest: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    ended = start(["convert", smallest("dcp"), tmp_path / "target", *options], stdout)
    assert tree(tmp_path / "target") == good
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_disk_of_the_report_is_not_that_of_the_target(
    good: dict[str, bytes], smallest: Callable[[str], Path], tmp_path: Path
) -> None:
    ended = start(["convert", smallest("dcp"), tmp_path / "target"], FULL)
    assert tree(tmp_path / "target") == good
    assert "Traceback" not in ended.stderr
    assert "no target" not in ended.stderr
    assert "nothing was left" not in ended.stderr


@pytest.mark.parametrize("stdout", [CLOSED, BROKEN])
@pytest.mark.parametrize("command", ["inspect", "verify", "formats", "--help"])
def test_a_reader_that_goes_is_no_error(
    command: str, stdout: str, smallest: Callable[[str], Path]
) -> None:
    words = [command] if command in ("formats", "--help") else [command, smallest("dcp")]
    ended = start(words, stdout)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("stdout", [CLOSED, BROKEN])
def test_an_error_stays_an_error(stdout: str, tmp_path: Path) -> None:
    ended = start(["convert", tmp_path / "nothing", tmp_path / "target"], stdout)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("path", "code"), [(EXAMPLE, 0), (EXAMPLE / "nothing", 1)])
def test_a_file_of_a_library_that_has_a_closed_number(
    path: Path, code: int, number: int, tmp_path: Path
) -> None:
    """libffi 3.5 opens itself when Python imports ctypes, before a command begins."""
    (library := tmp_path / "library").write_bytes(b"as before")
    script = (
        f"import os, sys; assert os.open({str(library)!r}, os.O_RDWR) == {number}\n"
        "from zckpt.cli import main\n"
        f"sys.argv = ['zckpt', 'inspect', {str(path)!r}]\n"
        "try: main()\n"
        f"finally: os.path.samefile({number}, {str(library)!r}) or os._exit(99)"
    )
    command = ["sh", "-c", f'exec "$@" {number}>&-', "sh", sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (ended.returncode, library.read_bytes()) == (code, b"as before")
    assert bool(ended.stdout) is (number == 2 and not code)
    assert ended.stderr.startswith("Error: ") if number == 1 and code else not ended.stderr


@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_an_error_that_a_full_disk_does_not_take(options: tuple[str, ...], tmp_path: Path) -> None:
    ended = start(["inspect", tmp_path / "nothing", *options], FULL)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


def test_the_first_line_is_enough(smallest: Callable[[str], Path]) -> None:
    command = f"{sys.executable} -m zckpt inspect {smallest('dcp')} | head -1"
    ended = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert ended.stdout.startswith("checkpoint")
    assert ended.stderr == ""
