"""Processes that a launcher would have started: forks with the variables that it sets."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed  # noqa: F401  (children need not import it again)

from zckpt import cli
from zckpt.copying import filling
from zckpt.core.passes.pieces import ElementReader
from zckpt.processes.launcher import LAUNCHERS

from ..conftest import Result, fork
from ..test_resume import MIB
from ..test_resume import sources as sources
from ..test_resume import whole as whole

LIMIT = 60.0  # seconds


@dataclass
class Process:
    """A command in a fork of this process, with its output in files."""

    number: int
    output: Path
    code: int | None = None

    def send(self, what: signal.Signals) -> None:
        os.kill(self.number, what)

    def has_ended(self) -> bool:
        if self.code is None:
            number, status = os.waitpid(self.number, os.WNOHANG)
            if number:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, limit: float = LIMIT) -> Result:
        """What the command printed; kills it if it takes too long."""
        end = time.monotonic() + limit
        while not self.has_ended():
            if time.monotonic() > end:
                os.kill(self.number, signal.SIGKILL)
                raise AssertionError(f"no end in {limit} s: {self.printed()}")
            time.sleep(0.01)
        assert self.code is not None
        return Result(self.code, *self.printed())

    def printed(self) -> tuple[str, str]:
        return self.output.read_text(), self.output.with_suffix(".err").read_text()


Start = Callable[..., Process]
Prepare = Callable[[], None]


def until(is_there: Callable[[], object], limit: float = 30.0) -> None:
    """Waits, and fails after `limit` seconds."""
    end = time.monotonic() + limit
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.01)


def slow_reads(seconds: float, go: Path | None = None) -> None:
    """Every read of this process takes a while; the first one leaves the file `go`."""
    read = ElementReader.read

    def slow(self: ElementReader, *rest: Any) -> Any:
        if go:
            go.touch()
        time.sleep(seconds)
        return read(self, *rest)

    ElementReader.read = slow  # type: ignore[method-assign]


def fail_after(go: Path) -> None:
    """This process reads nothing any more once there is a file `go`."""
    read = ElementReader.read

    def failing(self: ElementReader, *rest: Any) -> Any:
        if go.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), "a.pt")
        return read(self, *rest)

    ElementReader.read = failing  # type: ignore[method-assign]


def stop_at_second_portion(go: Path) -> None:
    """This process writes one portion, and waits for the file `go` before it writes another one.

    So a test can interfere, however fast or slow the machine is.
    """
    opened = filling.TargetFile.open
    portions = count()

    def wait(self: filling.TargetFile, *rest: Any) -> None:
        if next(portions):
            until(go.exists)
        opened(self, *rest)

    filling.TargetFile.open = wait  # type: ignore[method-assign]


def run_as_command(words: list[str], output: Path, prepare: Prepare | None) -> NoReturn:
    code = 99
    try:
        for number, path in ((1, output), (2, output.with_suffix(".err"))):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = ["zckpt", *words]
        if prepare:
            prepare()
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a child, with more variables; `prepare` is called there first."""
    started: list[Process] = []

    def begin(
        *words: object, environment: Mapping[str, object], prepare: Prepare | None = None
    ) -> Process:
        folder = tmp_path / "output"
        folder.mkdir(exist_ok=True)
        output = folder / str(len(started))
        for path in (output, output.with_suffix(".err")):
            path.touch()
        child = fork()
        if not child:
            os.environ.update({key: str(value) for key, value in environment.items()})
            run_as_command([str(word) for word in words], output, prepare)
        started.append(Process(child, output))
        return started[-1]

    yield begin
    for process in started:
        if not process.has_ended():
            process.send(signal.SIGKILL)
            process.wait()


@pytest.fixture
def launch(start: Start) -> Callable[..., list[Process]]:
    """Starts all processes of a launch; `preparing` are functions by rank.

    They can meet, unless MASTER_PORT is empty.
    """

    def begin(
        size: int,
        *words: object,
        launcher: str = "torchrun",
        ranks: range | None = None,
        preparing: Mapping[int, Prepare] | None = None,
        **more: object,
    ) -> list[Process]:
        rank_name, size_name = LAUNCHERS[launcher]
        more = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), **more}
        return [
            start(
                *words,
                environment={rank_name: rank, size_name: size, **more},
                prepare=(preparing or {}).get(rank),
            )
            for rank in ranks or range(size)
        ]

    return begin


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of 1 MiB: the small checkpoints of tests have dozens."""
    monkeypatch.setattr(filling, "REGION", MIB)
    ranks = (name for names in LAUNCHERS.values() for name in names)
    for name in (*ranks, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
