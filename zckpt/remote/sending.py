"""Sends a target to a store, completely or not at all.

The target is written on this machine first, in a folder of TMPDIR named after its URL (`outgoing`
in upload.py). A run that was stopped continues there. Then its files are sent in this order:

    URL/zckpt-unfinished.json   first: the files of this run, for --resume and clean-up
    all other files             the size and the bytes of each stored object are compared
    the last file               manifest.json, .metadata, latest, ...: never overwrites an object

Without the last file no reader recognizes the rest as a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct, field, to_builtins

from ..core.passes.resources import Begin
from ..core.storage.checksum import crc32
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent
from ..core.storage.sources import walk
from ..core.storage.unfinished import Note
from ..core.version import __version__
from ..errors import CorruptCheckpoint, Notice, TargetExists, ZckptError, warning
from . import failures, upload
from .mirror import UNFINISHED
from .stores import PART, Store, StoredObject, etag_of, store_of
from .upload import names_at, order
from .urls import Url

SMALL = 64 << 20  # bytes; a last file up to this size is put on condition that it does not exist
BLOCK = 8 << 20  # bytes that are read back at a time
AT_ONCE = 8  # small files that are sent in parallel
NOTED = 5.0  # seconds between two updates of the note
EXISTS = ("AlreadyExistsError", "FileExistsError", "TargetExists")
NO_CONDITION = ("NotImplementedError", "NotSupportedError")
"""Names of the errors of store libraries if a store supports no conditional put.

A conditional put fails if the object exists: `EXISTS` names the errors that say so.
"""


class Sums(Struct):
    """The checksums of a file, computed while it is sent: its CRC-32, and the MD5 of each part."""

    crc: int = 0
    size: int = 0
    digests: list[bytes] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        import hashlib

        self.crc = crc32(data, self.crc)
        self.size += len(data)
        self.digests.append(hashlib.md5(data, usedforsecurity=False).digest())


def send(path: str, url: Url, run: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a complete target (the local folder `path`) to a store, and removes the folder.

    Files that an earlier run of this conversion has sent are not sent again.

        run      a text that identifies the conversion; it is stored with the objects
        words    the arguments of the conversion

    Returns three keys for the report: `sent` (the number of files), `read_back` (how many of them
    were read again to compare them) and `store_notes` (warnings). Raises StoreError, TargetExists
    if another program writes there meanwhile, and CorruptCheckpoint if bytes change on the way.
    """
    sizes = {
        os.path.relpath(file.path, path): file.stat().st_size
        for file in walk(path)
        if file.is_file(follow_symlinks=False)
    }
    *first, last = sorted(sizes, key=order)
    sending = _Sending(store_of(url), url, path, run, words.get("read_back", True))
    begin: Begin | None = words.get("begin")
    progress = begin(sum(sizes.values())) if begin else lambda size: None

    def one(name: str) -> None:
        if name not in done:
            sending.note(name, sending.put(name))
        progress(sizes[name])

    try:
        done = sending.begin(sizes, last)
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for result in [pool.submit(one, name) for name in first if sizes[name] <= PART]:
                    result.result()
            for name in first:
                if sizes[name] > PART:
                    one(name)
            if before := words.get("before_rename"):
                before()
            if last not in done:
                sending.commit(last, sizes[last])
        except BaseException:
            with suppress(Exception):  # the first error is more informative
                sending.state()
            raise
        sending.store.delete([sending.key(UNFINISHED)])
    except ZckptError:
        raise
    except Exception as error:
        raise failures.explained(error, url, "write") from error
    progress(sizes[last])
    shutil.rmtree(path)
    return {"sent": len(sizes), "read_back": sending.again, "store_notes": sending.notes}


class _Sending(Struct, dict=True):
    """One upload of a target from the local folder `path` to `url`.

    run          identifies the conversion; stored with the objects as their mark
    read_back    whether to read files again if the store states no MD5
    again        the number of files that were read again
    notes        warnings for the report
    """

    store: Store
    url: Url
    path: str
    run: str
    read_back: bool
    again: int = 0
    notes: list[Notice] = field(default_factory=list)

    def key(self, name: str) -> str:
        return f"{self.url.key}/{name}"

    def begin(self, sizes: dict[str, int], last: str) -> set[str]:
        """Writes zckpt-unfinished.json to the store; returns the names of files already sent.

        Raises TargetExists if another program has written there.
        """
        self.target = Note(sizes, last, zckpt=__version__)
        self._noting, self._noted = threading.Lock(), time.monotonic()
        there = names_at(self.url)
        if UNFINISHED in there:
            earlier = upload.note_of(self.url, self.store, there[UNFINISHED])
            for name, crc in earlier.sent.items():
                is_there = name in there and there[name].size == sizes.get(name)
                if is_there and crc == _crc_of(os.path.join(self.path, name)):
                    self.target.sent[name] = crc
        if last in there:
            is_whole = all(name in there and there[name].size == sizes[name] for name in sizes)
            if is_whole and UNFINISHED in there and self._is_ours(last):
                return {*sizes}  # the earlier run was stopped before it removed the note
            raise self._preceded(last)
        try:
            self.state(create=UNFINISHED not in there)
        except Exception as error:
            if type(error).__name__ not in EXISTS:
                raise
            raise self._preceded(UNFINISHED) from error
        return {*self.target.sent}

    def state(self, create: bool = False) -> None:
        """Writes zckpt-unfinished.json, the note with the progress so far, to the store.

        With `create` it must not replace another run's note.
        """
        with tempfile.NamedTemporaryFile() as file:
            file.write(json.dumps(to_builtins(self.target)).encode())
            file.flush()
            self._put(UNFINISHED, file.name, create)

    def _put(self, name: str, path: str, create: bool) -> tuple[Sums, str | None]:
        """Sends a file; returns its checksums, and the ETag of the stored object.

        With `create` the file must not replace an object, if the store supports that.
        """
        sums, key = Sums(), self.key(name)
        try:
            return sums, self.store.put(key, path, sums.add, create, self.run)
        except Exception as error:
            if not create or type(error).__name__ not in NO_CONDITION:
                raise
            if self.store.head(key) is not None:
                raise self._preceded(name) from error
            message = (
                f"the store cannot refuse to overwrite {self.url}/{name}: zckpt only checked "
                "before the upload that there was no such file"
            )
            self.notes.append(
                warning("store-without-condition", message, file=f"{self.url}/{name}")
            )
            sums = Sums()
            return sums, self.store.put(key, path, sums.add, False, self.run)

    def _preceded(self, name: str) -> TargetExists:
        return TargetExists(
            "target-exists",
            f"{self.url}/{name} was written by another program meanwhile",
            hint=f"look at it first: zckpt inspect {self.url}",
            file=str(self.url),
        )

    def note(self, name: str, crc: int) -> None:
        """Records in zckpt-unfinished.json that a file has arrived and was compared.

        The note is sent to the store only if it was last sent more than NOTED seconds ago.
        """
        with self._noting:
            self.target.sent[name] = crc
            if time.monotonic() - self._noted > NOTED:
                self.state()
                self._noted = time.monotonic()

    def put(self, name: str, create: bool = False) -> int:
        """Sends one file, and compares it with the stored one; returns the CRC-32."""
        sums, etag = self._put(name, os.path.join(self.path, name), create)
        stored = self.store.head(self.key(name))
        if stored is None or stored.size != sums.size:
            there = "nothing" if stored is None else f"{stored.size} bytes"
            raise self._lost(
                name, f"the store has {there} instead of {sums.size} bytes", etag, stored
            )
        md5 = etag_of(sums.digests)
        if {md5} == {(each or "").strip('"') for each in (etag, stored.etag)}:
            return sums.crc  # the store itself has computed this MD5
        if self.read_back:
            self.again += 1
            if self._stored_crc(stored) != sums.crc:
                raise self._lost(name, "the store has other bytes", etag, stored)
        elif not any(notice.code == "checksum-missing" for notice in self.notes):
            message = (
                f"the uploaded bytes were not compared: the store of {self.url} states no MD5, and "
                "--no-read-back was given"
            )
            self.notes.append(warning("checksum-missing", message, file=str(self.url)))
        return sums.crc

    def _stored_crc(self, stored: StoredObject) -> int:
        crc = 0
        for start in range(0, stored.size, BLOCK):
            stop = min(start + BLOCK, stored.size)
            crc = crc32(
                failures.asked(partial(self.store.read, stored, start, stop), self.url), crc
            )
        return crc

    def _is_ours(self, name: str) -> bool:
        """Whether the stored object equals the local file, and was not sent by another run.

        Each run stores a text, its mark, with its objects, if the store supports that.
        """
        stored, path = self.store.head(self.key(name)), os.path.join(self.path, name)
        if stored is None or stored.size != os.path.getsize(path):
            return False
        by_us = self.store.mark(stored) in (None, self.run)
        return by_us and self._stored_crc(stored) == _crc_of(path)

    def _lost(
        self, name: str, what: str, etag: str | None, stored: StoredObject | None
    ) -> CorruptCheckpoint:
        self.target.lost[:] = [name]
        if name == self.target.last and stored is not None and self._has_sent(stored, etag):
            self.store.delete([self.key(name)])  # it would make the rest look complete
        return CorruptCheckpoint(
            "upload-damaged",
            f"{self.url}/{name} did not arrive intact: {what}",
            hint="start again with --resume: files that have arrived are not sent again",
            file=str(self.url),
        )

    def _has_sent(self, stored: StoredObject, etag: str | None) -> bool:
        """Whether this run has sent the stored object, as its ETag shows.

        If `etag` is None, the run's mark decides, a text stored with each of its objects.
        """
        if etag is not None:
            return etag == stored.etag
        with suppress(Exception):
            return self.store.mark(stored) == self.run
        return False

    def commit(self, name: str, size: int) -> None:
        """Sends the last file; raises TargetExists if another run has sent it before."""
        is_small = size <= SMALL
        if not is_small and self.store.head(self.key(name)) is not None:
            raise self._preceded(name)
        try:
            self.put(name, create=is_small)
        except CorruptCheckpoint:
            raise
        except Exception as error:
            if is_small and self._is_ours(name):
                return  # it has arrived, but the answer was lost
            if type(error).__name__ in EXISTS:
                raise self._preceded(name) from error
            raise


def _crc_of(path: str) -> int:
    return crc_of([Extent(path, 0, os.path.getsize(path))])
