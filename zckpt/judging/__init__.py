"""Is a checkpoint whole, and of one save?

A stand-in for this room of the branch `verdict`: it knows what the readers raise, and which files
of a trainer are empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import Struct

from ..core.manifest import Manifest
from ..core.unlisted import refuse_share
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    Notice,
    problem,
)

DAMAGE = (CorruptCheckpoint, IncompleteCheckpoint, NotACheckpoint)


class Verdict(Struct, frozen=True):
    """What metadata say of a checkpoint; `manifest` is None if nothing could be read."""

    manifest: Manifest | None = None
    whole: tuple[Notice, ...] = ()
    of_one_save: tuple[Notice, ...] = ()
    unread: tuple[Notice, ...] = ()
    alone: tuple[Notice, ...] = ()


def judged(read: Callable[[], Manifest]) -> Verdict:
    """The verdict on what `read` gives, or fails with; reads no tensor."""
    try:
        manifest = read()
        refuse_share(manifest)
    except DAMAGE as error:
        return Verdict(whole=error.notices)
    except InconsistentCheckpoint as error:
        return Verdict(of_one_save=error.notices)
    empty = [each for each in manifest.siblings if each.size == 0]
    found: dict[bool, list[Notice]] = {False: [], True: []}
    for each in empty:
        is_read = os.path.basename(each.path) != "training_args.bin"
        message = f"{each.path} is empty" + ("" if is_read else "; resuming does not read it")
        found[is_read].append(problem("trainer-file-damaged", message, file=each.path))
    return Verdict(manifest, tuple(found[True]), unread=tuple(found[False]))
