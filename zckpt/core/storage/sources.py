"""Opens, lists and watches source files.

Every read of a source goes through this module. It takes care of four things:

    a file that changes while it is read    is noticed at every opening, and in the end
    an error of the filesystem              names the file, and never counts as a missing file
    a pipe, a socket or a device            is refused: opening one could block for ever
    a short read                            is continued: only 0 bytes are the end of a file

If the bytes of a file lie elsewhere (`byte_sources`), they are read from their real place.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import BinaryIO, ParamSpec, TypeVar

from msgspec import Struct, field

from ...errors import CorruptCheckpoint, SourceChanged, ZckptError
from . import byte_sources
from .byte_sources import Fingerprint
from .fragments import Record

P = ParamSpec("P")
T = TypeVar("T")
BLOCK = 1 << 20  # bytes of two files that are compared at a time
LOOKS = 9  # the number of times that a search is repeated because something was removed meanwhile

# errors for a path where nothing is: no file, through a file, links in a circle, name too long
NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


# -- which file it is, and whether it stays the same


Fingerprints = Mapping[str, Fingerprint]
"""Maps a file (as in `Extent.file`) to its fingerprint, by which a change is noticed."""


def files_seen(root: str, fingerprints: Fingerprints) -> dict[str, list[int]]:
    """Maps each file's name below `root` to [size, mtime], which are equal on all nodes."""
    return {
        os.path.relpath(file, root): [seen.size, seen.mtime] for file, seen in fingerprints.items()
    }


class Watch(Struct, eq=False):
    """What `watching` has seen of the files that a thread opened.

    first      maps each path to its first fingerprint (size, time etc.)
    changed    the files that had another fingerprint later
    objects    the classes and functions that pickles name
    beside     zip members etc. that no reader needs; None if they are not collected
    """

    first: dict[str, Fingerprint] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    beside: dict[Record, None] | None = None

    def note(self, path: str, status: os.stat_result) -> None:
        fingerprint = Fingerprint.of(status)
        if self.first.setdefault(path, fingerprint) != fingerprint:
            self.changed.add(path)

    def of(self, paths: Iterable[str]) -> dict[str, Fingerprint]:
        """The fingerprints of the files at `paths`; raises SourceChanged if one of them changed.

        Files that are not in `paths` may change, such as a log beside a checkpoint that a reader
        looked at.
        """
        fingerprints = {}
        for path in paths:
            if path in self.changed:
                raise _changed(path)
            fingerprints[path] = self.first.get(path) or Fingerprint.of(os.stat(path))
        return fingerprints


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(keeps_records: bool = False) -> Iterator[Watch]:
    """Inside the block, records the fingerprint of every file that this thread opens.

    If the block raises a ZckptError, and one of the files has changed, SourceChanged is raised
    instead. With `keeps_records`, the block also records zip members that no reader needs, such as
    the version in a torch file; this takes memory.
    """
    # one thread reads a checkpoint's structure, so a context variable is enough; threads that read
    # tensors compare the files with `Files.fingerprints`
    watch = Watch(beside={} if keeps_records else None)
    token = _watch.set(watch)
    try:
        yield watch
    except ZckptError as error:
        _blame_change(watch.first, error)
        raise
    finally:
        _watch.reset(token)


@contextmanager
def unchanged(*fingerprints_read: Fingerprints) -> Iterator[None]:
    """Raises SourceChanged at the end of the block if a file changed since it was read.

    If the block raises an error and a file changed, SourceChanged replaces that error: the bytes of
    a file that changed do not fit together.
    """
    try:
        yield
    except ZckptError as error:
        for fingerprints in fingerprints_read:
            _blame_change(fingerprints, error)
        raise
    for fingerprints in fingerprints_read:
        for path, first in fingerprints.items():
            _check(path, first, status(path))


def _check(path: str, first: Fingerprint | None, now: os.stat_result | None) -> None:
    if now is None:
        raise SourceChanged("source-changed", f"{path} was removed while it was read", file=path)
    if first is not None and first != Fingerprint.of(now):
        raise _changed(path)


def _changed(path: str) -> SourceChanged:
    return SourceChanged("source-changed", f"{path} changed while it was read", file=path)


def _blame_change(fingerprints: Fingerprints, error: ZckptError) -> None:
    for path, first in fingerprints.items():
        try:
            _check(path, first, status(path))
        except OSError:  # the first error says more
            continue
        except SourceChanged as change:
            raise change from error


# -- files that stand in for others


_stand_ins: ContextVar[frozenset[str]] = ContextVar("stand_ins", default=frozenset())


@contextmanager
def standing_in(paths: Iterable[str]) -> Iterator[None]:
    """Inside the block, `is_stand_in` returns True for these paths.

    The files at these paths are copies of another rank's files, in place of lost ones. With them,
    the structure of the checkpoint can be read, and the tensors that are left can be shown.
    """
    token = _stand_ins.set(frozenset(paths))
    try:
        yield
    finally:
        _stand_ins.reset(token)


def is_stand_in(path: str) -> bool:
    """Whether the file at a path is another rank's, in place of a lost file: see `standing_in`."""
    return path in _stand_ins.get()


# -- opening and reading


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the file's name to every OSError inside the block that has none."""
    try:
        yield
    except OSError as error:
        named(error, path)
        raise


def named(error: OSError, path: str) -> OSError:
    """Adds the file's name to the error if it has none; returns the error."""
    if error.filename is None and error.errno is not None:
        error.filename = path
    return error


def open_file(path: str, fingerprints: Fingerprints | None = None) -> int:
    """Opens a source file; the caller closes the descriptor.

    Raises CorruptCheckpoint unless the path leads to a regular file. Raises SourceChanged if the
    file differs from its fingerprint in `fingerprints`. An OSError names the path.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        now = os.fstat(file)
        if not stat.S_ISREG(now.st_mode):
            what = "directory" if stat.S_ISDIR(now.st_mode) else "pipe, a socket or a device"
            hint = "replace it with a copy of the real file"
            raise CorruptCheckpoint(
                "file-damaged", f"{path} is not a regular file: it is a {what}", hint, file=path
            )
        note(path, now)
        if fingerprints is not None:
            _check(path, fingerprints.get(path), now)
    except BaseException as error:
        with suppress(OSError):  # an error of close would hide the one with the name
            os.close(file)
        if isinstance(error, OSError):
            named(error, path)
        raise
    return file


def note(path: str, now: os.stat_result) -> None:
    """Records a file's fingerprint (inode, size and time), if the call is in a `watching` block.

    A later fingerprint of the same path that differs shows that the file has changed.
    """
    watch = _watch.get()
    if watch is not None:
        watch.note(path, now)


def note_objects(names: Iterable[str]) -> None:
    """Records the classes and functions that a pickle names, if the call is in a `watching` block.

    The names are for reports such as that of `zckpt inspect`. A name is recorded even if the pickle
    drops the object that it builds.
    """
    watch = _watch.get()
    if watch is not None:
        watch.objects.update(names)


def note_beside(records: Iterable[Record]) -> None:
    """Records byte ranges that no reader needs, such as the version in a torch file.

    Does nothing unless the call is in a `watching` block with `keeps_records`. `zckpt verify`
    checks the CRC-32s of these byte ranges.
    """
    watch = _watch.get()
    if watch is not None and watch.beside is not None:
        watch.beside.update(dict.fromkeys(records))


def close(file: int) -> None:
    """Closes a file that was only read; errors are ignored, since nothing can be lost."""
    with suppress(OSError):
        os.close(file)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a source file to read; raises as `open_file`.

    OSErrors inside the block name the file.
    """
    try:
        number = open_file(path)
        where = byte_sources.of(number)
        stream = os.fdopen(number, "rb") if where is None else byte_sources.content(number, where)
        with stream as file:
            yield file
    except io.UnsupportedOperation as error:  # Python asks for the position, and hides the errno
        raise OSError(errno.EIO, os.strerror(errno.EIO), path) from error
    except OSError as error:  # as `naming`; there may be 10,000 files
        named(error, path)
        raise


def same_bytes(a: str, b: str) -> bool:
    """Whether two files have the same bytes; reading stops after the first block that differs.

    Raises as `open_file`.
    """
    if size(a) != size(b):
        return False
    with opened(a) as one, opened(b) as other:
        while block := one.read(BLOCK):
            if other.read(BLOCK) != block:
                return False
    return True


def pread(file: int, length: int, offset: int) -> bytes:
    """Reads bytes [offset, offset + length) of a file; fewer only at the end of the file."""
    if (where := byte_sources.of(file)) is not None:
        return where.pread(length, offset)
    data = b""
    while len(data) < length:
        if not (more := os.pread(file, length - len(data), offset + len(data))):
            break
        data = data + more if data else more
    return data


def read_into(file: int, view: memoryview, offset: int) -> int:
    """Reads bytes from `offset` on into `view`; returns their number, perhaps fewer than fit.

    0 means the end of the file.
    """
    if (where := byte_sources.of(file)) is not None:
        return where.read_into(view, offset)
    return os.preadv(file, (view,), offset)


# -- looking


def status(path: str) -> os.stat_result | None:
    """The status (os.stat) of a path, with links followed; None if the path does not exist.

    Raises OSError if that cannot be determined: no permission, a failed disk, a stale mount.
    """
    try:
        return os.stat(path)
    except ValueError:  # a path that no file can have
        return None
    except OSError as error:
        if error.errno in NOTHING:
            return None
        raise


def is_file(path: str) -> bool:
    """Whether `path` leads to a regular file; raises OSError if that cannot be determined."""
    now = status(path)
    return now is not None and stat.S_ISREG(now.st_mode)


def is_folder(path: str) -> bool:
    """Whether `path` leads to a folder; raises OSError if that cannot be determined."""
    now = status(path)
    return now is not None and stat.S_ISDIR(now.st_mode)


def size(path: str) -> int:
    """The size of a file in bytes.

    Inside a `watching` block, the file counts as opened: a change of it is noticed from now on.
    """
    now = os.stat(path)
    note(path, now)
    return now.st_size


# -- listing


def beside(path: str) -> str | None:
    """The name to which a link leads, if that is in the same folder; else None.

    Such a link is a second name of a checkpoint, such as `latest`. None also for links in a circle,
    and for a path that is no link.
    """
    folder, name = os.path.split(path)
    names = [name]
    while os.path.islink(full := os.path.join(folder, names[-1])):
        above, name = os.path.split(os.path.normpath(os.path.join(folder, os.readlink(full))))
        if name in names or os.path.realpath(above) != os.path.realpath(folder):
            return None
        names.append(name)
    return names[-1] if len(names) > 1 else None


def looks_again(look: Callable[P, T]) -> Callable[P, T]:
    """Decorates a search so that it starts again if a file disappears while it runs.

    A run removes its old checkpoints while another program looks for them, and other programs
    remove folders beside them. FileNotFoundError is raised only after several attempts.
    """

    @wraps(look)
    def settled(*args: P.args, **options: P.kwargs) -> T:
        for place in range(LOOKS):
            with suppress(FileNotFoundError), remembering(anew=place > 0):
                return look(*args, **options)
        with remembering(anew=True):
            return look(*args, **options)

    return settled


_listings: ContextVar[dict[str, list[tuple[str, bool]]] | None]
_listings = ContextVar("listings", default=None)


@contextmanager
def remembering(anew: bool = False) -> Iterator[None]:
    """Inside the block, each folder is listed only once: `names` returns the first listing again.

    Every format asks for the names, and a folder may have 50,000 files. A nested block uses the
    lists of the outer one, unless it begins `anew`.
    """
    token = _listings.set({} if anew else _listings.get() or {})
    try:
        yield
    finally:
        _listings.reset(token)


def names(folder: str) -> list[str]:
    """The names in a folder, as by os.listdir; listed only once inside a `remembering` block."""
    return [name for name, _ in _listing(folder)]


def names_but_of_files(folder: str) -> list[str]:
    """The names in a folder that are not regular files: folders, links and so on."""
    return [name for name, is_file in _listing(folder) if not is_file]


def _listing(folder: str) -> list[tuple[str, bool]]:
    listings = _listings.get()
    if listings is not None and folder in listings:
        return listings[folder]
    with os.scandir(folder) as entries:
        listing = [(entry.name, entry.is_file(follow_symlinks=False)) for entry in entries]
    if listings is not None:
        listings[folder] = listing
    return listing


def is_denied(path: str) -> bool:
    """Whether this user may not read a file or list a folder; also True if it has just disappeared.

    A search skips such files: those of other users, such as `lost+found` or a private log, and
    files that another program has removed. Any other OSError is raised.
    """
    try:
        if is_folder(path):
            os.stat(os.path.join(path, "."))  # a folder may be listable, but not enterable
            os.scandir(path).close()
        else:
            close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except (PermissionError, FileNotFoundError):
        return True
    return False


def walk(
    folder: str, enter: Callable[[str], bool] = lambda path: True
) -> Iterator[os.DirEntry[str]]:
    """Yields directory entries of everything below a folder; follows no links.

    The contents of a folder come first, sorted by name, then those of its subfolders, if
    `enter(path)` is true for them. Raises OSError if a folder cannot be listed.
    """
    # os.walk would give names without sizes and kinds
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as items:
            entries = sorted(items, key=lambda item: item.name)
        yield from entries
        inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [path for path in reversed(inside) if enter(path)]
