"""How a conversion runs, and which functions it calls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from msgspec import Struct

from ..copying.sharing import ALONE, Sharing
from ..core.passes.resources import DEFAULT_COPYING, Begin, Copying, Tell
from ..core.storage.folder import Folder


class Keywords(TypedDict, total=False):
    """The options of running as keyword arguments; see `zckpt.convert`."""

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

    With `dry_run`, the run reports what it would write, and writes nothing. With `resume`, it
    continues an earlier run. On a filesystem without locks nothing can be continued: `resume` is
    then refused, unless `begins_anew` is set. In this case the run starts from the beginning, and
    accepts a target that another run completes meanwhile. If that target has other options or
    another source, a run that `gives_way` reports it (`is_of_another`) instead of raising an error.

    If the source is in a numbered folder and `as_run` is set, the target gets such a folder inside.
    With `read_back`, uploads to an object store that states no MD5 are read again. `before_rename`
    is called just before the target gets its final name. If `names` is set (the content of a note),
    the target gets only file names (names_only.py). `sharing` says which portions of the target
    this process writes. `above` is the directory of the target, if that is itself a part of an
    unfinished target.
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
