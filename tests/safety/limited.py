"""A process that runs commands of zckpt in forks of itself, each with little time and memory.

Requests come in and answers go out as lines of JSON. Every fork has an audit hook: it reports what
is imported, executed, started or opened outside of a list. Run as a module, never imported by a
test, except for `Limited`, which starts it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from ..speed import slowness

CPU = 5  # seconds of the core that SECURITY.md describes
MEMORY = 512 << 20  # bytes, beyond what the process has at the beginning
PACKAGES = {
    *("zckpt", "numpy", "msgspec", "ml_dtypes", "zlib_ng", "h5py"),
    *("click", "rich", "markdown_it", "mdurl", "pygments"),
    *sys.stdlib_module_names,
}
FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    *("subprocess.Popen", "pickle.find_class", "socket.connect", "socket.bind", "os.kill"),
    *("urllib.Request", "webbrowser.open", "ctypes.dlopen"),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: `signal` is what killed it; `foreign` what it did outside the list."""

    code: int
    signal: int
    out: str
    err: str
    cpu: float  # seconds of that core
    peak: int  # bytes, of the whole process
    foreign: list[str]


class Limited:
    """Starts the process, and gives it commands."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
        environment.pop("ZCKPT_TRACEBACK", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.safety.limited"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, folder: Path) -> Ended:
        """Runs a command that may open files inside of `folder` alone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"words": [str(word) for word in words], "folder": str(folder)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# -- in the process


def serve() -> None:
    import gc

    import h5py  # noqa: F401
    import numpy as np  # noqa: F401

    import zckpt.cli.run
    import zckpt.display
    import zckpt.writing.conversion
    from zckpt import formats

    for folder in {item.name.replace("-", "_") for item in formats.FORMATS}:
        __import__(f"zckpt.formats.{folder}.read")
    __import__("zckpt.proof.verify")
    __import__("zckpt.proof.health")
    del zckpt
    answers, slow = os.fdopen(os.dup(1), "w"), slowness()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line), slow=slow)) + "\n")
        answers.flush()


def answer(words: list[str], folder: str, slow: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryFile() as foreign,
    ):
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            work(words, folder, foreign.fileno(), slow)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err, foreign):
            file.seek(0)
            texts.append(file.read(1 << 20).decode("utf-8", "replace"))
        return {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "out": texts[0],
            "err": texts[1],
            "cpu": (usage.ru_utime + usage.ru_stime) / slow,
            "peak": usage.ru_maxrss << 10,
            "foreign": texts[2].splitlines(),
        }


def work(words: list[str], folder: str, report: int, slow: float) -> None:
    from zckpt import cli

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    limit = ceil(CPU * slow)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = folder  # an HDF5 target's shells are made in a file
    sys.addaudithook(hook(folder, report))
    code = 99
    try:
        cli.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        os.write(2, f"Traceback: {type(error).__name__}: {error}\n".encode())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def hook(folder: str, report: int) -> Any:
    """Writes a line to the file `report` for every event outside of the list."""
    from zckpt.core.storage.folder import Folder

    code = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names = (folder, *code, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev/null")
    package = str(Path(__file__).parents[2] / "zckpt")
    places = (package, *(os.path.realpath(name) for name in names))
    temporary = tempfile.gettempdir()
    opened_from = Folder._opened.__code__  # opens names in the directory of a descriptor

    def allowed(event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "import":
            return str(arguments[0]).partition(".")[0] in PACKAGES
        if event == "open":
            path = arguments[0]
            if isinstance(path, int) or path is None:
                return True
            caller = sys._getframe(2)
            if caller.f_code is opened_from:
                above = os.readlink(f"/proc/self/fd/{caller.f_locals['above']}")
                path = os.path.join(above, os.fsdecode(path))
            full = os.path.realpath(os.fsdecode(path))
            return full.startswith(places) or os.path.dirname(full) == temporary
        if event in ("exec", "compile"):
            return sys._getframe(2).f_code.co_filename.startswith("<frozen importlib")
        if event == "ctypes.dlopen":
            return arguments[0] is None
        return event not in FORBIDDEN

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not allowed(event, arguments):
            os.write(report, f"{event} {arguments!r}"[:300].encode() + b"\n")

    return audit


if __name__ == "__main__":
    serve()
