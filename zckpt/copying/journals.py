"""Journals of several processes that write one target.

The run has a file named `journal`. Beside this file, each part of the run and each further process
has its own journal, such as `journal-2-of-8`, so that no process waits for another.

The lock of the file `journal` shows which processes are at work. A process that leads others holds
it as an exclusive lock. The parts of a run (--part K/N), which do not communicate, hold it as a
shared lock. A part that has written its regions asks for the exclusive lock: only the last part
gets it, and completes the target.

The first line of the file `journal` identifies the run. If the line is missing and no other part is
at work, a part writes the line. A part that finds the line of another run fails. Only after this
check does a part write into its own journal. So even if a part of another run is killed, its
journal is empty.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

from ..core.storage.checksum import crc32
from ..core.storage.fileio import sync_data
from ..core.storage.folder import JOURNAL, Folder, lock
from ..core.storage.sources import close, naming, pread
from ..errors import ProcessLost, TargetExists
from . import filling
from .journal import (
    Identity,
    Journal,
    Region,
    in_use,
    lines_in,
    lines_of,
    locked_in_time,
    regions_in,
)

VISIBLE = 30.0  # seconds in which a network filesystem shows what another node has synced
COMPLETING = 60.0  # seconds that a new part waits for a part that completes the target
LOOKING = 0.5  # seconds within which a command that only tests the lock releases it


class PartJournal(Journal):
    """The journal of one part of a run, if the parts do not communicate (--part K/N).

    `regions` are what all parts have written so far. `chunk`, the bytes copied in one step, is
    rounded to a power of two: then all parts cut files into the same regions, however much memory
    each has.
    """

    _is_new_part = False

    def __init__(self, folder: Folder, identity: Identity, chunk: int, part: str) -> None:
        self._name = f"{JOURNAL}-{part}"
        power = 1 << chunk.bit_length() - 1 if chunk else 0
        super().__init__(folder, identity, min(power, filling.REGION))

    def _begin(self) -> None:
        with suppress(FileNotFoundError):  # without a lock, which would disturb a part that ends
            self._compare(JOURNAL)
        self._file = self._locked()
        self._whole = self._shared()
        self._write_header(self._file)
        # if another node does not see locks, it sees this journal by now, or is seen here
        for file in (self._whole, *self._opened_parts()):
            self._read(file)

    def _compare(self, name: str) -> None:
        """Raises TargetExists if the journal `name` is of another run.

        Raises FileNotFoundError if there is no such journal.
        """
        with self.folder.opened(self._path(name)) as file:
            for header in lines_of(file)[:1]:
                self._compared(header)

    def _locked(self) -> int:
        """Opens and locks this part's journal; raises TargetExists if another process locks it."""
        while True:
            file = self._opened(self._name)
            if not lock(file):
                raise TargetExists(
                    "target-being-written",
                    f"{self.folder.path}: another process is writing this part",
                    hint="wait for the other process, or end it; start each part only once",
                    file=self.folder.path,
                )
            if self._is_at(file, self._path(self._name)):
                self._is_new_part = not lines_of(file)
                return file
            close(self._files.pop())  # a process that stopped has removed it

    def _shared(self) -> int:
        """Opens the file `journal` and takes a shared lock.

        Waits while another process holds the exclusive lock. Raises TargetExists after COMPLETING
        seconds, or if another run has written the file.
        """
        end = time.monotonic() + COMPLETING
        while True:
            file = self._opened(JOURNAL)
            if lock(file) and self._is_at(file, self.path):
                self._fix(file)
            # flock releases the first lock before it takes the second one
            if lock(file, fcntl.LOCK_SH) and self._is_at(file, self.path):
                for header in lines_of(file)[:1]:
                    self._compared(header)
                    return file
            close(self._files.pop())
            if time.monotonic() > end:
                raise in_use(self.folder.path)
            time.sleep(0.1)

    def _fix(self, file: int) -> None:
        """Writes the identity of this run as the first line of `journal`, if the line is missing.

        This part must hold the exclusive lock. Raises TargetExists if another run has left a
        journal there.
        """
        for name in self._names():
            with suppress(FileNotFoundError):
                self._compare(name)
        self._write_header(file)

    def _write_header(self, file: int) -> None:
        """Removes a damaged end of this journal, and writes the first line if it is missing.

        The first line is missing if a process was stopped while it began.
        """
        lines = lines_of(file)
        for header in lines[:1]:
            self._compared(header)
        os.ftruncate(file, sum(map(len, lines)))
        if not lines:
            self._append(self._header(), file)
            sync_data(file)

    def _opened_parts(self) -> list[int]:
        """Opens the journals of all parts, except those that are just being removed."""
        files = []
        for name in self._names():
            with suppress(FileNotFoundError):
                files.append(self._opened(name, 0))
        return files

    def _take_back(self) -> None:
        """Removes this part's journal, unless an earlier process has written lines into it."""
        if self._is_new_part:
            self.folder.unlink(self._path(self._name))

    def of_all_parts(self) -> list[Region] | None:
        """The regions of all parts, if this part ends last and so must complete the target.

        None if another part is still at work, or has completed the target.
        """
        with naming(self.path):
            sync_data(self._file)
        with suppress(OSError):
            # two parts that end now must not wait for each other
            fcntl.flock(self._whole, fcntl.LOCK_UN)
        if not locked_in_time(self._whole, LOOKING) or not self._is_at(self._whole, self.path):
            return None
        files = [self._whole, *self._opened_parts()]
        return [region for file in files for region in regions_in(lines_of(file))]


class ProcessJournal(Journal):
    """The journal of a process that shares a run with others; the leader holds the lock.

    `begun` is the length and the CRC-32 of the leader's journal when this process joined. `regions`
    and `chunk` are read from these bytes.
    """

    def __init__(
        self, folder: Folder, identity: Identity, part: str, begun: tuple[int, int]
    ) -> None:
        self._name = f"{JOURNAL}-{part}"
        self._begun = begun
        super().__init__(folder, identity, 0)

    def _begin(self) -> None:
        self._take(lines_in(_shown(self.folder, JOURNAL, *self._begun)))
        self._file = self._opened(self._name, os.O_CREAT | os.O_EXCL)
        lock(self._file)
        self._append(self._header())


def regions_of(folder: Folder, part: str, length: int, crc: int) -> list[Region]:
    """Reads the regions that another process has recorded in its journal, named `part`.

    The other process has synced the first `length` bytes, and has sent `length` and their CRC-32
    (`crc`). Raises ProcessLost if the bytes do not appear in time.
    """
    return regions_in(lines_in(_shown(folder, f"{JOURNAL}-{part}", length, crc)))


def _shown(folder: Folder, name: str, length: int, crc: int) -> bytes:
    """Reads the bytes of a journal that another process has synced; waits until they appear.

    A network filesystem may show them late. Raises ProcessLost after VISIBLE seconds.
    """
    path = os.path.join(folder.path, name)
    end = time.monotonic() + VISIBLE
    while True:
        with suppress(FileNotFoundError), folder.opened(path, os.O_RDONLY) as file:
            if 0 <= length <= os.fstat(file).st_size:
                data = pread(file, length, 0)
                if crc32(data) == crc:
                    return data
        if time.monotonic() > end:
            raise ProcessLost(
                "shared-files-differ",
                f"{path} does not contain what another process wrote there",
                hint="all nodes must see the same files: check the mounts of both nodes; then "
                "repeat the command with --resume",
            )
        time.sleep(0.1)
