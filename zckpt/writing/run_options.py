"""How does a conversion run, and whom does it inform?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from msgspec import Struct

from ..copying.sharing import ALONE, Sharing
from ..core.passes.resources import DEFAULT_COPYING, Begin, Copying, Tell
from ..core.storage.folder import Folder


class Keywords(TypedDict, total=False):
    """What a user may say of it, as keyword arguments; see `zckpt.convert`."""

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


class Running(Struct, frozen=True):
    """What a user says, or does not say.

    A `dry_run` reports what would be written, and writes nothing. With `resume` a run continues
    what an earlier one left. Without locks nothing can be continued: `resume` is refused there,
    unless the run `begins_anew`, which also takes a target that another run completes meanwhile.
    If that is the target of other options or of another source, a run that `gives_way` reports it
    (`is_of_another`), and raises no error.
    Of a source in a numbered folder, a target `as_run` is the directory around such a folder.
    With `read_back` an object store is read back where it states no MD5.
    `before_rename` is called when all but the last check is done.
    `sharing` says which portions of the target this process writes. `above` is the directory of the
    target, if that is itself a part of an unfinished target.
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
    above: Folder | None = None

    @property
    def continues(self) -> bool:
        """Whether what is there already may belong to this run, as other parts do."""
        return self.resume or bool(self.sharing.part)
