"""How does a target directory appear whole or not at all?

Everything is written into a folder within `<target>.partial` and synced to the disk. One rename
makes that folder the target. A run that fails removes what it wrote. A run that is killed, or is
interrupted after some work, leaves `.partial` with its journal behind, and can be continued.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain

from ..core import sources
from ..core.checksum import crc32
from ..core.expected import path_inside
from ..core.fileio import write_all
from ..core.layout import Shell
from ..core.streaming import together
from ..errors import Interrupted, ProcessLost, removal
from .journal import Identity, Journal, set_mark
from .journals import PartJournal
from .sharing import ALONE, Sharing
from .targets import JOURNAL, refuse_existing, refuse_strange, remove_empty

WORTH_KEEPING = 10.0  # seconds of work


class Staging:
    """`with Staging(target) as staging:` write below `staging.path`; the end of the block renames.

    `identity` is of the run, and `chunk` the bytes that it copies at a time. With `resume` it
    continues what an earlier run of the same identity left in `<target>.partial`: `journal.regions`
    are complete. `before_rename` is called before the last check.
    `sharing` says who else writes there. A part of a run never removes what other parts have
    written, and `postpone` leaves the target to another part.
    `warnings` are about what failed after the target existed.
    Raises TargetExists if the target or, without `resume`, `<target>.partial` exists already; with
    `resume` also if another run is writing there, or if the earlier run had another identity.
    Raises Interrupted for a KeyboardInterrupt after some work, which is kept.
    """

    def __init__(
        self,
        target: str,
        identity: Identity | None = None,
        chunk: int = 0,
        resume: bool = False,
        before_rename: Callable[[], None] | None = None,
        sharing: Sharing = ALONE,
    ) -> None:
        self.target = os.path.abspath(target)
        self.folder = f"{self.target}.partial"
        self.path = os.path.join(self.folder, os.path.basename(self.target))
        self.identity = identity or Identity()
        self.resume = resume
        self.before_rename = before_rename
        self.sharing = sharing
        self.warnings: list[str] = []
        self._is_postponed = False
        self._chunk = chunk
        self._started = time.monotonic()

    def __enter__(self) -> Staging:
        refuse_existing(self.target, partial=not self.resume)
        make_folders(os.path.dirname(self.folder))
        try:
            self._open()
        except BaseException:
            with suppress(OSError):
                os.rmdir(self.folder)  # if it is empty
            raise
        try:
            self._prepare()
        except BaseException:
            if self.journal.is_new:
                self._remove()
            self.journal.close()
            raise
        return self

    def _open(self) -> None:
        is_new = True
        try:
            os.mkdir(self.folder)
        except FileExistsError:
            refuse_strange(self.folder, os.path.basename(self.target))
            is_new = False
        try:
            self.journal = self._journal()
        except BaseException:
            if is_new and not self.sharing.part:
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, JOURNAL))
            raise

    def _journal(self) -> Journal:
        about = self.folder, self.path, self.identity, self._chunk
        if not self.sharing.part:
            return Journal(*about)
        journal = PartJournal(*about, self.sharing.part)
        try:
            refuse_existing(self.target, partial=False)  # another part may have completed it
        except BaseException:
            with suppress(OSError):
                remove_empty(self.folder)
            journal.close()
            raise
        return journal

    def _prepare(self) -> None:
        """Removes what an earlier run left without a journal; forgets regions of lost files.

        After a power loss the folder has a journal, or nothing else.
        """
        _sync(self.folder)
        if self.sharing.part:
            os.makedirs(self.path, exist_ok=True)
            return
        if self.journal.is_new and os.path.lexists(self.path):
            _remove_folder(self.path)
        os.makedirs(self.path, exist_ok=True)
        for name, regions in list(self.journal.regions.items()):
            path = os.path.join(self.path, name)
            size = os.path.getsize(path) if os.path.lexists(path) else 0
            if any(region.stop > size for region in regions):
                self.journal.begin_again(name)

    @property
    def resumed(self) -> int:
        """Bytes that an earlier run has written."""
        regions = chain.from_iterable(self.journal.regions.values())
        return sum(region.stop - region.start for region in regions)

    def lay(self, shells: Iterable[Shell], mode: int = 0o666) -> None:
        """Writes shells, as files of this mode under the umask; their holes take no space yet."""
        for shell in shells:
            path = self._inside(shell.name)
            with self._created(path, mode) as file:
                os.ftruncate(file, shell.size)
                for offset, data in shell.parts:
                    write_all(file, memoryview(data), offset)
        if not self.sharing.is_alone:  # no process must find a file lost that has its regions
            for entry in sources.walk(self.path):
                if entry.is_dir(follow_symlinks=False):
                    _sync(entry.path)
            _sync(self.path)

    def postpone(self) -> None:
        """The end of the block leaves everything as it is: another process completes the target."""
        self._is_postponed = True

    @contextmanager
    def _created(self, path: str, mode: int) -> Iterator[int]:
        """A new file; of a run that is continued, the file that is there. OSErrors name it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if not self.resume:
            flags |= os.O_EXCL
        with sources.naming(path):
            file = os.open(path, flags, mode)
            try:
                yield file
            finally:
                os.close(file)

    def _inside(self, name: str) -> str:
        """The path of a new file, whose folder is created; raises if the name leads outside."""
        path = os.path.normpath(path_inside(self.path, name, "the source"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def copy(self, source: str, name: str) -> tuple[int, int]:
        """Copies a whole file with its mode to `name`; gives its size and CRC-32."""
        path = self._inside(name)
        size = crc = 0
        with sources.opened(source) as read, self._created(path, 0o600) as write:
            os.ftruncate(write, 0)
            os.fchmod(write, stat.S_IMODE(os.fstat(read.fileno()).st_mode) & 0o777)
            while data := read.read(1 << 20):
                write_all(write, memoryview(data), size)
                crc = crc32(data, crc)
                size += len(data)
        return size, crc

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        try:
            if kind is None:
                if not self._is_postponed:
                    self._complete()
            elif issubclass(kind, KeyboardInterrupt) and self._is_worth_keeping():
                raise Interrupted(*error.args if error else ()) from error
            elif not issubclass(kind, ProcessLost):
                self._remove()
        finally:
            self.journal.close()

    def _complete(self) -> None:
        try:
            together([entry.path for entry in sources.walk(self.path)], _sync)
            set_mark(self.path, self.target, self.identity)
            _sync(self.path)
            if self.before_rename:
                self.before_rename()
            refuse_existing(self.target, partial=False)
            self._rename()
        except KeyboardInterrupt as error:
            if self._is_worth_keeping():
                raise Interrupted(*error.args) from error
            self._remove()
            raise
        except BaseException:
            self._remove()
            raise
        self._leave()

    def _rename(self) -> None:
        own = os.stat(self.path)
        try:
            os.rename(self.path, self.target)
        except OSError:  # a network filesystem may have done it, and lost the answer
            now = sources.status(self.target)
            if now is None or not os.path.samestat(own, now):
                raise

    def _leave(self) -> None:
        """Syncs the rename and removes the journal; the target exists, whatever fails."""
        try:
            _sync(os.path.dirname(self.target))
        except OSError as error:
            self.warnings.append(
                f"{self.target} is complete, but a power loss may still undo its rename: "
                f"{error.strerror} while its folder was synced; run `sync`"
            )
        try:
            remove_empty(self.folder)
        except OSError as error:
            self.warnings.append(
                f"{self.target} is complete, but {self.folder} could not be removed "
                f"({error.strerror}): {removal(self.folder)}"
            )

    def _is_worth_keeping(self) -> bool:
        """Whether this run, or the one that it continues, did so much that it may be continued."""
        worked = time.monotonic() - self._started
        continues = not self.journal.is_new or not self.sharing.is_alone
        return bool(self.identity.files) and (continues or worked > WORTH_KEEPING)

    def _remove(self) -> None:
        """Removes what was written; first the journal forgets it, since a kill may end this."""
        if self.sharing.part:
            return
        with suppress(OSError):
            self.journal.forget()
        _remove_folder(self.path, ignore_errors=True)
        with suppress(OSError):
            remove_empty(self.folder)


def save(path: str, data: bytes) -> None:
    """Writes a file whole or not at all; follows no link that another user has put there."""
    partial = f"{path}.{os.urandom(4).hex()}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
        try:
            with sources.naming(path):
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    _sync(os.path.dirname(os.path.abspath(path)))


def make_folders(path: str) -> None:
    """Creates a directory and those above it; a power loss leaves all of them or the first ones."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
        _sync(os.path.dirname(folder))


def _remove_folder(path: str, ignore_errors: bool = False) -> None:
    import shutil  # with all its archives it takes 2 ms, and few runs remove anything

    shutil.rmtree(path, ignore_errors)


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with sources.naming(path):
            os.fsync(file)
    finally:
        sources.close(file)
