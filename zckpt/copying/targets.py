"""Checks whether a target may be written at a path, and whether it fits there."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import asdict

from ..core.checkpoint.siblings import CACHE
from ..core.storage import sources
from ..core.storage.folder import JOURNAL, Folder, has_locks, lock
from ..core.storage.marks import is_begun, is_journal
from ..errors import (
    NotEnoughSpace,
    TargetExists,
    WrongOption,
    removal,
    sized,
)
from .journal import Identity, difference, in_use, is_locked, lines_of, mark_of, not_continued

MARKING = 5.0  # seconds that may pass between the rename of a target and its mark


def refuse_existing(target: str, partial: bool = True) -> None:
    """Raises TargetExists if the target exists already.

    With `partial`, also if `<target>.partial` exists, which an unfinished run has left.
    """
    target = os.path.abspath(target)
    path = f"{target}.partial"
    if is_taken(target):
        raise TargetExists(
            "target-exists",
            f"{target} exists",
            hint="choose another name, or remove it first",
            file=target,
        )
    if not partial or not os.path.lexists(path):
        return
    try:
        with Folder.at(os.path.dirname(path)) as above:
            folder = above.inner(path)
            with suppress(PermissionError):
                if not has_locks(above):  # without locks, this run will use a separate one
                    folder.close()
                    return
    except (NotADirectoryError, TargetExists):
        raise _strange(path) from None
    except PermissionError:
        raise TargetExists(
            "target-exists",
            f"{path} exists: another user has begun a target there",
            hint="choose another target",
            file=path,
        ) from None
    with folder:
        if is_locked(folder):
            raise TargetExists(
                "target-being-written",
                f"{path} exists: another run is writing there now",
                hint="wait for that run, or choose another target",
                file=path,
            )
        if JOURNAL not in folder.names():
            refuse_strange(folder, os.path.basename(target))
    raise stopped(path)


def stopped(path: str) -> TargetExists:
    """Makes the error for a run without --resume that finds an unfinished target."""
    return TargetExists(
        "target-unfinished",
        f"{path} exists: a run was stopped there",
        hint=f"add --resume to continue it, or remove it: {removal(path)}",
        file=path,
    )


def refuse_other_begun(target: str, identity: Identity) -> None:
    """Raises TargetExists if there is an unfinished target that this run cannot continue.

    It only reads the journal, and takes no lock.
    """
    path = f"{os.path.abspath(target)}.partial"
    if not os.path.lexists(path):
        return
    with Folder.at(os.path.dirname(path)) as above, above.inner(path) as folder:
        if is_locked(folder):
            raise in_use(path)
        if JOURNAL not in folder.names():
            refuse_strange(folder, os.path.basename(target))
            return
        with folder.opened(os.path.join(path, JOURNAL)) as file:
            lines = lines_of(file)
    if lines and (reason := difference(json.loads(lines[0][9:])["run"], asdict(identity))):
        raise not_continued(path, reason)


def is_complete(target: str, identity: Identity) -> bool:
    """Whether an earlier run of the same conversion has completed the target; reads no tensor.

    Raises TargetExists if the target belongs to another run or user, or has no mark that identifies
    its run.
    """
    target = os.path.abspath(target)
    if not is_taken(target):
        return False
    mark = _shown_mark(target)
    if not mark:
        raise of_another_run(target, "and does not state which run wrote it")
    if reason := difference(mark, identity.mark()):
        raise of_another_run(target, f"and was written with {reason}")
    for name in identity.files:
        if not os.path.isfile(os.path.join(target, name)):
            raise of_another_run(target, f"but it lacks {name}")
    _refuse_foreign(target, identity.files)
    path = f"{target}.partial"  # left by a run that was stopped after the rename
    if os.path.lexists(path):
        with (
            suppress(OSError, TargetExists),
            Folder.at(os.path.dirname(path)) as above,
            above.own_folder(path) as folder,
        ):
            is_ours = is_begun(folder, os.path.basename(target))
            # it was removed before the run was killed
            if is_ours and JOURNAL not in folder.names():
                remove_empty(folder, above)
            with folder.opened(os.path.join(path, JOURNAL), os.O_RDWR) as file:
                if is_ours and lock(file, where_there_are_none=False):
                    remove_empty(folder, above)
    return True


def _shown_mark(target: str) -> dict[str, str]:
    """Reads the mark of a target, which identifies its run; empty if there is none.

    On a filesystem without locks, another run may have renamed the target and not marked it yet. So
    this function waits up to MARKING seconds for the mark.
    """
    if (mark := mark_of(target)) or has_locks_at(target):
        return mark
    end = time.monotonic() + MARKING
    while not (mark := mark_of(target)) and time.monotonic() < end:
        time.sleep(0.05)
    return mark


def has_locks_at(target: str) -> bool:
    """Whether the filesystem of a target supports locks; True if that cannot be found out."""
    try:
        with Folder.at(_nearest_folder(target)) as above:
            return has_locks(above)
    except OSError:
        return True


def _nearest_folder(target: str) -> str:
    folder = os.path.dirname(os.path.abspath(target))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _refuse_foreign(target: str, names: Iterable[str]) -> None:
    """Raises TargetExists if a target, or one of its files `names`, belongs to another user."""
    below = (name.split(os.sep) for name in names)
    paths = {os.path.join(target, *parts[:end]) for parts in below for end in range(len(parts) + 1)}
    owners = {path: os.stat(path).st_uid for path in sorted(paths)}
    owner = os.geteuid()
    if {*owners.values()} <= {owner}:
        return
    with suppress(OSError), Folder.at(os.path.dirname(target)) as above:
        owner = above.owner_of_new_files()  # a network filesystem may give files to another user
    for path, user in owners.items():
        if user != owner:
            what = path.removeprefix(target).strip(os.sep) or "it"
            raise of_another_run(
                target, f"but {what} belongs to user {user}, your new files to user {owner}"
            )


def of_another_run(target: str, reason: str) -> TargetExists:
    """Makes the error for a target that another run has written.

    `reason` continues the message after "exists,".
    """
    hint = f"choose another name, or remove it: {removal(target)}"
    return TargetExists("target-exists", f"{target} exists, {reason}", hint, file=target)


def remove_empty(folder: Folder, above: Folder) -> None:
    """Removes the directory `<target>.partial` (`folder`) if it contains nothing but journals.

    A journal lists what a run has written. `above` is the directory around `folder`. If `folder`
    contains anything else, raises OSError and removes nothing.
    """
    contents = folder.names()
    if other_names := [name for name in contents if not is_journal(name)]:
        path = os.path.join(folder.path, other_names[0])
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
    for name in reversed(contents):  # `journal` comes last: it has the lock
        with suppress(FileNotFoundError):
            folder.unlink(os.path.join(folder.path, name))
    above.rmdir(folder.path)


def refuse_strange(folder: Folder, name: str) -> None:
    """Raises TargetExists if the folder contains anything but an unfinished target `name`."""
    if not is_begun(folder, name):
        raise _strange(folder.path)


def _strange(path: str) -> TargetExists:
    return TargetExists(
        "target-not-resumable",
        f"{path} exists, and cannot be continued: it has no journal of zckpt",
        hint=f"if you do not need it, remove it: {removal(path)}",
        file=path,
    )


def is_taken(target: str) -> bool:
    """Whether anything but an empty directory is at the path."""
    if os.path.islink(target) or not os.path.isdir(target):
        return os.path.lexists(target)
    with os.scandir(target) as items:
        return next(items, None) is not None


def refuse_inside(source: str, target: str) -> None:
    """Raises WrongOption if the target is the source, or would become a part of it.

    The folder `.zckpt` of the source does not count as a part of it.
    """
    outer, inner = os.path.realpath(source), os.path.realpath(target)
    if outer == inner and os.path.lexists(outer):
        move = f"mv {shlex.quote(outer)} {shlex.quote(outer + '-old')}"
        raise WrongOption(
            "target-in-source",
            f"{target} is the source itself",
            hint=f"choose another name, or move the source away first: {move}",
        )
    inner_folder = os.path.join(outer, CACHE, "")
    if (
        os.path.isdir(outer)
        and inner.startswith(outer + os.sep)
        and not inner.startswith(inner_folder)
    ):
        raise WrongOption(
            "target-in-source",
            f"{target} is inside of {source}",
            hint="choose a target beside the source",
        )


def free_space(target: str) -> int:
    """The free bytes on the filesystem of `target`, which need not exist."""
    return shutil.disk_usage(_nearest_folder(target)).free


def free_for(target: str, resume: bool) -> int:
    """The number of bytes that are free for `target`.

    With `resume`, the bytes that its unfinished files already take are added.
    """
    begun = allocated(f"{os.path.abspath(target)}.partial") if resume else 0
    return free_space(target) + begun


def need_space(target: str, size: int, resume: bool) -> None:
    """Raises NotEnoughSpace if a run cannot write `size` bytes to its target.

    With `resume`, the bytes of its unfinished files count as free.
    """
    free = free_for(target, resume)
    if size > free:
        raise NotEnoughSpace(
            "not-enough-space",
            f"{target} needs {sized(size)}, but only {sized(free)} are free",
            hint="choose a target on another filesystem, or free some space",
            file=target,
        )


def allocated(folder: str) -> int:
    """The disk space in bytes that the files of a folder take; 0 if there is no folder."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return 0
    try:
        entries = [*sources.walk(folder)]
    except PermissionError:  # another user's, which `Staging` refuses
        return 0
    return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
