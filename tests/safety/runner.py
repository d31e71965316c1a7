"""How is a command run against a fault, and which calls did it make?"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).with_name("shim.c")
LIMIT = 60.0  # seconds, after which a run hangs
# as in shim.c: nothing, an error, half of the bytes, a signal before it, an error after it
NONE, FAIL, SHORT, SIGNAL, LATE = range(5)


@dataclass(frozen=True)
class Fault:
    """What calls number `first` to `last` get: see shim.c. `value` is an errno, or a signal."""

    mode: int = NONE
    value: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Job:
    """A command of zckpt, or a function of a test module, with the prefixes of watched paths."""

    words: tuple[str, ...]
    watched: tuple[str, ...]
    fault: Fault = field(default_factory=Fault)
    is_recorded: bool = False
    is_recorded_with_data: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or the signal that ended it as a negative number."""

    code: int
    out: str
    err: str
    calls: int
    fired: int
    seconds: float
    is_hanging: bool
    record: bytes


def compile_shim(folder: Path) -> Path:
    """The shim as a shared library, compiled by `cc`, or by the `ziglang` of the extra `test`."""
    compiler = ["cc"] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    library = folder / "shim.so"
    options = ["-O2", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run([*compiler, *options], check=True)
    return library


class Runner:
    """Runs commands one after another; `close` ends the process."""

    def __init__(self, shim: Path) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "ZCKPT_SHIM": str(shim),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )

    def run(
        self,
        *words: object,
        watched: tuple[Path, ...] = (),
        fault: Fault | None = None,
        recorded: bool = False,
        with_data: bool = False,
    ) -> Ended:
        job = Job(
            tuple(map(str, words)),
            tuple(map(str, watched)),
            fault or Fault(),
            recorded or with_data,
            with_data,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        ended: Ended = pickle.load(self.process.stdout)
        return ended

    def close(self) -> None:
        self.process.communicate()


# -- what a run called


@dataclass(frozen=True)
class Call:
    """A call that counted, as shim.c recorded it; `other` is the second path of a rename."""

    number: int
    function: str
    path: str
    other: str
    offset: int
    length: int
    result: int
    error: int
    flags: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.function}({self.path}{', ' + self.other if self.other else ''})"


class _Record(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 24),
        ("number", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("data", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("other", ctypes.c_int32),
    )


def calls_of(record: bytes) -> list[Call]:
    return list(_calls(record))


def _calls(record: bytes) -> Iterator[Call]:
    at = 0
    while at < len(record):
        head = _Record.from_buffer_copy(record, at)
        at += ctypes.sizeof(_Record)
        path, other = at + head.path, at + head.path + head.other
        end = other + head.data
        yield Call(
            head.number,
            head.function.decode(),
            os.fsdecode(record[at:path]),
            os.fsdecode(record[path:other]),
            head.offset,
            head.length,
            head.result,
            head.error,
            head.flags,
            record[other:end],
        )
        at = end
