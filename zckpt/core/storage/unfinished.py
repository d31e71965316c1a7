"""Decides whether a target is complete.

A target with a journal is still being written; a target with a note is being sent to a store.

    DST.partial/journal      what a run has written so far; the run renames the folder when it ends
    zckpt-unfinished.json    {"zckpt": "0.1.0", "files": {"model.safetensors": 123, "latest": 45},
                             "last": "latest", "sent": {"model.safetensors": 3141592653}}

The note lists the files of a target in a store. A run sends the note first, and removes it last. If
somebody copies an unfinished target to a disk, the copied note shows which files are missing.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from ...errors import CorruptCheckpoint, IncompleteCheckpoint, listed
from ..version import __version__
from . import sources
from .filenames import path_inside, with_parents
from .folder import JOURNAL

UNFINISHED = "zckpt-unfinished.json"
PARTIAL = ".partial"
MOST = 64 << 20  # bytes of a note


class Note(Struct, frozen=True):
    """The file zckpt-unfinished.json: the progress of sending a target to an object store.

    files    all files of the target, with their sizes
    last     the file that makes the target recognizable, which is sent last
    sent     the CRC-32s of files that have arrived
    lost     names of files that the store holds with other bytes
    zckpt    the version that wrote the note
    """

    files: dict[str, Annotated[int, Meta(ge=0)]]
    last: str
    sent: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    zckpt: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the target's files, in the order in which they are sent."""
        return [*(name for name in self.files if name != self.last), self.last]

    def missing(self, size_of: Callable[[str], int | None]) -> list[str]:
        """The names of files that do not exist, or have another size than the note states.

        `size_of` returns the size of a file by its name, None if the file does not exist.
        """
        sizes = {name: size_of(name) for name in self.names}
        return [
            name
            for name, size in sizes.items()
            if size is None or size != self.files.get(name, size) or name in self.lost
        ]


def understood(data: bytes) -> Note | None:
    """Parses zckpt-unfinished.json; None if it is not valid, or of a newer version of zckpt.

    Also None if it names files outside of its folder.
    """
    try:
        note = msgspec.json.decode(data, type=Note)
        for name in note.names:
            if path_inside("", name, UNFINISHED) != os.path.normpath(name):
                return None
    except (ValueError, RecursionError, CorruptCheckpoint):
        return None
    is_newer = _major_and_minor(note.zckpt) > _major_and_minor(__version__)
    return None if is_newer or not note.files or UNFINISHED in note.names else note


def _major_and_minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,9}", version)[:2]]


def refuse_unfinished(paths: Iterable[str]) -> None:
    """Raises IncompleteCheckpoint if a path is in a target that is not complete.

    Such a target has a journal while it is written, or a note (zckpt-unfinished.json) that lists
    missing files, or that this version of zckpt cannot parse. Both are looked for at the path and
    in all folders above it.
    """
    places = {
        place: path for path in paths for place in (os.path.realpath(path), os.path.abspath(path))
    }
    for folder in sorted({folder for place in places for folder in with_parents(place)}):
        inside = {
            place: path
            for place, path in places.items()
            if place == folder or place.startswith(os.path.join(folder, ""))
        }
        if folder.endswith(PARTIAL) and os.path.lexists(os.path.join(folder, JOURNAL)):
            _refuse_written(next(iter(inside.values())))
        path = os.path.join(folder, UNFINISHED)
        if not sources.is_file(path):
            continue
        note = _note_at(path)
        missing = [] if note is None else note.missing(partial(_size, folder))
        if note is not None and not missing:
            continue
        for place in sorted(inside):
            _refuse(place, folder, note, missing)


def _refuse_written(path: str) -> None:
    raise IncompleteCheckpoint(
        "unfinished-target",
        f"{path} belongs to a target that is not complete",
        hint="wait for the run that writes it, or repeat that run with --resume",
        file=path,
    )


def _note_at(path: str) -> Note | None:
    with sources.opened(path) as file:
        return understood(file.read(MOST))


def _size(folder: str, name: str) -> int | None:
    now = sources.status(os.path.join(folder, name))
    return now.st_size if now is not None and stat.S_ISREG(now.st_mode) else None


def _refuse(path: str, folder: str, note: Note | None, missing: list[str]) -> None:
    name = os.path.relpath(path, folder)
    files = () if note is None else note.names
    is_of_note = any(file == name or file.startswith(f"{name}/") for file in files)
    if note is not None and name != os.curdir and not is_of_note:
        return  # the path lies beside the target's files
    at = os.path.join(folder, UNFINISHED)
    reason = (
        f"{at} cannot be parsed"
        if note is None
        else f"{at} lists {listed(missing, 3)}, missing here or of another size"
    )
    raise IncompleteCheckpoint(
        "unfinished-target",
        f"{path} belongs to a target that is not complete: {reason}",
        hint="copy it again when its upload has ended; if that file belongs to something else, "
        f"remove it: rm {shlex.quote(at)}",
        file=path,
    )
