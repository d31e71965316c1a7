"""Which faults can a run meet, and did it end as promised?

A run ends with exit code 0 and the good target, or with 1, one sentence that names a file, a hint,
and no target.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import tiny
from .runner import FAIL, LATE, SHORT, SIGNAL, Call, Ended, Fault, Runner, calls_of

# functions that take space, or a file descriptor
SPACE = {"write", "pwrite", "pwritev", "fallocate", "fallocate64", "ftruncate", "ftruncate64"}
SPACE |= {"mkdir", "mkdirat", "open", "rename", "link", "fsync", "close", "sendfile"}
DESCRIPTORS = {"open", "opendir", "fdopendir"}
# functions that wait, as their manual pages say
WAITING = {"open", "read", "pread", "preadv", "write", "pwrite", "pwritev", "fsync", "close"}
WAITING |= {"fallocate", "fallocate64", "ftruncate", "ftruncate64", "flock", "sendfile"}
MOVING = {"read", "pread", "preadv", "write", "pwrite", "pwritev", "sendfile"}


@dataclass(frozen=True)
class Conversion:
    """A command from `source` to `target`, two paths of its own, with options between them."""

    command: str
    source: Path
    target: Path
    options: tuple[str, ...]

    @property
    def words(self) -> tuple[object, ...]:
        return (self.command, self.source, self.target, *self.options)

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")

    @property
    def outer(self) -> Path:
        """The folder of the target, which the command creates."""
        return self.target.parent


def conversion(
    kind: str, to: str, smallest: Callable[[str], Path], root: Path, jobs: int = 1
) -> Conversion:
    """From one kind of tiny checkpoint to another one; "hf" is the folder of `export`."""
    source, target = smallest(kind), root / "new" / "target"
    options = ["-j", str(jobs)]
    if to == "hf":
        options += ["--config", str(smallest("run") / "config.json")]
        return Conversion("export", source, target, tuple(options))
    options += ["--param-names", str(tiny.names_file(root)), *tiny.TARGETS[to]]
    return Conversion("convert", source, target, tuple(options))


@dataclass(frozen=True)
class Good:
    """What a run without a fault calls, and gives."""

    calls: Sequence[Call]
    target: dict[str, bytes]
    source: dict[str, bytes]


def tree(root: Path) -> dict[str, bytes]:
    """Names and bytes below a folder; folders end in a slash."""
    return {
        str(path.relative_to(root)) + "/" * path.is_dir(): b""
        if path.is_dir()
        else path.read_bytes()
        for path in root.rglob("*")
    }


def run(runner: Runner, conversion: Conversion, fault: Fault | None = None) -> Ended:
    watched = (conversion.source, conversion.outer)
    return runner.run(*conversion.words, watched=watched, fault=fault)


def good(runner: Runner, conversion: Conversion, with_data: Path | None = None) -> Good:
    """The run without a fault, whose target is removed again.

    Calls below the folder `with_data` are recorded with their data, if it is given.
    """
    ended = runner.run(
        *conversion.words,
        watched=(conversion.source, with_data or conversion.outer),
        recorded=True,
        with_data=with_data is not None,
    )
    assert ended.code == 0, ended.err
    calls = sorted(calls_of(ended.record), key=lambda call: call.number)  # threads mix them
    assert [call.number for call in calls] == list(range(1, ended.calls + 1))
    result = Good(calls, tree(conversion.target), tree(conversion.source))
    clear(conversion)
    return result


def clear(conversion: Conversion) -> None:
    shutil.rmtree(conversion.outer, ignore_errors=True)


def faults(call: Call) -> Iterator[tuple[str, Fault]]:
    """Everything that can happen to a call, by name."""
    numbers = [errno.EIO, errno.ESTALE]
    numbers += [errno.ENOSPC, errno.EDQUOT] if call.function in SPACE else []
    numbers += [errno.EMFILE] if call.function in DESCRIPTORS else []
    numbers += [errno.EINTR] if call.function in WAITING else []
    for number in numbers:
        yield errno.errorcode[number], Fault(FAIL, number, call.number, call.number)
    if call.function in MOVING and call.length > 1:
        yield "short", Fault(SHORT, 0, call.number, call.number)
    if call.function == "rename":
        yield "EIO after it", Fault(LATE, errno.EIO, call.number, call.number)


def one_fault(call: Call) -> Iterator[tuple[str, Fault]]:
    """One of them; neighbors get different ones."""
    each = list(faults(call))
    yield each[call.number % len(each)]


def short_writes(call: Call) -> Iterator[tuple[str, Fault]]:
    if call.function in ("write", "pwrite") and call.length > 1:
        yield "short", Fault(SHORT, 0, call.number, call.number)


def from_here_on(call: Call) -> Iterator[tuple[str, Fault]]:
    """A disk or a network that stays away."""
    yield "EIO from here on", Fault(FAIL, errno.EIO, call.number, 1 << 62)


def kill(call: Call, number: int = signal.SIGKILL) -> Fault:
    return Fault(SIGNAL, number, call.number, call.number)


# -- what is wrong with an end

# nobody may be let down like this
SILENT = "exit code 0 without the good target"
TARGET = "a target in spite of an error"
LEFT = "a .partial is left"
SOURCE = "the source has changed"
HANG = "a hang"
INTERNAL = "an internal error"
CODE = "another exit code"
# what is said
NAMES_NOTHING = "the error names no file"
NO_SENTENCE = "no sentence with a hint"


def defects(
    conversion: Conversion, expected: Good, ended: Ended, may_leave: bool = False
) -> list[str]:
    """What is wrong after a run; `may_leave` a `.partial` if removing it fails too."""
    wrong = []
    target = tree(conversion.target) if os.path.lexists(conversion.target) else None
    if ended.is_hanging:
        wrong.append(HANG)
    elif ended.code == 0:
        if target != expected.target:
            wrong.append(SILENT)
        if conversion.partial.exists() and f"rm -r {conversion.partial}" not in ended.err:
            wrong.append(LEFT)
    elif ended.code == 1:
        if target is not None:
            wrong.append(TARGET)
        if conversion.partial.exists() and not may_leave:
            wrong.append(LEFT)
        if "Traceback" in ended.err or "a bug in zckpt" in ended.err:
            wrong.append(INTERNAL)
        wrong += _unclear(ended.err, conversion)
    else:
        wrong.append(INTERNAL if ended.code in (70, 120) or "Traceback" in ended.err else CODE)
    if tree(conversion.source) != expected.source:
        wrong.append(SOURCE)
    return wrong


def _unclear(text: str, conversion: Conversion) -> Iterator[str]:
    lines = [line for line in text.splitlines() if not line.startswith("Warning: ")]
    message = lines[0] if lines else ""
    if not re.match(r"Error: \S", message) or not any(re.match(r"Hint: \S", x) for x in lines[1:]):
        yield NO_SENTENCE
    elif str(conversion.source) not in message and str(conversion.outer) not in message:
        yield NAMES_NOTHING
