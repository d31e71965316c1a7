"""Where does the engine find the names of the files that it is going to load?

In a temporary directory of this process: `engine.py` looks there which files exist. They are
shells, with holes where tensors belong. The process locks the directory, so that after a kill the
next start knows that nobody needs it, and removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ..core.passes.layout import Shell
from ..core.storage.fileio import write_all
from ..core.storage.filenames import path_inside
from ..core.storage.folder import lock

PREFIX = "zckpt-names-"


@contextmanager
def directory() -> Iterator[str]:
    """A new directory, which is removed in the end; removes those of processes that were killed."""
    above = os.path.realpath(tempfile.gettempdir())
    _sweep(above)
    path, file = _locked(above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(file)


def lay(folder: str, shells: Iterable[Shell]) -> None:
    """Writes shells, whose holes take no space."""
    for shell in shells:
        path = path_inside(folder, shell.name, "the source")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, shell.size)
            for offset, data in shell.parts:
                write_all(file, memoryview(data), offset)
        finally:
            os.close(file)


def _locked(above: str) -> tuple[str, int]:
    """A new directory, and its locked descriptor; a sweep may remove one before it is locked."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=above)
        if (file := _own(path)) is not None:
            return path, file


def _sweep(above: str) -> None:
    """Removes the directories whose processes have ended; others have a lock."""
    for name in os.listdir(above):
        path = os.path.join(above, name)
        if name.startswith(PREFIX) and (file := _own(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(file)


def _own(path: str) -> int | None:
    """The descriptor of a directory of this user that this process has locked now."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(OSError):
            opened = os.fstat(file)
            is_locked = opened.st_uid == os.geteuid() and lock(file, where_there_are_none=False)
            if is_locked and os.path.samestat(opened, os.lstat(path)):
                return file
        os.close(file)
    return None
