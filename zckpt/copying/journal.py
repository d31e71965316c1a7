"""The journal of an unfinished target: which regions are complete and need not be repeated.

    DST.partial/journal           a line for the run, then a line for every region (byte range of a
                                  file) that is synced, and for every file lost in a power loss
    DST.partial/journal-2-of-3    the journal of one process, if several share the run
    DST.partial/DST/              the files of the target

The first line is the run's `Identity`. Every line begins with the CRC-32 of the rest of it. A power
loss may leave a damaged line; this line and all after it are ignored.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ..core.storage.checksum import crc32
from ..core.storage.fileio import sync_data, write_all
from ..core.storage.folder import JOURNAL, NO_LINK, Folder, lock, mark_file
from ..core.storage.marks import MARK, document, remove_mark_file
from ..core.storage.marks import lines_in as lines_in
from ..core.storage.sources import close, naming, pread
from ..errors import TargetExists, listed, removal

SYNC_EVERY = 1.0  # seconds between two syncs of the journal
ENDING = 5.0  # seconds that a process of an earlier run may need to end

Key = tuple[str, int, int]
"""What a CRC-32 belongs to: its kind, an index, and a place.

    tensor     the index of a pair of tensors; the CRC-32 is that of the target's tensor
    source     the same; the CRC-32 is that of the source's tensor, before it is cast
    file       the index of a target file
    record     the index of a target file, and the index (place) of a record in it
    checked    the index of a record in the source

A record is a byte range with a checksum. The place is 0 for all these kinds but `record`. Items of
the kind `differs` hold a difference of two tensors, not a CRC-32 (see DIFFERS in comparing.py).
"""
Passed = tuple[Key, int, int, int]
"""The CRC-32 of bytes [start, stop) of a tensor, file or record: (key, start, stop, CRC-32)."""


class Identity(Struct, frozen=True):
    """What identifies a conversion, so that no other one continues its unfinished target.

    source     maps each source file to its size and mtime (ns), and "records" to the CRC-32 of all
               checksums that these files state
    options    the user's options, by flag
    files      maps each target file to its size
    version    the version of zckpt
    """

    version: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    def mark(self) -> dict[str, str]:
        """A short form of the identity: the CRC-32 of each of its fields."""
        return {key: f"{crc32(_text(part)):08x}" for key, part in asdict(self).items()}


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describes how an earlier run differs from this one; None if it does not differ.

    Both arguments are the JSON of an `Identity`, or both are its short form (`Identity.mark`).
    """
    for part, words in (
        ("version", "another version of zckpt"),
        ("source", "another source, or the source has changed"),
        ("options", "other options"),
        ("files", "other files"),
    ):
        first, second = before.get(part), now.get(part)
        if first == second:
            continue
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
            if part == "options":
                return f"{words}: {_option(keys[0], first)}, now {_option(keys[0], second)}"
            return f"{words}: {listed(keys, 3)}"
        return words
    return None


def _option(flag: str, options: Mapping[str, Any]) -> str:
    if flag not in options:
        return f"without {flag}"
    return f"{flag} {options[flag]}" if options[flag] is not True else flag


class Region(Struct, frozen=True):
    """A byte range [start, stop) of a target file that is synced, and the CRC-32s of its parts."""

    file: str
    start: int
    stop: int
    passed: Sequence[Passed]


class Journal:
    """The journal in the folder of an unfinished target; it is locked while it is open.

        regions    what an earlier run has written, by file
        is_new     whether there was no earlier run
        chunk      how many bytes a run copies in one step; an earlier run's value is kept

    Raises TargetExists if another run has locked the journal, or if the earlier run had another
    `identity`: another source, other options or the like.
    """

    def __init__(self, folder: Folder, identity: Identity, chunk: int) -> None:
        self.folder = folder
        self.path = os.path.join(folder.path, JOURNAL)
        self.regions: dict[str, list[Region]] = {}
        self.is_new = True
        self.chunk = chunk
        self._identity = identity
        self._lock = threading.Lock()
        self._synced = time.monotonic()
        self._files: list[int] = []
        self._is_locked = False
        try:
            with naming(self.path):
                self._begin()
        except BaseException:
            try:
                with suppress(OSError, TargetExists):
                    self._take_back()  # a run that fails leaves no file in the folder
            finally:
                self.close()
            raise

    def _begin(self) -> None:
        self._file = self._opened(JOURNAL)
        self._is_locked = lock(self._file)
        if not (self._is_locked and self._is_at(self._file, self.path)):
            raise in_use(self.folder.path)
        length = self._read(self._file)
        os.ftruncate(self._file, length)
        # several processes shared the earlier run: their journals are copied into this one
        other_journals = [(name, self._opened(name)) for name in self._names()]
        for _, file in other_journals:
            if not locked_in_time(file, ENDING):
                raise in_use(self.folder.path)
            self._read(file)
        if not length:
            self._append(self._header())
        for name, file in other_journals:
            for region in regions_in(lines_of(file)):
                self.add(region)
            sync_data(self._file)
            self.folder.unlink(self._path(name))

    def _take_back(self) -> None:
        """Removes the journal if this run created it and the folder has no other file.

        The lock must still be held.
        """
        is_ours = self._is_locked and self._is_at(self._file, self.path)
        if is_ours and self.is_new and self.folder.names() == [JOURNAL]:
            self.folder.unlink(self.path)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder.path, name)

    def _opened(self, name: str, more: int = os.O_CREAT) -> int:
        flags = os.O_RDWR | os.O_APPEND | more
        self._files.append(self.folder.open(self._path(name), flags, 0o600))
        return self._files[-1]

    def _is_at(self, file: int, path: str) -> bool:
        """Whether `path` still leads to this open file; another run may have removed it."""
        now = self.folder.status(path)
        return now is not None and os.path.samestat(os.fstat(file), now)

    def _names(self) -> list[str]:
        return [name for name in self.folder.names() if name.startswith(f"{JOURNAL}-")]

    def _header(self) -> dict[str, Any]:
        return {"run": asdict(self._identity), "chunk": self.chunk}

    def _read(self, file: int) -> int:
        """Reads the regions from a journal; returns the number of its intact bytes.

        A damaged line, and all after it, are ignored.
        """
        lines = lines_of(file)
        self._take(lines)
        return sum(map(len, lines))

    def _take(self, lines: Sequence[bytes]) -> None:
        if lines:
            is_new, self.is_new = self.is_new, False
            document = self._compared(lines[0])
            if is_new:
                self.chunk = document["chunk"]  # the earlier run's regions depend on it
        for region in regions_in(lines):
            self.regions.setdefault(region.file, []).append(region)

    def _compared(self, header: bytes) -> dict[str, Any]:
        """Parses the first line of a journal; raises TargetExists if it is another run's."""
        document: dict[str, Any] = json.loads(header[9:])
        if reason := difference(document["run"], asdict(self._identity)):
            raise not_continued(self.folder.path, reason)
        return document

    def begin_again(self, name: str) -> None:
        """Records that a file was lost, before the caller creates it again.

        Otherwise a later run would take the new file's holes for regions that were written before.
        Returns when the line is synced.
        """
        del self.regions[name]
        self._append([name])
        with naming(self.path):
            sync_data(self._file)

    def add(self, region: Region) -> None:
        """Records a region; its bytes must be synced to the disk."""
        passed = [[*key, start, stop, crc] for key, start, stop, crc in region.passed]
        self._append([region.file, region.start, region.stop, passed])

    def _append(self, document: Any, file: int | None = None) -> None:
        text = _text(document)
        line = memoryview(b"%08x %s\n" % (crc32(text), text))
        with self._lock, naming(self.path):
            while line:
                line = line[os.write(self._file if file is None else file, line) :]
            if time.monotonic() - self._synced > SYNC_EVERY:
                sync_data(self._file)
                self._synced = time.monotonic()

    def synced(self) -> tuple[int, int]:
        """Syncs the journal to the disk; returns its length in bytes and its CRC-32."""
        with naming(self.path):
            sync_data(self._file)
            data = pread(self._file, os.fstat(self._file).st_size, 0)
        return len(data), crc32(data)

    def forget(self) -> None:
        """Empties the journal; call this before the files that it lists are removed."""
        for name in self._names():
            self.folder.unlink(self._path(name))
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Closes the files, which releases the locks."""
        while self._files:
            close(self._files.pop())


def not_continued(folder: str, reason: str) -> TargetExists:
    """Makes the error for an unfinished target of a run with another source or other options.

    `reason` says what differs: it continues the message after "it was begun with".
    """
    return TargetExists(
        "target-not-resumable",
        f"{folder} cannot be continued: it was begun with {reason}",
        hint=f"use the same zckpt, source and options as before, or remove it: {removal(folder)}",
        file=folder,
    )


def in_use(folder: str) -> TargetExists:
    return TargetExists(
        "target-being-written",
        f"{folder} belongs to another run, which is writing there now",
        hint="wait for that run, or choose another target",
        file=folder,
    )


def regions_in(lines: Sequence[bytes]) -> list[Region]:
    """Parses the regions (finished byte ranges of files) in a journal's lines.

    A later line may say that a file was lost; the earlier regions of this file are dropped.
    """
    regions: dict[str, list[Region]] = {}
    for line in lines[1:]:
        document = json.loads(line[9:])
        # the header of a part on another node, whose lock is not visible here
        if isinstance(document, dict):
            continue
        name, *rest = document
        if not rest:
            regions.pop(name, None)
            continue
        start, stop, passed = rest
        checksums = [((kind, a, b), *part) for kind, a, b, *part in passed]
        regions.setdefault(name, []).append(Region(name, start, stop, checksums))
    return list(chain.from_iterable(regions.values()))


def locked_in_time(file: int, seconds: float) -> bool:
    """Tries to lock a file for up to `seconds`; returns False if another process still holds it.

    The process that holds the lock may be just ending.
    """
    end = time.monotonic() + seconds
    while not (is_locked := lock(file)) and time.monotonic() < end:
        time.sleep(0.05)
    return is_locked


def is_locked(folder: Folder) -> bool:
    """Whether another run is writing into this folder of an unfinished target."""
    try:
        file = folder.open(os.path.join(folder.path, JOURNAL), os.O_RDWR)
    except (OSError, TargetExists):
        return False
    try:
        return not lock(file)
    finally:
        close(file)


def lines_of(file: int) -> list[bytes]:
    """Reads the lines of an open journal, up to the first damaged one."""
    return lines_in(pread(file, os.fstat(file).st_size, 0))


# -- the run of a complete target


def set_mark(
    folder: Folder, above: Folder, target: str, identity: Identity, beside: bool = True
) -> bool:
    """Marks `folder`, which will become the directory `target`, as written by this run.

    A later run of the same conversion recognizes a complete target by the mark: an extended
    attribute, or else a hidden file in the directory `above`. Returns False, without a mark, if
    only the file is possible and `beside` is False.
    """
    try:
        os.setxattr(folder.file, MARK, _text(identity.mark()))
    except (AttributeError, OSError):  # the filesystem, or Python on macOS, has no attributes
        if beside:
            set_mark_file(above, target, identity)
        return beside
    return True


def set_mark_file(above: Folder, target: str, identity: Identity) -> None:
    """Writes the mark of a target, which identifies its run, to a hidden file beside the target.

    `above` is the directory that contains the target. If something else is at the path of the
    hidden file, no mark is written.
    """
    path = mark_file(target)
    with suppress(PermissionError, IsADirectoryError, FileExistsError):
        with suppress(FileNotFoundError):
            remove_mark_file(above, target)
        with above.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            write_all(file, memoryview(_text(identity.mark())), 0)


def mark_of(target: str) -> dict[str, str]:
    """Reads the mark by which a run has marked its complete target.

    The mark is the result of `Identity.mark`, which identifies the run. It is empty if the target
    has no mark, or one of another user.
    """
    try:
        text = os.getxattr(target, MARK)
    except (AttributeError, OSError):
        try:
            text = _text_beside(target)
        except OSError:
            return {}
    return document(text)


def _text_beside(target: str) -> bytes:
    file = os.open(mark_file(target), os.O_RDONLY | NO_LINK)
    try:
        now = os.fstat(file)
        is_own = stat.S_ISREG(now.st_mode) and now.st_uid == os.stat(target).st_uid
        return pread(file, 1 << 16, 0) if is_own else b""
    finally:
        close(file)
