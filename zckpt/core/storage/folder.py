"""Writes to a directory in which other users may have put links and files.

A `Folder` stays open, and everything below it is opened from its descriptor, name by name. No link
is followed. If somebody renames or replaces the folder meanwhile, writes still go to the opened
one.

In an owned folder (`own_folder`), other users' files are refused: everything must be a directory,
or a regular file with one name, and have the owner that new files of this process get. This owner
need not be the user of this process, since network filesystems map users (root squash). So
`own_folder` creates a file and looks at its owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from msgspec import Struct

from ...errors import CorruptCheckpoint, TargetExists, brief, removal
from .sources import close, named, naming, status

# opening another user's pipe could block for ever
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# errors for a link or a socket that is opened with these flags; the disk is not broken
NO_FILE = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO)
JOURNAL = "journal"  # beside an unfinished target: lists the complete parts
PROBE = "owner-"
"""Begins the name of a probe: a short-lived empty file that shows the owner of new files."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of flock on a filesystem without locks, such as Lustre without its option `flock`."""


def lock(file: int, kind: int = fcntl.LOCK_EX, where_there_are_none: bool = True) -> bool:
    """Locks an open file or directory with flock; False if another process has locked it.

    The lock ends with the process, however the process ends. On a filesystem without locks the
    result is `where_there_are_none`. Raises OSError for other errors.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # CIFS raises the second one
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return where_there_are_none
    return True


def has_locks(folder: Folder) -> bool:
    """Whether the filesystem of a folder supports locks for files.

    This is tried with a new file, because some filesystems lock directories but not files. The file
    is removed again.
    """
    path = os.path.join(folder.path, f".zckpt-{os.urandom(4).hex()}")
    file = folder.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with naming(path):
            return lock(file, where_there_are_none=False)
    finally:
        close(file)
        with suppress(OSError):
            folder.unlink(path)


def mark_file(target: str) -> str:
    """The path of the file `.NAME.zckpt` beside a target, which proves that zckpt wrote the target.

    This proof is called the mark of the target. The file is used only if the filesystem has no
    extended attributes.
    """
    above, name = os.path.split(target)
    return os.path.join(above, f".{name}.zckpt")


class Folder(Struct, eq=False):
    """An open directory whose methods work on paths below it and follow no links.

    owner    the number of the user who must own everything below; None for any user
    top      the outermost folder that `own_folder` has opened

    Raises TargetExists for a link or another user's file, and CorruptCheckpoint for a path that is
    not below the folder. OSErrors have complete paths.
    """

    path: str
    file: int
    owner: int | None = None
    top: str | None = None

    @classmethod
    def at(cls, path: str) -> Folder:
        """Opens a directory of any user, also an unlistable one; follows links in `path`."""
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
        return cls(path, os.open(path, flags))

    def own_folder(self, path: str) -> Folder:
        """Opens a directory below this one as a `Folder` that refuses files of other users.

        To find the allowed user, it creates a file there, looks at the file's owner, and removes
        the file. Raises TargetExists if the directory itself belongs to another user, or if this
        process may not write to it.
        """
        try:
            folder = self.inner(path)
            folder.top = self.top or path
            try:
                folder.owner = folder.owner_of_new_files()
                folder._refuse_foreign(path, folder.itself())
            except BaseException:
                folder.close()
                raise
        except PermissionError:
            now = self.status(path)
            reason = f"belongs to user {now.st_uid if now else '?'}, and you may not write there"
            raise self._refusal(path, reason) from None
        return folder

    def inner(self, path: str) -> Folder:
        """Opens a directory below this one as a `Folder` with the same `owner` and `top`."""
        return Folder(path, self.open(path, os.O_RDONLY | os.O_DIRECTORY), self.owner, self.top)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor, if it is open."""
        file, self.file = self.file, -1
        if file >= 0:
            close(file)

    def owner_of_new_files(self) -> int:
        """The user to whom new files in this folder belong.

        To find out, it creates a file and removes it.
        """
        name = f"{PROBE}{os.urandom(4).hex()}"
        path = os.path.join(self.path, name)
        file = self._opened(self.file, name, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with self._naming(path):
                return os.fstat(file).st_uid
        finally:
            close(file)
            with suppress(OSError):
                os.unlink(name, dir_fd=self.file)

    # -- files and directories below

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """Opens a file or a directory; the caller closes the descriptor.

        With O_CREAT, missing directories on the way to a file are created too.
        """
        with self._above(path, bool(flags & os.O_CREAT)) as (above, name):
            return self._opened(above, name, path, flags, mode)

    @contextmanager
    def opened(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> Iterator[int]:
        """Opens a file like `open`, and closes it at the end of the block.

        OSErrors in the block name the path.
        """
        file = self.open(path, flags, mode)
        with naming(path):
            try:
                yield file
            finally:
                os.close(file)

    def itself(self) -> os.stat_result:
        """The status of this directory, as by os.stat."""
        with self._naming(self.path):
            return os.fstat(self.file)

    def status(self, path: str) -> os.stat_result | None:
        """The status of a path as by os.lstat, which follows no link; None if nothing is there."""
        try:
            with self._above(path) as (above, name), self._naming(path):
                return os.stat(name, dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        if (now := self.status(path)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return now.st_size

    def name_of(self, path: str) -> str:
        """The path relative to this folder, with slashes between its folders."""
        return os.sep.join(self._names(path))

    def names(self) -> list[str]:
        """The sorted names of everything directly in this folder."""
        with self.opened(self.path) as file, self._naming(self.path):
            return sorted(os.listdir(file))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yields every path below this folder with its status, in the order of `sources.walk`.

        A path that another process removes meanwhile is left out.
        """
        waiting = [self.path]
        while waiting:
            folder = waiting.pop()
            with self.opened(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
                with self._naming(folder):
                    names = sorted(os.listdir(file))
                items = []
                for name in names:
                    path = os.path.join(folder, name)
                    with suppress(FileNotFoundError), self._naming(path):
                        items.append((path, os.stat(name, dir_fd=file, follow_symlinks=False)))
            yield from items
            waiting += [path for path, now in reversed(items) if stat.S_ISDIR(now.st_mode)]

    def refuse_foreign(self) -> None:
        """Raises TargetExists if anything below is a link, or belongs to another user."""
        for path, now in self.walk():
            self._refuse_foreign(path, now)

    def refuse_another(self) -> None:
        """Raises TargetExists if another directory now lies at this folder's path."""
        now = status(self.path)
        if now is None or not os.path.samestat(now, self.itself()):
            raise self._refusal(self.path, "was replaced by another program")

    def make(self, path: str, mode: int = 0o777) -> bool:
        """Creates a directory with `mode`, less the umask; False if the name exists already."""
        with self._above(path) as (above, name), self._naming(path):
            try:
                os.mkdir(name, mode, dir_fd=above)
            except FileExistsError:
                return False
            return True

    def sync(self, path: str) -> None:
        """Syncs a file, or the names in a directory: returns when they are on the disk."""
        with self.opened(path) as file:
            os.fsync(file)

    def move(self, path: str, into: Folder, target: str, makes: bool = False) -> None:
        """Renames `path` to `target`, which is below `into`.

        With `makes`, missing directories above `target` are created.
        """
        with self._above(path) as (above, name), into._above(target, makes) as (other, new):
            try:
                os.rename(name, new, src_dir_fd=above, dst_dir_fd=other)
            except OSError as error:
                if error.errno is not None:
                    error.filename, error.filename2 = path, target
                raise

    def unlink(self, path: str) -> None:
        """Removes a file, or anything else that is not a directory."""
        with self._above(path) as (above, name), self._naming(path):
            os.unlink(name, dir_fd=above)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        with self._above(path) as (above, name), self._naming(path):
            os.rmdir(name, dir_fd=above)

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with everything in it.

        If an error occurs, the rest is still removed, and the first error is raised at the end.
        """
        now = self.status(path)
        if now is None:
            return
        if not stat.S_ISDIR(now.st_mode):
            self.unlink(path)
            return
        first: Exception | None = None
        with Folder(path, self.open(path, os.O_RDONLY | os.O_DIRECTORY)) as folder:
            for name in folder.names():
                try:
                    folder.remove(os.path.join(path, name))
                except (OSError, TargetExists) as error:
                    first = first or error
        if first is not None:
            raise first
        self.rmdir(path)

    # -- one name after the other

    def _names(self, path: str) -> list[str]:
        """Splits a path into the names below this folder: `a/b` gives `["a", "b"]`.

        The folder itself gives an empty list.
        """
        names = os.path.relpath(path, self.path).split(os.sep)
        if names[0] == os.pardir or "\0" in path:
            raise CorruptCheckpoint(
                "unsafe-name", f"{brief(path)} is not below {self.path}", file=self.path
            )
        return [] if names == [os.curdir] else names

    @contextmanager
    def _above(self, path: str, makes: bool = False) -> Iterator[tuple[int, str]]:
        """Opens the directory that contains a path; yields its descriptor and the last name."""
        *above, name = self._names(path) or [os.curdir]
        file, reached = self.file, self.path
        try:
            for part in above:
                reached = os.path.join(reached, part)
                inner = self._entered(file, part, reached, makes)
                if file != self.file:
                    close(file)
                file = inner
            yield file, name
        finally:
            if file != self.file:
                close(file)

    def _entered(self, above: int, name: str, path: str, makes: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return self._opened(above, name, path, flags)
        except FileNotFoundError:
            if not makes:
                raise
        with self._naming(path), suppress(FileExistsError):  # another thread or process made it
            os.mkdir(name, dir_fd=above)
        return self._opened(above, name, path, flags)

    def _opened(self, above: int, name: str, path: str, flags: int, mode: int = 0o666) -> int:
        try:
            file = os.open(name, flags | NO_LINK, mode, dir_fd=above)
        except OSError as error:
            if error.errno in NO_FILE:
                with suppress(OSError):
                    self._refuse_foreign(path, os.stat(name, dir_fd=above, follow_symlinks=False))
            error.filename = path
            raise
        try:
            self._refuse_foreign(path, os.fstat(file))
        except BaseException as error:
            close(file)
            if isinstance(error, OSError):
                named(error, path)
            raise
        return file

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Inside the block, OSErrors get the complete path `path` as their file name."""
        try:
            yield
        except OSError as error:
            if error.errno is not None:
                error.filename = path
            raise

    def _refuse_foreign(self, path: str, now: os.stat_result) -> None:
        is_file = stat.S_ISREG(now.st_mode)
        if stat.S_ISLNK(now.st_mode):
            raise self._refusal(path, "is a link")
        if not is_file and not stat.S_ISDIR(now.st_mode):
            raise self._refusal(path, "is a pipe, a socket or a device")
        if self.owner is None:
            return
        if now.st_uid != self.owner:
            owners = f"user {now.st_uid}, but your new files there belong to user {self.owner}"
            raise self._refusal(path, f"belongs to {owners}")
        if is_file and now.st_nlink > 1:
            raise self._refusal(path, "has a second name (a hard link)")

    def _refusal(self, path: str, reason: str) -> TargetExists:
        return TargetExists(
            "target-unsafe",
            f"{path} {reason}: zckpt writes only to files that it has created for you",
            hint=f"choose another target, or remove it: {removal(self.top or path)}",
            file=path,
        )
