"""Makes a target directory appear completely or not at all.

Everything is written into a folder within `<target>.partial` and synced to the disk. One rename
makes that folder the target. Files that are copied unchanged are first written to a subfolder
`.zckpt`: the target's reader must not find them while they have holes. A run that fails removes
what it wrote. A run that is killed, or is interrupted after some work, leaves `.partial` with its
journal, and can be continued.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain

from ..core.checkpoint.manifest import Sibling
from ..core.checkpoint.siblings import CACHE
from ..core.passes.layout import Shell
from ..core.passes.streaming import carry_out_all
from ..core.storage.fileio import sync_folder, write_all
from ..core.storage.filenames import path_inside
from ..core.storage.folder import Folder, has_locks
from ..errors import Interrupted, Notice, TargetExists, removal, warning
from .comparing import is_row
from .journal import Identity, Journal, set_mark, set_mark_file
from .journals import PartJournal
from .sharing import ALONE, Sharing
from .targets import refuse_existing, refuse_strange, remove_empty, stopped
from .without_locks import LonelyJournal, clear, new_writer, refusal

WORTH_KEEPING = 10.0  # seconds of work
NEAR = 4 << 10  # bytes; parts nearer to each other are written together
AT_ONCE = 256 << 10  # bytes
ATTEMPTS = 20  # attempts to begin in a folder that ending runs remove meanwhile


class Staging:
    """A context manager that makes a target directory appear completely or not at all.

    The `with` block writes below `staging.root`, a folder in `<target>.partial`. At the end of the
    block, this folder is renamed to the target.

        identity         the run: its source, options and target files
        chunk            the number of bytes that a thread copies in one step
        resume           continue `<target>.partial` of an earlier run with this identity
        before_rename    called just before the target gets its name
        sharing          which other processes write this target
        above            the folder that gets the target, if another unfinished target contains it
        begins_anew      on a filesystem without locks, `resume` starts from the beginning
        warnings         failures after the rename, and unfinished targets of other runs

    Raises TargetExists if the target exists, or if `<target>.partial` exists and this run may not
    continue it. Raises WrongOption for `resume` or --part without locks. Raises Interrupted for a
    KeyboardInterrupt after some work; the written files are then kept.
    """

    def __init__(
        self,
        target: str,
        identity: Identity | None = None,
        chunk: int = 0,
        resume: bool = False,
        before_rename: Callable[[], None] | None = None,
        sharing: Sharing = ALONE,
        above: Folder | None = None,
        begins_anew: bool = False,
    ) -> None:
        self.target = os.path.abspath(target)
        self.partial = f"{self.target}.partial"
        self.has_locks = True
        self.identity = identity or Identity()
        self.resume = resume
        self.before_rename = before_rename
        self.sharing = sharing
        self.warnings: list[Notice] = []
        self._given = above
        self._begins_anew = begins_anew
        self._is_postponed = False
        self._is_shared = False
        self._chunk = chunk
        self._started = time.monotonic()

    @property
    def path(self) -> str:
        """The directory that becomes the target."""
        return os.path.join(self.partial, os.path.basename(self.target))

    def __enter__(self) -> Staging:
        refuse_existing(self.target, partial=not self.resume)
        with ExitStack() as stack:
            self._open(stack)
            try:
                self._prepare(stack)
            except BaseException:
                if self.journal.is_new:
                    self._remove()
                raise
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        if self._given is None:
            make_folders(os.path.dirname(self.target))
            self.above = stack.enter_context(Folder.at(os.path.dirname(self.target)))
        else:
            self.above = self._given
        self.has_locks = has_locks(self.above)
        if not self.has_locks:
            self._go_alone()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with ExitStack() as begun:
                    self._begin(begun)
                    stack.push(begun.pop_all())
                return
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE) or attempt == ATTEMPTS:
                    raise

    def _go_alone(self) -> None:
        """Chooses a directory name that no other run uses; for a filesystem without locks.

        Removes unfinished targets of processes that have ended. Raises WrongOption with --part, and
        with --resume unless the run may start from the beginning.
        """
        if self.sharing.part or (self.resume and not self._begins_anew):
            raise refusal(self.target, self.sharing.part)
        self.resume = False
        self.partial = f"{self.target}.{new_writer()}.partial"
        self.warnings += clear(self.above, os.path.basename(self.target)).warnings()

    def _begin(self, stack: ExitStack) -> None:
        # others must not put files there; the target inside gets the usual permissions
        is_ours = self.above.make(self.partial, 0o700)
        try:
            self.folder = stack.enter_context(self.above.own_folder(self.partial))
            is_ours = True
            refuse_strange(self.folder, os.path.basename(self.target))
            self.folder.refuse_foreign()
            self.journal = self._journal()
            stack.callback(self.journal.close)
            self._refuse_meanwhile()
        except BaseException:
            if is_ours:
                with suppress(OSError, TargetExists):  # only if it is empty: another run may use it
                    self.above.rmdir(self.partial)
            raise

    def _journal(self) -> Journal:
        about = self.folder, self.identity, self._chunk
        if self.sharing.part:
            return PartJournal(*about, self.sharing.part)
        return Journal(*about) if self.has_locks else LonelyJournal(*about)

    def _refuse_meanwhile(self) -> None:
        """Raises TargetExists if another run wrote or began this target since this run began."""
        try:
            refuse_existing(self.target, partial=False)
            if not (self.resume or self.journal.is_new):
                raise stopped(self.partial)
        except BaseException:
            if self.journal.is_new or self.sharing.part:
                with suppress(OSError):
                    remove_empty(self.folder, self.above)
            raise

    def _prepare(self, stack: ExitStack) -> None:
        """Prepares the folder of the target's files before the first file is written.

        If there is no journal of an earlier run, files in the folder are removed. If a file that
        the journal lists was lost, its regions are forgotten.
        """
        # first, so that even after a power loss the folder has no files without the journal
        self.folder.sync(self.partial)
        if self.journal.is_new and not self.sharing.part:
            self.folder.remove(self.path)
        self.folder.make(self.path)
        self.root = stack.enter_context(self.folder.inner(self.path))
        self._take_back()
        if self.sharing.part:
            return
        for name, regions in list(self.journal.regions.items()):
            if is_row(name):  # no file
                continue
            now = self.root.status(os.path.join(self.path, name))
            size = now.st_size if now else 0
            if any(region.stop > size for region in regions):
                self.journal.begin_again(name)

    @property
    def resumed(self) -> int:
        """The number of bytes that an earlier run has written."""
        regions = chain.from_iterable(self.journal.regions.values())
        return sum(each.stop - each.start for each in regions if not is_row(each.file))

    def lay(self, shells: Iterable[Shell], mode: int = 0o666) -> None:
        """Creates the target's files with headers, and holes where tensors go; holes take no space.

        The umask applies to `mode`.
        """
        self._lay(shells, mode)

    def _lay(self, shells: Iterable[Shell], mode: int) -> None:
        for shell in shells:
            # if the run is continued, tensors may be there already
            near = 0 if self.resume else NEAR
            with self._created(shell.name, mode) as file:
                os.ftruncate(file, shell.size)
                for offset, data in with_neighbors(shell.parts, near):
                    write_all(file, memoryview(data), offset)
        # no process may find a file missing whose regions it has noted
        if not self.sharing.is_alone:
            for path, now in self.root.walk():
                if stat.S_ISDIR(now.st_mode):
                    self.root.sync(path)
            self.root.sync(self.path)

    def share(self) -> None:
        """Lets other processes write to the target; from now on this process removes nothing."""
        self._is_shared = not self.sharing.is_alone
        self.sharing.begin(self.journal)

    def postpone(self) -> None:
        """Keeps all files at the end of the block, because another process completes the target."""
        self._is_postponed = True

    def _created(self, name: str, mode: int) -> AbstractContextManager[int]:
        """Creates and opens a file of the target; it may exist only if an earlier run is continued.

        OSErrors name the file.
        """
        path = os.path.normpath(path_inside(self.path, name, "the source"))
        flags = os.O_RDWR | os.O_CREAT | (0 if self.resume else os.O_EXCL)
        return self.root.opened(path, flags, mode)

    def lay_beside(self, siblings: Sequence[tuple[str, Sibling]]) -> None:
        """Creates a file without data below `.zckpt` for each file that is copied unchanged.

        The copy fills these files, and `put` moves them to their places. `siblings` has the name of
        each file in the target, and the source file.
        """
        for name, _ in siblings:
            path_inside(self.path, name, "the source")
        self._lay((Shell(waiting("", name), own.size, ()) for name, own in siblings), 0o600)

    def put(self, name: str, source: str) -> str:
        """Moves the copy of an unchanged file out of `.zckpt`, to its place in the target.

        The copy gets the permissions of the original file, `source`. Returns the new path.
        """
        path, place = waiting(self.path, name), os.path.join(self.path, name)
        with self.root.opened(path) as file:
            self.root.move(path, self.root, place, makes=True)
            os.utime(file)  # give all files one time, however long the copy took
            os.fchmod(file, os.stat(source).st_mode & 0o777)  # last, since it may forbid writing
        return place

    def _take_back(self) -> None:
        """Moves unchanged copies of files back to `.zckpt`, if an earlier run has moved them out.

        They may have holes, which readers of the target's other files must not find.
        """
        for name in self.journal.regions:
            place = os.path.join(self.path, name.removeprefix(waiting("", "")))
            if name.startswith(waiting("", "")) and self.root.status(place):
                with suppress(FileNotFoundError):  # another part may do the same
                    with self.root.opened(place) as file:
                        os.fchmod(file, 0o600)
                    self.root.move(place, self.root, os.path.join(self.path, name), makes=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        try:
            if kind is None:
                if not self._is_postponed:
                    self._complete()
            elif issubclass(kind, KeyboardInterrupt) and self._is_worth_keeping():
                raise Interrupted(*error.args if error else ()) from error
            else:
                self._remove()
        finally:
            self._stack.close()

    def _complete(self) -> None:
        try:
            carry_out_all([path for path, _ in self.root.walk()], self.root.sync)
            about = self.root, self.above, self.target, self.identity
            is_marked = set_mark(*about, beside=self.has_locks)
            self.root.sync(self.path)
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
        self._leave(is_marked)

    def _rename(self) -> None:
        status_of_root = self.root.itself()
        self.root.close()  # some network filesystems rename no directory that is open
        try:
            self.folder.move(self.path, self.above, self.target)
        except OSError:  # a network filesystem may have renamed it and lost the answer
            now = self.above.status(self.target)
            if now is None or not os.path.samestat(status_of_root, now):
                refuse_existing(self.target, partial=False)  # another run may have been faster
                raise

    def _leave(self, is_marked: bool) -> None:
        """Ends the run after the rename of the target: syncs the rename, and removes the journal.

        Failures are only warnings, because the target is complete.
        """
        try:
            # without locks, only after the rename: another run's rename might have come first
            if not is_marked:
                set_mark_file(self.above, self.target, self.identity)
            self.above.sync(self.above.path)
        except OSError as error:
            message = (
                f"{self.target} is complete, but a power loss may still undo its rename: "
                f"{error.strerror} while its folder was synced; run `sync`"
            )
            self.warnings.append(warning("target-not-synced", message, file=self.target))
        try:
            remove_empty(self.folder, self.above)
        except OSError as error:
            message = (
                f"{self.target} is complete, but {self.partial} could not be removed "
                f"({error.strerror}): {removal(self.partial)}"
            )
            self.warnings.append(warning("target-not-synced", message, file=self.partial))

    def _is_worth_keeping(self) -> bool:
        """Whether an interrupted run keeps `<target>.partial`, so that it can be continued.

        It is kept if the run has worked for more than WORTH_KEEPING seconds, continues an earlier
        run, or shares the target with other processes.
        """
        if not self.has_locks:  # no other run can continue it
            return False
        worked = time.monotonic() - self._started
        continues = not self.journal.is_new or not self.sharing.is_alone
        # a run without an identity cannot be recognized later
        return bool(self.identity.files) and (continues or worked > WORTH_KEEPING)

    def _remove(self) -> None:
        """Removes everything that this run has written.

        The journal is emptied first: if the removal is interrupted, no later run trusts the files
        that are left.
        """
        if self.sharing.part or (self._is_shared and self.has_locks):
            return
        with suppress(OSError):
            self.journal.forget()
        with suppress(OSError, TargetExists):
            self.folder.remove(self.path)
            remove_empty(self.folder, self.above)


def with_neighbors(
    parts: Iterable[tuple[int, bytes]], near: int
) -> Iterator[tuple[int, bytearray]]:
    """Merges parts of a file with gaps of less than `near` bytes between them; zeros fill the gaps.

    Each part is an offset and the bytes there.
    """
    start, joined = 0, bytearray()
    for offset, data in parts:
        hole = offset - start - len(joined)
        if joined and 0 <= hole < near and len(joined) < AT_ONCE:
            joined += bytes(hole) + data
        else:
            yield start, joined
            start, joined = offset, bytearray(data)
    yield start, joined


def waiting(root: str, name: str) -> str:
    """The path below `.zckpt` for the copy of an unchanged file, until all files are written."""
    return os.path.join(root, CACHE, name)


@contextmanager
def joined(target: str, writer: str = "") -> Iterator[tuple[Folder, Folder]]:
    """Opens the unfinished target that another process has begun.

    Yields two folders: `<target>.partial`, and the folder inside that will become the target. On a
    filesystem without locks, the first one is `<target>.<writer>.partial`: `writer` identifies the
    other process.
    """
    target = os.path.abspath(target)
    path = f"{target}.{writer}.partial" if writer else f"{target}.partial"
    with (
        Folder.at(os.path.dirname(path)) as above,
        above.own_folder(path) as folder,
        folder.inner(os.path.join(path, os.path.basename(target))) as root,
    ):
        yield folder, root


def make_folders(path: str) -> None:
    """Creates a directory and its missing parents, outermost first, and syncs each to the disk."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(os.path.dirname(folder))
