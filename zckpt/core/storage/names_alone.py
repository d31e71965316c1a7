"""Directories that have the names of a checkpoint's files, and no data.

    zckpt-names.json    {"zckpt": "0.1.0", "source": "/runs/out/checkpoint-500", "tag": null}

Programs find the files' names in such a directory, and a loader reads the checkpoint at `source`
instead. The ranks' files are empty, so commands that read a checkpoint refuse such a directory. A
note in a directory above a path counts only if zckpt has marked that directory: anybody may have
put a file of this name into a directory that many users share.
"""

from __future__ import annotations

import json
import os

from ...errors import UnsupportedCheckpoint
from ..version import __version__
from . import sources
from .filenames import with_parents
from .marks import is_marked

NAMES = "zckpt-names.json"
MOST = 1 << 16  # bytes of a note


def note_of(source: str, tag: str | None) -> bytes:
    """Makes the contents of zckpt-names.json: the path and the tag of the real checkpoint.

    zckpt writes this file into a directory whose other files are empty. A program gets the path of
    this directory, and a loader reads the real checkpoint instead.
    """
    note = {"zckpt": __version__, "source": source, "tag": tag}
    return json.dumps(note, ensure_ascii=False).encode()


def source_of(path: str) -> str | None:
    """Finds the checkpoint for which zckpt made a directory of empty files; returns its path.

    `path` is the directory of empty files, or lies in it; None for any other path. The file
    zckpt-names.json in the directory states the result; "" if that file is malformed.
    """
    path = os.path.realpath(path)
    for folder in with_parents(path):
        file = os.path.join(folder, NAMES)
        if sources.is_file(file) and (folder == path or is_marked(folder)):
            with sources.opened(file) as opened:
                return _stated(opened.read(MOST))
    return None


def refuse_names(path: str) -> None:
    """Raises UnsupportedCheckpoint if `path` is in a directory with only empty files.

    zckpt wrote it for a program that needs the names of the files.
    """
    if (source := source_of(path)) is not None:
        raise UnsupportedCheckpoint(
            "names-alone",
            f"{path} has the file names of a checkpoint, but no data: that is in "
            f"{source or 'another directory'}",
            hint=f"use {source or 'that directory'} instead",
            file=path,
        )


def _stated(data: bytes) -> str:
    """Parses zckpt-names.json: returns its key `source`, or "" if it is malformed."""
    try:
        note = json.loads(data)
    except ValueError:
        return ""
    source = note.get("source") if isinstance(note, dict) else None
    return source if isinstance(source, str) else ""
