"""Decides which directories zckpt has written. The name of a directory is no proof.

    X                 complete: it has a mark, in an attribute or in the file `.X.zckpt`
    X.partial         unfinished: it has the journal of the run that writes X, and files of X
    X.gone.partial    being removed: it has the mark of X

A mark identifies the run that wrote the directory. `copying/journal.py` sets marks and writes
journals.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from typing import Any

from ...errors import TargetExists
from .checksum import crc32
from .folder import JOURNAL, PROBE, Folder, mark_file
from .sources import pread

MARK = "user.zckpt.run"
"""The extended attribute of a complete target; its value identifies the run that wrote it."""
MOST = 1 << 16  # bytes of a mark
JOURNALS = re.compile(rf"{JOURNAL}(-\d+(-of-\d+)?)?|{PROBE}[0-9a-f]{{8}}", re.ASCII)
TORN = re.compile(rb"(?s)(\0.*)?|[0-9a-f]{0,8} ?|[0-9a-f]{8} \{.*")
"""Matches a journal without an intact line: one that was emptied, or torn by a power loss."""


def is_journal(name: str) -> bool:
    """Whether this is the name of a file that zckpt writes while it works: a journal or a probe.

    A journal belongs to a run or to one of its processes. A probe is an empty file by which
    `Folder` finds the owner of new files. A process that is killed may leave its probe behind.
    """
    return JOURNALS.fullmatch(name) is not None


def lines_in(data: bytes) -> list[bytes]:
    """The intact lines of a journal, up to the first damaged one.

    A journal is zckpt's list of what a conversion has written.
    """
    lines = []
    for text in data.split(b"\n")[:-1]:
        if text != b"%08x %s" % (crc32(text[9:]), text[9:]):
            break
        lines.append(text + b"\n")
    return lines


def is_begun(folder: Folder, name: str) -> bool:
    """Whether `folder` has only the remains of an unfinished run that writes the target `name`.

    Such a folder is empty, or has a journal (a list of what was written) and perhaps the directory
    `name`. Raises TargetExists for a journal that is a link or of a user whom `folder` refuses.
    """
    contents = folder.names()
    files = {item for item in contents if not is_journal(item)}
    if JOURNAL not in contents:
        return not files
    return files <= {name} and _has_journal(folder)


def _has_journal(folder: Folder) -> bool:
    try:
        with folder.opened(os.path.join(folder.path, JOURNAL)) as file:
            data = pread(file, os.fstat(file).st_size, 0)
    except PermissionError:  # of another user, whose folder is refused anyway
        return True
    except IsADirectoryError:
        return False
    return bool(lines_in(data)) or TORN.fullmatch(data) is not None


def document(text: bytes) -> dict[str, Any]:
    """Parses a mark, by which zckpt recognizes its targets; empty for other contents."""
    try:
        mark = json.loads(text)
    except ValueError:
        return {}
    return mark if isinstance(mark, dict) else {}


def has_mark(above: Folder, path: str, file: int) -> bool:
    """Whether zckpt has marked an open directory: by an attribute, or by a file beside `path`.

    `path` is the path of the directory, `file` its descriptor, `above` the directory around it.
    """
    with suppress(AttributeError, OSError):
        if document(os.getxattr(file, MARK)):
            return True
    return _is_mark_file(above, mark_file(path), os.fstat(file).st_uid)


def is_marked(path: str) -> bool:
    """Whether zckpt has written the folder at a path, and nobody has copied it since."""
    path = os.path.realpath(path)
    try:
        with Folder.at(os.path.dirname(path)) as above, above.inner(path) as folder:
            return has_mark(above, path, folder.file)
    except (OSError, TargetExists):
        return False


def remove_mark_file(above: Folder, target: str) -> None:
    """Removes the mark file of an earlier target at the path `target`.

    A mark proves that zckpt wrote a target. The mark file lies beside the target, in the directory
    `above`. A file with other contents is kept. An empty file or a link is removed.
    """
    path = mark_file(target)
    now = above.status(path)
    if now is None:
        return
    if stat.S_ISREG(now.st_mode) and now.st_size and not _is_mark_file(above, path, now.st_uid):
        return
    above.unlink(path)


def _is_mark_file(above: Folder, path: str, owner: int) -> bool:
    try:
        with above.opened(path) as file:
            now = os.fstat(file)
            is_own = stat.S_ISREG(now.st_mode) and now.st_uid == owner and now.st_nlink == 1
            return is_own and bool(document(pread(file, MOST, 0)))
    except (OSError, TargetExists):
        return False
