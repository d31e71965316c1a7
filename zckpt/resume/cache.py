"""The folder of a run's resharded checkpoints: paths, locks, and which ones are removed.

    RUN/.zckpt/checkpoint-500-dp16             complete; or SCRATCH/RUN-CRC/checkpoint-500-dp16
    RUN/.zckpt/checkpoint-500-dp16-names       empty files, if the engine loads without a copy
    RUN/.zckpt/checkpoint-500-dp16.partial     unfinished: the next start on 16 ranks continues it
    RUN/.zckpt/lock                            locked by the one job that writes in the folder

One job writes at a time. A second job waits, and then finds what the first has written. A process
that resumes from a directory locks it until the process ends, so that no other job removes it. All
locks are made with flock, which end with the process, also after a crash. On a filesystem without
locks, jobs do not wait: each job writes into its own `.partial` (copying/without_locks.py),
and complete directories are never removed.

zckpt removes only directories that belong to this user and contain zckpt's mark or journal file. A
directory is opened from the folder's descriptor, without following links, before it is examined.
The folder itself may be a link of this user to a directory of this user.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..api import is_url
from ..core.checkpoint.siblings import CACHE
from ..core.storage import marks
from ..core.storage.checksum import crc32
from ..core.storage.folder import JOURNAL, Folder, lock
from ..errors import TargetExists, UnsupportedCheckpoint

LOCK, PARTIAL = "lock", ".partial"
NAME = r"(?s).+-dp\d+(-(tp|pp|ep|zero)\d+)*(-names)?(-\d+)?"
COMPLETE = re.compile(NAME, re.ASCII)
BEGUN = re.compile(NAME + r"(\.gone)?\.partial", re.ASCII)
GONE = f".gone{PARTIAL}"
"""The suffix of a directory that is being removed."""
POLL, PATIENCE = 0.5, 5.0  # seconds: between two tries, and until a message that the job waits
VISIBLE = 120.0  # seconds: how long a network filesystem may hide another node's directory
_held: dict[str, int] = {}  # descriptors that stay open, by path


def folder_of(run: str, scratch: str | os.PathLike[str] | None) -> str:
    """The folder for a run's resharded checkpoints: RUN/.zckpt, or a subfolder of `scratch`."""
    if scratch is None:
        return os.path.join(os.path.abspath(run), CACHE)
    if not is_url(run):
        run = os.path.realpath(run)  # a directory may have several paths
    mark = crc32(os.fsencode(run))
    return os.path.join(os.path.abspath(scratch), f"{os.path.basename(run)}-{mark:08x}")


def make(folder: str, run: str) -> None:
    """Creates the folder for resharded checkpoints of a run.

    Raises UnsupportedCheckpoint if this process cannot write there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError
    except OSError as error:
        raise UnsupportedCheckpoint(
            "nowhere-to-write",
            f"{run} must be resharded, but zckpt cannot write in {folder}"
            + (f": {error.strerror}" if error.strerror else ""),
            hint="name a folder where there is space: scratch=, or --scratch DIR",
            file=run,
        ) from error


def opened(folder: str) -> Folder:
    """Opens the folder for resharded checkpoints.

    Raises TargetExists if it is a link that belongs to another user, or leads to a directory of
    another user.
    """
    above = Folder.at(folder)
    try:
        link = os.lstat(folder)
        if stat.S_ISLNK(link.st_mode):
            above.refuse_another()
            if not all(_is_ours(above, uid) for uid in (link.st_uid, above.itself().st_uid)):
                raise TargetExists(
                    "target-unsafe",
                    f"{folder} is a link of another user, or leads to another user's directory",
                    hint="name a folder of yours: scratch=, or --scratch DIR",
                    file=folder,
                )
    except BaseException:
        above.close()
        raise
    return above


def _is_ours(above: Folder, uid: int) -> bool:
    """Whether files whose owner is `uid` belong to this user.

    A network filesystem may give files of this user another owner.
    """
    with suppress(OSError):
        return uid == os.geteuid() or uid == above.owner_of_new_files()
    return False


@contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """Inside the block, no other job writes into the folder: waits for its lock and holds it."""
    path = os.path.join(folder, LOCK)
    with opened(folder) as above, above.opened(path, os.O_RDWR | os.O_CREAT) as file:
        if os.fstat(file).st_nlink > 1:
            raise TargetExists(
                "target-unsafe",
                f"{path} has a second name (a hard link): zckpt locks only a file of its own",
                hint=f"remove it: rm {shlex.quote(path)}; or --scratch DIR",
                file=path,
            )
        end: float | None = time.monotonic() + PATIENCE
        while not lock(file):
            if end is not None and time.monotonic() > end:
                end = None
                say(f"waiting for another job, which writes in {folder}")
            time.sleep(POLL)
        yield


def say(line: str) -> None:
    """Prints a line to stderr immediately."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def hold(path: str) -> None:
    """Locks a directory until this process ends, so that no other job removes it.

    If another node has just made the directory, a network filesystem may not show it yet: waits up
    to two minutes for it. Raises TargetExists if another job is removing it.
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
            with suppress(OSError):  # makes the network filesystem refresh the folder's names
                os.listdir(os.path.dirname(path))
            time.sleep(POLL)
    if not lock(file, fcntl.LOCK_SH) or not _is_at(file, path):
        os.close(file)
        raise TargetExists(
            "target-being-written",
            f"another job is removing {path}",
            hint="start this job again",
            file=path,
        )
    _held[path] = file


def let_go(path: str) -> None:
    """Releases the lock of `hold`, because this job will write the directory again."""
    if (file := _held.pop(path, None)) is not None:
        os.close(file)


def remove(path: str) -> bool:
    """Removes a directory that zckpt has written, complete or unfinished.

    Returns False if a running process has locked it, or if zckpt did not write it.
    """
    if not os.path.lexists(path):
        return True
    with opened(os.path.dirname(path)) as above:
        return _remove(above, path)


def sweep(folder: str, current: str) -> list[str]:
    """Deletes the unfinished directories of dead jobs; returns their paths.

    The `.partial` directory of the target `current` stays, since this job continues it. The caller
    holds the folder's lock.
    """
    with opened(folder) as above:
        begun = [os.path.join(folder, name) for name in above.names() if BEGUN.fullmatch(name)]
        return [path for path in begun if path != f"{current}{PARTIAL}" and _remove(above, path)]


def tidy(folder: str, current: str, keep: int) -> list[str]:
    """Removes old resharded checkpoints until `current` and `keep` others are left.

    Returns the paths that were removed. Those written first are removed first, whatever their step,
    because one that was needed recently may be needed again. All of them can be written again from
    the run.
    """
    with opened(folder) as above:
        times = {}
        for name in above.names():
            path = os.path.join(folder, name)
            if path != current and COMPLETE.fullmatch(name):
                with _of_zckpt(above, path) as directory:
                    if directory is not None:
                        times[path] = directory.itself().st_mtime_ns
        oldest = sorted(times, key=times.__getitem__, reverse=True)[keep:]
        return [path for path in oldest if _remove(above, path)]


def _remove(above: Folder, path: str) -> bool:
    with _of_zckpt(above, path) as directory:
        if directory is None or not lock(directory.file, where_there_are_none=False):
            return False
        if _is_begun(path):
            is_removed = _remove_begun(above, directory)
        else:
            is_removed = _remove_marked(above, directory)
    if is_removed:
        say(f"removed {path}")
    return is_removed


@contextmanager
def _of_zckpt(above: Folder, path: str) -> Iterator[Folder | None]:
    """Opens a directory that zckpt has written for this user; yields None for any other."""
    try:
        directory = above.inner(path)
    except (NotADirectoryError, PermissionError, FileNotFoundError, TargetExists):
        yield None  # a file, a link, or a directory of another user
        return
    with directory:
        yield directory if _is_own(above, directory) else None


def _is_own(above: Folder, directory: Folder) -> bool:
    if not _is_ours(above, directory.itself().st_uid):
        return False
    path = directory.path
    if _is_begun(path):
        with suppress(TargetExists):
            return marks.is_begun(directory, os.path.basename(path).removesuffix(PARTIAL))
        return False
    is_emptied = path.endswith(GONE) and not directory.names()
    return is_emptied or marks.has_mark(above, path.removesuffix(GONE), directory.file)


def _is_begun(path: str) -> bool:
    return path.endswith(PARTIAL) and not path.endswith(GONE)


def _remove_begun(above: Folder, directory: Folder) -> bool:
    """Removes an unfinished directory, its journal last, so that a later job can finish that.

    Returns False if a running job has locked the journal.
    """
    journal = os.path.join(directory.path, JOURNAL)
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # the job ended before it made a journal
            file = stack.enter_context(directory.opened(journal, os.O_RDWR))
            if not lock(file, where_there_are_none=False):
                return False
        _empty(directory, last=journal)
        above.rmdir(directory.path)
    return True


def _remove_marked(above: Folder, directory: Folder) -> bool:
    """Removes a complete directory, or finishes a removal that was interrupted.

    The directory is renamed first, so that other jobs find it complete or not at all. Returns False
    if the rest of an earlier removal is in the way and cannot be removed.
    """
    path = directory.path.removesuffix(GONE)
    gone = f"{path}{GONE}"
    if directory.path != gone:
        if above.status(gone) is not None and not _remove(above, gone):
            return False
        above.move(path, above, gone)
        directory.path = gone
        directory.refuse_another()
    _empty(directory)
    if above.status(path) is None:
        marks.remove_mark_file(above, path)
    above.rmdir(gone)
    return True


def _empty(directory: Folder, last: str = "") -> None:
    """Removes everything in an open directory, the file `last` after all others."""
    paths = [os.path.join(directory.path, name) for name in directory.names()]
    for path in sorted(paths, key=lambda path: path == last):
        directory.remove(path)


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
