"""A temporary directory with the files that an engine is going to load, without tensor data.

`load.py` gives this directory to the engine, which lists its files. They are shells: complete
headers, and holes where tensors go. The process locks the directory. If the process is killed, the
next process finds the directory without a lock and removes it.
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
    """Yields the path of a new temporary directory, which is removed at the end of the block.

    Also removes such directories of processes that were killed.
    """
    above = os.path.realpath(tempfile.gettempdir())
    _sweep(above)
    path, file = _locked(above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(file)


def lay(folder: str, shells: Iterable[Shell]) -> None:
    """Creates files in `folder` with headers, and holes where tensors go; holes take no space."""
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
    """Creates and locks a directory; returns its path and descriptor.

    Another process may remove the directory before this one locks it. Then a new one is created.
    """
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=above)
        if (file := _own(path)) is not None:
            return path, file


def _sweep(above: str) -> None:
    """Removes the directories that no process has locked, because their processes have ended."""
    for name in os.listdir(above):
        path = os.path.join(above, name)
        if name.startswith(PREFIX) and (file := _own(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(file)


def _own(path: str) -> int | None:
    """Locks a directory of this user, and returns its descriptor; None if it cannot be locked."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(OSError):
            opened = os.fstat(file)
            is_locked = opened.st_uid == os.geteuid() and lock(file, where_there_are_none=False)
            if is_locked and os.path.samestat(opened, os.lstat(path)):
                return file
        os.close(file)
    return None
