"""Which files beside a checkpoint are copied along, and which are left out and named?

A directory is often given away, or comes from somebody else. So hidden files (`.env`) stay where
they are, links are followed only to files inside the directory, and no pipe or device is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from ..errors import Notice, note
from . import sources
from .manifest import Sibling
from .unfinished import UNFINISHED

HIDDEN = "hidden"
OUT = "a link out of the directory"
NOTHING = "a link to nothing"
FOLDER = "a link to a folder"
SPECIAL = "a pipe, a socket or a device"
DENIED = "a folder that may not be listed"
DEEP = "a folder too deep below others"
BESIDE = ".zckpt"
"""The folder of a run in which zckpt keeps it for other numbers of ranks: it belongs to no
checkpoint."""
MAX_DEPTH = 100  # folders; programs that copy and remove trees call themselves for each


def leads_out(path: str, root: str) -> bool:
    """Whether a path, its links followed, is outside of the directory `root`; raises OSError.

    The cache of Hugging Face's hub has `snapshots/REVISION/FILE`, which are links to
    `blobs/HASH` of the same repository (huggingface_hub 1.0): these are inside, too.
    """
    if os.path.dirname(path) == root and not stat.S_ISLNK(os.lstat(path).st_mode):
        return False
    real, inside = _real(path), _real(root)
    above, revision = os.path.split(inside)
    if revision and os.path.basename(above) == "snapshots":
        blobs = os.path.join(os.path.dirname(above), "blobs")
        if os.path.dirname(real) == blobs:
            return False
    return os.path.commonpath([real, inside]) != inside


def _real(path: str) -> str:
    """The path without links; raises OSError if a link cannot be looked at."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno not in sources.NOTHING:
            raise
        return os.path.realpath(path)


class SiblingList(Struct, eq=False):
    """The files beside a checkpoint, for a source whose directory is `root`.

    `files` may be copied. `omitted` has a note for each reason, with the names of all files that
    may not. A hidden folder is closed, unless its name is one of `listed`.
    """

    root: str
    listed: frozenset[str] = frozenset()
    files: list[Sibling] = field(default_factory=list)
    _refused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def omitted(self) -> list[Notice]:
        return [
            note(
                "file-omitted",
                f"{', '.join(names)}: {reason}",
                file=os.path.join(self.root, names[0]),
            )
            for reason, names in self._refused.items()
        ]

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Adds names to those that are left out."""
        for name in names:
            self._refused.setdefault(reason, []).append(name)

    def add(self, name: str, path: str) -> None:
        """Adds a file under this name, or the name to those that are left out; raises OSError.

        The fingerprint of a link is that of the file it leads to now. If it leads elsewhere when it
        is copied, the file has changed.
        """
        status: os.stat_result | None = os.lstat(path)
        assert status is not None
        is_folder = stat.S_ISDIR(status.st_mode)
        if os.path.basename(path) == (BESIDE if is_folder else UNFINISHED):
            return
        reason = HIDDEN if os.path.basename(path).startswith(".") else ""
        if not reason and stat.S_ISLNK(status.st_mode):
            reason = OUT if leads_out(path, self.root) else ""
            status = status if reason else sources.status(_real(path))
        if reason:
            pass
        elif status is None:
            reason = NOTHING
        elif stat.S_ISDIR(status.st_mode):
            reason = FOLDER
            if is_folder:
                reason = DEEP if name.count("/") >= MAX_DEPTH else DENIED
        elif not stat.S_ISREG(status.st_mode):
            reason = SPECIAL
        else:
            sources.note(path, status)
            self.files.append(Sibling(name, path, status.st_size))
            return
        self._refused.setdefault(reason, []).append(f"{name}/" if is_folder else name)

    def add_below(
        self,
        folder: str,
        is_other: Callable[[str, os.DirEntry[str]], bool] = lambda name, entry: False,
        root: str | None = None,
    ) -> None:
        """Adds everything below a folder under its path from `root`, or there; raises OSError.

        What `is_other` is true for, by its path and its entry, is no sibling, and not mentioned.
        """
        closed: set[str] = set()
        for entry in sources.walk(folder, lambda path: path not in closed):
            name = os.path.relpath(entry.path, root or folder)
            if is_other(name, entry):
                closed.add(entry.path)
            elif (
                not entry.is_dir(follow_symlinks=False)
                or self.is_closed(entry)
                or name.count("/") >= MAX_DEPTH
            ):
                closed.add(entry.path)
                self.add(name, entry.path)

    def is_folder(self, entry: os.DirEntry[str]) -> bool:
        """Whether it is a folder, or a link to one inside of the directory."""
        if entry.is_symlink():
            return not leads_out(entry.path, self.root) and sources.is_folder(entry.path)
        return entry.is_dir()

    def is_closed(self, entry: os.DirEntry[str]) -> bool:
        """Whether a folder is hidden, or is the one that only its filesystem may list."""
        is_own = entry.name == "lost+found" and sources.is_denied(entry.path)
        return (entry.name.startswith(".") and entry.name not in self.listed) or is_own
