"""Decides which files beside a checkpoint are copied along, and which are left out and named.

A directory is often passed on, or comes from somebody else. So hidden files (`.env`) are not
copied, links are followed only to files inside the directory, and no pipe or device is opened.
Caches of data (DVC, git-annex, `cp -rs`) consist of links that lead out of the directory. Such
links are followed only inside a `following` block, which the option `--follow-links` begins.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from msgspec import Struct, field

from ...errors import Notice, listed, note, warning
from ..storage import sources
from ..storage.unfinished import UNFINISHED
from .manifest import Sibling
from .mended import MENDED

HIDDEN = "hidden"
OUT = "a link out of the directory"
NOTHING = "a link to nothing"
FOLDER = "a link to a folder"
SPECIAL = "a pipe, a socket or a device"
DENIED = "a folder that may not be listed"
DEEP = "a folder too deep below others"
CACHE = ".zckpt"
"""The folder of a run in which zckpt keeps checkpoints for other numbers of ranks.

It belongs to no checkpoint.
"""
MAX_DEPTH = 100  # folders; programs that copy and remove trees recurse into each
LINKED = "links-out"
"""The code of the warning about files of a checkpoint that lie elsewhere."""
FOLLOW = "--follow-links"
"""The option that copies files behind links. Notices about such files have it as their subject."""
SNAPSHOTS, BLOBS, PARTS = "snapshots", "blobs", "--"
_follows: ContextVar[bool] = ContextVar("follows", default=False)


@contextmanager
def following(links: bool) -> Iterator[None]:
    """Inside the block, links out of the directory are followed if `links` is true.

    The file at the end of such a link is then copied in place of the link.
    """
    token = _follows.set(links)
    try:
        yield
    finally:
        _follows.reset(token)


def leads_out(path: str, root: str) -> bool:
    """Whether a path, after following its links, is outside of the directory `root`.

    In the cache of Hugging Face's hub, `REPOSITORY/snapshots/REVISION/...` has links to
    `REPOSITORY/blobs/HASH` (huggingface_hub 1.0). These count as inside. Raises OSError.
    """
    if os.path.dirname(path) == root and not stat.S_ISLNK(os.lstat(path).st_mode):
        return False
    real, inside = real_path(path), real_path(root)
    is_blob = os.path.dirname(real) in _blobs(inside)
    return not is_blob and os.path.commonpath([real, inside]) != inside


def _blobs(folder: str) -> Iterator[str]:
    """Yields the blobs folder of a snapshot in the Hugging Face cache; nothing for other folders.

    For `models--ORG--NAME/snapshots/REVISION` it yields `models--ORG--NAME/blobs`.
    """
    names = folder.split(os.sep)
    for place in range(1, len(names) - 1):
        if names[place] == SNAPSHOTS and PARTS in names[place - 1]:
            yield os.sep.join([*names[:place], BLOBS])


def links_out(paths: Iterable[str], omitted: Iterable[Notice], root: str) -> list[Notice]:
    """Warns about links in `root` that lead out of it: a list of one warning, or an empty list.

    `paths` are files that were read, `omitted` are notices about files that were left out. Links
    into the Hugging Face cache count too, unlike in `leads_out`. Raises OSError.
    """
    inside, below = real_path(root), os.path.join(os.path.abspath(root), "")
    leading = dict[str, str]()

    @cache
    def place_of(folder: str) -> tuple[str, bool, set[str]]:
        """Resolves a folder: its real path, whether that is in `root`, and the names of its links.

        A folder outside of `root` that the user named counts as inside.
        """
        if not os.path.join(os.path.abspath(folder), "").startswith(below):
            return "", True, set()
        real = real_path(folder)
        return real, os.path.join(real, "").startswith(os.path.join(inside, "")), _links_in(real)

    for path in paths:
        folder, name = os.path.split(path)
        real, stays, links = place_of(folder)
        if stays and name not in links:
            continue
        place = os.path.join(real, name)
        place = real_path(place) if name in links else place
        if place != inside and not place.startswith(os.path.join(inside, "")):
            leading[os.path.relpath(path, root)] = place
    # a universal checkpoint repeats the notice of its source, whose files are unknown here
    lost = [notice.file for notice in omitted if notice.subject == FOLLOW and notice.file]
    parts = []
    if leading:
        files = [f"{name} to {place}" for name, place in leading.items()]
        parts.append(f"links lead out of {root}: {listed(files, 3)}")
    if lost:
        parts.append(
            f"links beside it, such as {os.path.relpath(lost[0], root)}, are left out: {FOLLOW} "
            "takes the files to which they lead"
        )
    return [warning(LINKED, "; ".join(parts), file=root)] if parts else []


def _links_in(folder: str) -> set[str]:
    """The names of the links in a folder, found in one listing: a call per file takes longer."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_symlink()}


def relative(path: str, folder: str) -> str:
    """The path relative to a folder, as by os.path.relpath; 20 times faster inside the folder."""
    above = os.path.join(folder, "")
    return path[len(above) :] if path.startswith(above) else os.path.relpath(path, folder)


def real_path(path: str) -> str:
    """Resolves all links in a path; raises OSError if a link cannot be read."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno not in sources.NOTHING:
            raise
        return os.path.realpath(path)


class SiblingList(Struct, eq=False):
    """Collects the files beside a checkpoint that a conversion copies along.

    root       the directory of the checkpoint
    files      the files to copy
    omitted    a notice for each reason to leave files out, with their names
    listed     names of hidden files that are copied; other hidden files are left out
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
                subject=FOLLOW if reason == OUT else None,
                file=os.path.join(self.root, names[0]),
            )
            for reason, names in self._refused.items()
        ]

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Records that the files with these names are left out, with the reason."""
        for name in names:
            self._refused.setdefault(reason, []).append(name)

    def add(self, name: str, path: str) -> None:
        """Adds a file to those to copy, or to those left out if it may not be copied.

        A link is recorded with the size and the time of the file at its end. If the link leads to
        another file at the time of the copy, the file counts as changed. Raises OSError.
        """
        status: os.stat_result | None = os.lstat(path)
        assert status is not None
        file_name = path[
            path.rfind(os.sep) + 1 :
        ]  # os.path.basename is slow, and files may be 50,000
        is_folder = stat.S_ISDIR(status.st_mode)
        if file_name in ((CACHE,) if is_folder else (UNFINISHED, MENDED)):
            return
        reason = HIDDEN if file_name.startswith(".") and file_name not in self.listed else ""
        if not reason and stat.S_ISLNK(status.st_mode):
            reason = OUT if self.is_out(path) else ""
            status = status if reason else sources.status(real_path(path))
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
        """Adds all files below a folder: to the files to copy, or to those that are left out.

        Their names are relative to `root`, or to `folder` if `root` is None. If
        `is_other(name, entry)` is true, the file or folder is skipped without a notice. Raises
        OSError.
        """
        closed: set[str] = set()
        above = os.path.join(root or folder, "")
        for entry in sources.walk(folder, lambda path: path not in closed):
            path = entry.path
            name = path[len(above) :] if path.startswith(above) else os.path.relpath(path, above)
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
        """Whether a directory entry is a folder, or a link to a folder inside of `root`.

        Links that lead out of `root` count too if the user lets zckpt follow them.
        """
        if entry.is_symlink():
            return not self.is_out(entry.path) and sources.is_folder(entry.path)
        return entry.is_dir()

    def is_out(self, path: str) -> bool:
        """Whether a link leads out of the directory `root` and may not be followed."""
        return not _follows.get() and leads_out(path, self.root)

    def is_closed(self, entry: os.DirEntry[str]) -> bool:
        """Whether to skip a folder: a hidden one, or a `lost+found` that this user may not list."""
        is_own = entry.name == "lost+found" and sources.is_denied(entry.path)
        return (entry.name.startswith(".") and entry.name not in self.listed) or is_own
