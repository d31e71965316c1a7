"""Where does a run lie for other numbers of ranks, who may write there, and what stays?

    RUN/.zckpt/checkpoint-500-dp16             complete, or not there; SCRATCH/RUN-CRC/... elsewhere
    RUN/.zckpt/checkpoint-500-dp16.partial     begun: the next start at this size continues it
    RUN/.zckpt/lock                            locked by the one job that writes there

One job writes at a time; another one waits for it, and finds what it has written. A process that
got a directory locks it until it ends, so that no other job removes it meanwhile. All locks are
flock's: they end with the process, however it ends. Where a filesystem has none, nobody waits, each
job writes into a `.partial` of its own (copying/without_locks.py), and nothing complete is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..api import is_url
from ..core.checksum import crc32
from ..core.folder import JOURNAL, Folder, lock, mark_file
from ..core.siblings import BESIDE
from ..errors import TargetExists, UnsupportedCheckpoint

LOCK, PARTIAL = "lock", ".partial"
NAME = r"(?s).+-dp\d+(-(tp|pp|ep|zero)\d+)*(-\d+)?"
COMPLETE = re.compile(NAME, re.ASCII)
BEGUN = re.compile(NAME + r"(\.gone)?\.partial", re.ASCII)
"""What zckpt has written in the folder: only that is removed."""
POLL, PATIENCE = 0.5, 5.0  # seconds: between two looks, and until a process says for what it waits
VISIBLE = 120.0  # seconds until another node's directory is seen through a network filesystem
_held: dict[str, int] = {}  # descriptors that stay open, by path


def folder_of(run: str, scratch: str | os.PathLike[str] | None) -> str:
    """The folder for this run's other sizes; in a scratch folder each run has its own."""
    if scratch is None:
        return os.path.join(os.path.abspath(run), BESIDE)
    if not is_url(run):
        run = os.path.realpath(run)  # it may have several names
    mark = crc32(os.fsencode(run))
    return os.path.join(os.path.abspath(scratch), f"{os.path.basename(run)}-{mark:08x}")


def make(folder: str, run: str) -> None:
    """Creates the folder; raises UnsupportedCheckpoint where this process cannot write."""
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError
    except OSError as error:
        raise UnsupportedCheckpoint(
            f"{run} must be written for another size, and nothing can be written below {folder}"
            + (f": {error.strerror}" if error.strerror else ""),
            hint="name a folder where there is space: scratch=, or --scratch DIR",
        ) from error


@contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """No other job writes in the folder inside of the block; waits until that is so."""
    file = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end: float | None = time.monotonic() + PATIENCE
        while not lock(file):
            if end is not None and time.monotonic() > end:
                end = None
                print(f"waiting for another job, which writes in {folder}", file=sys.stderr)
            time.sleep(POLL)
        yield
    finally:
        os.close(file)


def hold(path: str) -> None:
    """Keeps a directory from being removed by other jobs until this process ends.

    On another node it may take a while until it is there. Raises TargetExists if another job
    removes it now.
    """
    if path in _held:
        return
    end = time.monotonic() + VISIBLE
    while True:
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            break
        except FileNotFoundError:
            if time.monotonic() > end:
                raise
            with suppress(OSError):  # to look at the folder makes a node ask for its names again
                os.listdir(os.path.dirname(path))
            time.sleep(POLL)
    if not lock(file, fcntl.LOCK_SH) or not _is_at(file, path):
        os.close(file)
        raise TargetExists(f"{path} is removed by another job", hint="start this job again")
    _held[path] = file


def let_go(path: str) -> None:
    """Undoes `hold`, for a directory that is to be made anew."""
    if (file := _held.pop(path, None)) is not None:
        os.close(file)


def remove(path: str) -> bool:
    """Removes a directory, complete or begun; False if a living process has it."""
    if not os.path.lexists(path):
        return True
    above, name = os.path.split(path)
    place = os.path.join(path, JOURNAL) if name.endswith(PARTIAL) else path
    file = -1
    try:
        with suppress(FileNotFoundError):  # a folder that was begun, and has no journal yet
            file = os.open(place, (os.O_RDONLY if place == path else os.O_RDWR) | os.O_CLOEXEC)
            if not lock(file, where_there_are_none=False):
                return False
        with Folder.at(above) as folder:
            gone = path if name.endswith(PARTIAL) else f"{path}.gone{PARTIAL}"
            if gone != path:  # whoever looks finds all of it, or nothing
                folder.remove(gone)
                folder.move(path, folder, gone)
            folder.remove(gone)
            with suppress(FileNotFoundError):
                folder.unlink(mark_file(path))
    finally:
        if file >= 0:
            os.close(file)
    return True


def sweep(folder: str, own: str) -> None:
    """Removes what jobs have begun that ended, except what `own` goes on with.

    Whoever calls it is alone in the folder.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if BEGUN.fullmatch(name) and path != f"{own}{PARTIAL}":
            remove(path)


def tidy(folder: str, own: str, keep: int) -> list[str]:
    """Removes the oldest directories, so that `keep` stay beside `own`; gives their paths."""
    others = [
        entry.path
        for entry in os.scandir(folder)
        if entry.is_dir(follow_symlinks=False)
        and entry.path != own
        and COMPLETE.fullmatch(entry.name)
    ]
    others.sort(key=lambda path: os.stat(path).st_mtime_ns, reverse=True)
    return [path for path in others[keep:] if remove(path)]


def _is_at(file: int, path: str) -> bool:
    """Whether the open directory is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
