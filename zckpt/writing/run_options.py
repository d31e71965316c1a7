"""How a conversion runs, and which functions it calls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from msgspec import Struct

from ..copying.sharing import ALONE, Sharing
from ..core.passes.resources import DEFAULT_COPYING, Begin, Copying, Tell
from ..core.storage.folder import Folder


class Keywords(TypedDict, total=False):
    """How a conversion runs, as keyword arguments of functions such as `zckpt.convert`."""

    copying: Copying
    dry_run: bool
    begin: Begin | None
    tell: Tell | None
    resume: bool
    begins_anew: bool
    gives_way: bool
    as_run: bool
    read_back: bool
    before_rename: Callable[[], None] | None
    sharing: Sharing
    names: bytes | None


class Running(Struct, frozen=True):
    """How a conversion runs, as opposed to what it writes.

    dry_run          report what would be written, and write nothing
    resume           continue an earlier run
    begins_anew      on a filesystem without locks, start from the beginning although `resume` is
                     given; accept a target that another run completes meanwhile
    gives_way        report `is_of_another` instead of raising an error, if another conversion has
                     completed the target
    as_run           if the source is in a numbered folder, put such a folder into the target
    read_back        read uploads again, on object stores that state no MD5
    before_rename    called just before the target gets its final name
    names            the contents of zckpt-names.json, which names the source. If given, this file
                     is written, and the engine's files are empty: a loader reads the source instead
    sharing          which portions of the target this process writes
    above            the unfinished folder around the target, if several targets appear together
    """

    copying: Copying = DEFAULT_COPYING
    dry_run: bool = False
    begin: Begin | None = None
    tell: Tell | None = None
    resume: bool = False
    begins_anew: bool = False
    gives_way: bool = False
    as_run: bool = False
    read_back: bool = True
    before_rename: Callable[[], None] | None = None
    sharing: Sharing = ALONE
    names: bytes | None = None
    above: Folder | None = None

    @property
    def continues(self) -> bool:
        """Whether an earlier run, or another part (--part), may have written files already."""
        return self.resume or bool(self.sharing.part)
