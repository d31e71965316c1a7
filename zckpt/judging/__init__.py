"""Is a checkpoint whole, of one save, and intact, and does it load at a size?

A stand-in with the interface of the branch `verdict`, which brings this room: it knows what the
readers raise, and which files of a trainer are empty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from .. import formats
from ..core import sources
from ..core.manifest import Manifest
from ..core.resources import Begin, Copying
from ..core.unlisted import refuse_share
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    Notice,
    ZckptError,
    problem,
)
from ..formats.options import options_of
from ..formats.reading import Reading
from ..proof.verify import verify_alone
from ..reading import read

DAMAGE = (CorruptCheckpoint, IncompleteCheckpoint, NotACheckpoint)


class Verdict(Struct):
    """What metadata say of a checkpoint; `manifest` is None if nothing could be read."""

    path: str
    manifest: Manifest | None = None
    whole: list[Notice] = field(default_factory=list)
    of_one_save: list[Notice] = field(default_factory=list)
    unread: list[Notice] = field(default_factory=list)
    warnings: list[Notice] = field(default_factory=list)

    @property
    def problems(self) -> list[Notice]:
        return self.whole + self.of_one_save


def judged(path: str, tag: str | None = None, reading: Mapping[str, Any] = {}) -> Verdict:
    """What metadata say of the checkpoint at `path`; reads no tensor."""
    words = {"tag": tag, "nameless": True, "by_checksums": True, **reading}
    try:
        manifest = read(path, Reading(**words))
    except DAMAGE as error:
        return Verdict(path, whole=[*error.notices])
    except InconsistentCheckpoint as error:
        return Verdict(path, of_one_save=[*error.notices])
    empty = [
        problem("trainer-file-damaged", f"{each.path} is empty", file=each.path)
        for each in manifest.siblings
        if each.size == 0
    ]
    unread = [each for each in empty if os.path.basename(each.file or "") == "training_args.bin"]
    whole = [each for each in empty if each not in unread]
    return Verdict(path, manifest, whole, [], unread, [*manifest.warnings])


def intact(manifest: Manifest, copying: Copying, begin: Begin | None) -> list[Notice]:
    """What is wrong with the bytes of a checkpoint; reads all."""
    with sources.unchanged(manifest.fingerprints):
        report = verify_alone(manifest, None, copying, begin)
    names = Notice.__struct_fields__
    lines = [Notice(**{name: line[name] for name in names}) for line in report["problems"]]
    return lines + [
        problem("tensor-differs", f"{line['tensor']}: what is stored twice differs")
        for line in report["differences"]
    ]


def loads(manifest: Manifest, words: Mapping[str, Any]) -> list[Notice]:
    """Why an engine does not load a checkpoint at a size; empty if it does."""
    try:
        refuse_share(manifest)
    except ZckptError as error:
        return [*error.notices]
    find = formats.named(manifest.format).functions.obstacles
    return find(manifest, options_of(words)) if find else []
