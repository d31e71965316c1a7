"""Where a run writes if the filesystem has no locks, and what other runs have left there.

    DST.node7-4711-9f2c8a1b.partial/journal     host, process and a random word: only this run's
    DST.node7-4711-9f2c8a1b.partial/DST/        the files of the target

Without locks, no run can see which others are active. So no run continues the work of another, and
if several write one target, the first rename wins. The journal names the process, so that later
runs can remove what dead ones have left.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from contextlib import suppress

import msgspec
from msgspec import Struct

from ..core.storage.folder import JOURNAL, Folder
from ..errors import MALFORMED, Notice, TargetExists, WrongOption, counted, listed, warning
from .journal import Journal, lines_of
from .targets import has_locks_at, remove_empty

WRITER = re.compile(r"([A-Za-z0-9_]*)-([0-9]+)-[0-9a-f]{8}", re.ASCII)
"""Matches the part of a directory's name that identifies its process: `node7-4711-9f2c8a1b`."""
OWN = re.compile(rf"(?s)(.+)\.({WRITER.pattern})\.partial", re.ASCII)


class Process(Struct, frozen=True):
    """A process of any machine, recorded so that other runs can see whether it still runs.

        boot         identifies one start of the machine
        namespace    the namespace of process numbers
        started      when the process began, in clock ticks: a later process may get its number

    All three are empty where the system does not state them.
    """

    boot: str
    namespace: str
    number: int
    started: str

    @property
    def is_gone(self) -> bool:
        """Whether this was a process of this machine that has ended."""
        here = this_process()
        if not here.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        if not is_alive(self.number):
            return True
        now = _started(self.number)
        return bool(now and self.started) and now != self.started


class LonelyJournal(Journal):
    """The journal of a run on a filesystem without locks; no other run uses its folder."""

    def _begin(self) -> None:
        self._file = self._opened(JOURNAL, os.O_CREAT | os.O_EXCL)
        self._append({**self._header(), "process": msgspec.to_builtins(this_process())})


def this_process() -> Process:
    number = os.getpid()
    namespace = ""
    with suppress(OSError):
        if os.readlink("/proc/self") == str(number):  # otherwise /proc shows another namespace
            namespace = os.readlink("/proc/self/ns/pid")
    boot = _text("/proc/sys/kernel/random/boot_id").strip() if namespace else ""
    return Process(boot, namespace, number, _started(number))


def is_alive(number: int) -> bool:
    """Whether this machine has a process of this number, of any user."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _started(number: int) -> str:
    """The time at which process `number` began, in clock ticks; empty if unknown."""
    fields = _text(f"/proc/{number}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def new_writer() -> str:
    """Makes a name that only this run has: host, process number and a random word."""
    return f"{_host()}-{os.getpid()}-{os.urandom(4).hex()}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", socket.gethostname().partition(".")[0])[:32]


def writer_of(partial: str) -> str:
    """The part of a `.partial` directory's name that identifies its process; may be empty."""
    match = OWN.fullmatch(os.path.basename(partial))
    return match[2] if match else ""


def refusal(target: str, part: str) -> WrongOption:
    """Makes the error that --part or --resume needs a filesystem with locks.

    The option is --part if `part` is given, otherwise --resume.
    """
    option = "--part" if part else "--resume"
    return WrongOption(
        "option-not-applicable",
        f"{option} needs locks, and the filesystem of {target} has none (flock fails): "
        "zckpt cannot know who else is writing there",
        hint=f"leave out {option}: then one command writes the complete target from the beginning. "
        "Or choose a filesystem with locks (Lustre has them if it is mounted with flock)",
    )


def refuse(target: str, part: str) -> None:
    """Raises WrongOption for --part or --resume if the target's filesystem has no locks.

    The option is --part if `part` is given, otherwise --resume. This is checked early, before a
    large source is read.
    """
    if not has_locks_at(target):
        raise refusal(target, part)


# -- what others have left


class Left(Struct, frozen=True):
    """Unfinished targets of other runs: `removed` ones, and `staying` ones that are still there."""

    removed: list[str]
    staying: list[str]

    def warnings(self) -> list[Notice]:
        lines = [
            warning(
                "remains-of-runs",
                f"{path} was removed: the process that wrote it has ended",
                file=path,
            )
            for path in self.removed
        ]
        if self.staying:
            number = counted(len(self.staying), "unfinished target")
            remove = shlex.join(["rm", "-r", *self.staying])
            message = (
                f"{number} of other runs may be left from jobs that have ended: "
                f"{listed(self.staying, 3)}. If no job is writing there, run: {remove}"
            )
            lines.append(warning("remains-of-runs", message, file=self.staying[0]))
        return lines


def clear(above: Folder, name: str) -> Left:
    """Removes unfinished targets in the directory `above` whose processes have ended.

    It is for a filesystem without locks. Only targets of this machine's processes are removed. The
    result also lists those that stay: of other machines, not removable, or named `<name>.partial`.
    A target that a process of this machine still writes is not listed.
    """
    left = Left([], [])
    with suppress(PermissionError):  # a directory may be writable and not listable
        for item in above.names():
            path = os.path.join(above.path, item)
            if item == f"{name}.partial":  # of runs with locks, which may still be writing there
                left.staying.append(path)
            elif match := OWN.fullmatch(item):
                process = _noted(above, path)
                if process is not None and process.is_gone:
                    (left.removed if _remove(above, path, match[1]) else left.staying).append(path)
                elif not _is_at_work(match, process):
                    left.staying.append(path)
    return left


def _noted(above: Folder, path: str) -> Process | None:
    """Reads from the journal which process writes an unfinished target; None if unknown."""
    try:
        with above.inner(path) as folder, folder.opened(os.path.join(path, JOURNAL)) as file:
            return msgspec.convert(json.loads(lines_of(file)[0][9:])["process"], Process)
    except (OSError, TargetExists, msgspec.MsgspecError, *MALFORMED):
        return None


def _is_at_work(match: re.Match[str], process: Process | None) -> bool:
    """Whether a process of this machine may still be writing an unfinished target.

    `process` is the writer that the journal names, if any. Otherwise `match`, the directory's name
    as matched by OWN, tells the writer's host and process number.
    """
    if process is not None:
        here = this_process()
        return (process.boot, process.namespace) == (here.boot, here.namespace)
    return match[3] == _host() and is_alive(int(match[4]))


def _remove(above: Folder, path: str, target: str) -> bool:
    try:
        with above.own_folder(path) as folder:
            folder.remove(os.path.join(path, target))
            remove_empty(folder, above)  # the journal comes last, since a kill may interrupt this
    except FileNotFoundError:  # another run may remove it too
        return True
    except (OSError, TargetExists):
        return False
    return True
