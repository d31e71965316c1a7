"""Real torchrun: its store, its restarts, its way to end processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zckpt

from ..conftest import EXAMPLE, ROOT
from ..test_resume import files
from .conftest import free_port, until
from .test_conversion import COPYING, ONE_THREAD, SMALL
from .test_failures import wait_for_journals

pytestmark = pytest.mark.engines
COMMAND = Path(__file__).parent / "command.py"
Torchrun = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    """Starts torchrun with so many processes on this machine, and with options of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        size: int, *words: object, own: tuple[object, ...] = (), **more: object
    ) -> subprocess.Popen[str]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TORCH_")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **{key: str(value) for key, value in more.items()},
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", size]
        command += ["--master-port", free_port(), *own, *words]
        with open(tmp_path / "printed", "w") as printed:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process numbers of the ranks that torchrun has started."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout
    ranks = {}
    for number in map(int, listed.split()):
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        for variable in variables:
            if variable.startswith(b"RANK="):
                ranks[int(variable[5:])] = number
    return ranks


def errors(tmp_path: Path) -> list[str]:
    return re.findall("^Error: .*", (tmp_path / "printed").read_text(), re.MULTILINE)


@pytest.mark.first
def test_two_processes(torchrun: Torchrun, tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "single")
    process = torchrun(2, "-m", "zckpt", "convert", EXAMPLE, tmp_path / "shared")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, (tmp_path / "printed").read_text()
    assert out.count("23 tensors") == 1
    assert files(tmp_path / "shared") == files(tmp_path / "single")


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_process_is_restarted(
    rank: int, torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """`--max-restarts 1`: torchrun ends the others and starts all again, and they go on."""
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    process = torchrun(4, COMMAND, *words, own=("--max-restarts", 1), GO=tmp_path / "go")
    wait_for_journals(tmp_path / "out.partial", 4)
    os.kill(workers(process)[rank], signal.SIGKILL)
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, (tmp_path / "printed").read_text()
    assert "an earlier run had written" in out
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_a_process_of_another_agent_is_restarted(
    torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """As on two nodes: only the agent of the killed process counts a restart."""
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    own = ("--nnodes", 2, *place, "--local-addr", "localhost", "--max-restarts", 2)
    agents = [torchrun(1, COMMAND, *words, own=own, GO=tmp_path / "go") for _ in range(2)]
    wait_for_journals(tmp_path / "out.partial", 2)
    (worker,) = workers(agents[1]).values()
    os.kill(worker, signal.SIGKILL)
    (tmp_path / "go").touch()
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], (tmp_path / "printed").read_text()
    assert "an earlier run had written" in "".join(said)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_a_stopped_process(torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path) -> None:
    """The others say that they wait for it. When it is killed, torchrun ends all."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    process = torchrun(3, COMMAND, *words, GO=tmp_path / "go")
    wait_for_journals(tmp_path / "out.partial", 3)
    stopped = workers(process)[2]
    os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: "rank 0 waits for rank 2; " in (tmp_path / "printed").read_text())
    os.kill(stopped, signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors(tmp_path) == ["Error: interrupted [interrupted]"]  # by torchrun
    assert "--resume" in (tmp_path / "printed").read_text()
    again = torchrun(2, COMMAND, *words, "--resume", GO=tmp_path / "go")
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, (tmp_path / "printed").read_text()
    assert "an earlier run had written" in out
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_a_process_that_fails_on_the_way(
    torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Its error is the only one; what all have written is kept."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *ONE_THREAD)
    process = torchrun(3, COMMAND, *words, GO=tmp_path / "go", FAILS=1)
    wait_for_journals(tmp_path / "out.partial", 3)
    (tmp_path / "go").touch()
    process.communicate(timeout=120)
    assert process.returncode == 1
    (error,) = errors(tmp_path)
    assert "Input/output error" in error
    again = torchrun(3, COMMAND, *words, "--resume", GO=tmp_path / "go")
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, (tmp_path / "printed").read_text()
    assert "an earlier run had written" in out
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_an_error_of_one_process(torchrun: Torchrun, tmp_path: Path) -> None:
    process = torchrun(4, "-m", "zckpt", "convert", tmp_path / "nothing", tmp_path / "out")
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(errors(tmp_path)) == 1


def test_slow_processes_take_less(
    torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """However long a read takes, it is no failure."""
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    words = ("convert", sources["zero-3"], tmp_path / "out", *SMALL)
    begun = time.monotonic()
    process = torchrun(3, COMMAND, *words, GO=tmp_path / "go", SLOW=1, SECONDS=6)
    process.communicate(timeout=120)
    assert time.monotonic() - begun > 6
    assert process.returncode == 0, (tmp_path / "printed").read_text()
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_two_commands_in_one_launch(
    torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """torchrun's store has what the first one left there; the same command twice is no restart."""
    zckpt_command = f"{sys.executable} -m zckpt"
    lines = [
        f"{zckpt_command} convert {sources['zero-3']} {tmp_path / 'one'}",
        f"{zckpt_command} verify {tmp_path / 'one'} --against {sources['zero-3']}",
        f"{zckpt_command} verify {tmp_path / 'one'} --against {sources['zero-3']}",
        f"{zckpt_command} convert {tmp_path / 'one'} {tmp_path / 'two'} --to dcp --dp 2",
    ]
    (tmp_path / "script.sh").write_text("\n".join(["set -e", *lines]))
    process = torchrun(2, "bash", tmp_path / "script.sh", own=("--no-python",))
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, (tmp_path / "printed").read_text()
    assert out.count("written: ") == 2
    assert zckpt.verify(tmp_path / "two", sources["zero-3"])["equal"]
    again = torchrun(2, "bash", tmp_path / "script.sh", own=("--no-python",))
    again.communicate(timeout=200)
    assert again.returncode == 1
    (error,) = errors(tmp_path)
    assert "one exists" in error


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_training_program(
    has_agent: bool, torchrun: Torchrun, sources: dict[str, Path], tmp_path: Path
) -> None:
    """A group of its own before, within and after the program's, at the same address."""
    out = tmp_path / "out"
    program = tmp_path / "train.py"
    program.write_text(
        f"""
import torch, torch.distributed as dist, zckpt
def verify():
    with zckpt.group() as processes:
        report = zckpt.verify({str(out)!r}, {str(sources["zero-3"])!r}, sharing=processes)
        assert report["equal"] and processes.size == 2
with zckpt.group() as processes:
    zckpt.convert({str(sources["zero-3"])!r}, {str(out)!r}, sharing=processes)
dist.init_process_group("gloo")
verify()
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
dist.destroy_process_group()
verify()
"""
    )
    if has_agent:
        process = torchrun(2, program)
        process.communicate(timeout=200)
        assert process.returncode == 0, (tmp_path / "printed").read_text()
        return
    port = free_port()
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=200)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
