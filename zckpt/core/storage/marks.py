"""Which directories has zckpt written? A name is no proof.

    X                 complete: it has the mark of its run, an attribute or the file `.X.zckpt`
    X.partial         begun: it has the journal of a run, and the files of X
    X.gone.partial    being removed: it has X's mark

`copying/journal.py` sets marks and writes journals.
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
"""The extended attribute of a complete target, which says of which run it is."""
MOST = 1 << 16  # bytes of a mark
JOURNALS = re.compile(rf"{JOURNAL}(-\d+(-of-\d+)?)?|{PROBE}[0-9a-f]{{8}}", re.ASCII)
TORN = re.compile(rb"(?s)(\0.*)?|[0-9a-f]{0,8} ?|[0-9a-f]{8} \{.*")
"""A journal that was forgotten, or whose first line a power loss has damaged."""


def is_journal(name: str) -> bool:
    """Whether a file of this name is the journal of a run or of one process, or will be removed."""
    return JOURNALS.fullmatch(name) is not None


def lines_in(data: bytes) -> list[bytes]:
    """The intact lines of a journal; the first damaged one ends them."""
    lines = []
    for text in data.split(b"\n")[:-1]:
        if text != b"%08x %s" % (crc32(text[9:]), text[9:]):
            break
        lines.append(text + b"\n")
    return lines


def is_begun(folder: Folder, name: str) -> bool:
    """Whether a run for the target `name` can have left this open `.partial`.

    It has a journal, or else nothing, and beside it the directory of the target alone. Raises
    TargetExists for a journal that is a link, or not ours where everything must be.
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
    """The mark that a text is; empty if it is none."""
    try:
        mark = json.loads(text)
    except ValueError:
        return {}
    return mark if isinstance(mark, dict) else {}


def has_mark(above: Folder, path: str, file: int) -> bool:
    """Whether an open directory has a mark: its own, or one in the mark file of `path`."""
    with suppress(AttributeError, OSError):
        if document(os.getxattr(file, MARK)):
            return True
    return _is_mark_file(above, mark_file(path), os.fstat(file).st_uid)


def is_marked(path: str) -> bool:
    """Whether zckpt has written the folder at a path, which has not been copied since."""
    path = os.path.realpath(path)
    try:
        with Folder.at(os.path.dirname(path)) as above, above.inner(path) as folder:
            return has_mark(above, path, folder.file)
    except (OSError, TargetExists):
        return False


def remove_mark_file(above: Folder, target: str) -> None:
    """Removes the mark file of a target that was there earlier.

    What has other contents stays. A link has none.
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
