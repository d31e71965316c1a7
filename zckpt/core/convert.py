"""The five steps of a conversion: shells, read them back, join, copy, seal and rename.

    1. shells      the target's files, with their headers and with holes where tensors go
    2. read back   the target format's own reader says which bytes of the shells are which elements
    3. join        every element of the target gets its place in the source
    4. copy        bytes move, and every one is hashed on the way
    5. seal        checksums go into the files; then one rename makes the directory the target

This module knows no format: its caller passes the layout, the reader and the function that seals.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace

from ..errors import NotEnoughSpace
from . import fileio, plan
from .copy import CopyOutcome, copy
from .manifest import Manifest
from .resources import Begin, Copying
from .sources import unchanged
from .staging import Layout, Staging
from .streaming import chunk_size

ReadShells = Callable[[str], Manifest]
"""Reads the manifest of the shells in a directory."""
Seal = Callable[[str, Manifest, CopyOutcome], None]
"""Completes the files in a directory, given the manifest of its shells and the copy's outcome."""


def files_of(layout: Layout) -> dict[str, int]:
    """Names and sizes of all files that a layout writes. Builds every shell, so call it once."""
    shells = {shell.name: shell.size for shell in layout.shells()}
    return shells | {name: sibling.size for name, sibling in layout.siblings}


def chunk_size_of(source: Manifest, copying: Copying) -> int:
    """Bytes that a conversion of `source` copies at a time."""
    return chunk_size(source.dp, copying.jobs, copying.memory)


def memory_of(source: Manifest, copying: Copying) -> int:
    """Bytes of all buffers that a conversion of `source` allocates."""
    return 2 * copying.jobs * chunk_size_of(source, copying)


def convert(
    source: Manifest,
    staging: Staging,
    layout: Layout,
    size: int,
    read_shells: ReadShells,
    seal: Seal,
    copying: Copying,
    begin: Begin | None,
) -> CopyOutcome:
    """Writes `source` as the target of `staging`, `size` bytes in the files of `layout`.

    If an error is raised, there is no target. Raises NotEnoughSpace, CorruptCheckpoint if the
    source's bytes do not have the checksums that its files state, SourceChanged if one of its files
    is not as it was read, MissingData, OSError, and what `Staging` raises.
    """
    try:
        with staging, unchanged(source):
            staging.lay(layout.shells(), _strictest_mode(source))
            shells = read_shells(staging.path)
            pairs = plan.join(source, shells, layout.from_masters)
            outcome = copy(
                pairs,
                source,
                shells,
                replace(copying, io=fileio.write_mode(copying.io, size)),
                begin(size) if begin else None,
                staging.journal,
            )
            for name, sibling in layout.siblings:
                path = os.path.join(staging.path, name)
                outcome.files[path] = staging.copy(sibling.path, name)
            seal(staging.path, shells, outcome)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NotEnoughSpace(
                f"the filesystem of {staging.target} is full: {error.filename}: {error.strerror}",
                hint=f"free some space ({size / 1e9:.3f} GB are needed), or choose a target on "
                "another filesystem; nothing was left behind",
            ) from error
        raise
    return outcome


def _strictest_mode(source: Manifest) -> int:
    """The permissions that all files of a source give: the target's files give no others."""
    mode = 0o666
    for file in source.files:
        mode &= os.stat(file).st_mode
    return mode | stat.S_IRUSR | stat.S_IWUSR  # a sealed checkpoint may be read-only
