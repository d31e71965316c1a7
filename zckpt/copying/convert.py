"""Carries out a conversion in five steps, from empty files to the complete directory.

    1. shells      the target's files, with their headers and with holes where tensors go
    2. read back   the target format's own reader reads the shells: it says which bytes are which
                   elements
    3. join        every element of the target is matched with bytes in the source
    4. copy        bytes are copied, and each is hashed on the way
    5. seal        checksums are written into the files; one rename makes the directory the target

This module names no format: its caller passes the layout, the reader and the function that seals.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.passes import plan
from ..core.passes.full_checks import FullCheck, length_of
from ..core.passes.layout import CopyOutcome, Layout
from ..core.passes.resources import Begin, Copying, uncollected
from ..core.passes.streaming import chunk_size
from ..core.storage.folder import Folder
from ..core.storage.fragments import Extent, solid
from ..core.storage.sources import unchanged
from ..errors import Interrupted, NotEnoughSpace, ProcessLost, removal, sized
from .copy import copy
from .journal import Identity
from .journals import ProcessJournal
from .sharing import Sharing
from .staging import Staging, joined, waiting

ReadShells = Callable[[str], Manifest]
"""Reads the manifest of the shells in a directory: the files with holes where tensors go."""
Seal = Callable[[Folder, Manifest, CopyOutcome], None]
"""Completes the files of a directory after the copy, such as by writing checksums into them.

The arguments are the directory, the manifest of its files, and the copy's outcome.
"""
HasDigests = Callable[[Manifest], bool]
"""Decides from the target's manifest whether the CRC-32 of each tensor is needed."""


def files_of(layout: Layout) -> dict[str, int]:
    """Maps the name of each file that a layout writes to its size in bytes.

    This function builds every file without tensor data, so call it once.
    """
    with uncollected():
        shells = {shell.name: shell.size for shell in layout.shells()}
    return shells | {name: sibling.size for name, sibling in layout.siblings}


def chunk_size_of(source: Manifest, copying: Copying) -> int:
    """The number of bytes that a thread copies in one step of a conversion of `source`."""
    return chunk_size(source.dp, copying.jobs, copying.memory)


def memory_of(source: Manifest, copying: Copying) -> int:
    """The total size of the buffers that a conversion of `source` allocates, in bytes."""
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
    checks: Sequence[FullCheck] = (),
    has_digests: HasDigests = lambda _: True,
) -> CopyOutcome | None:
    """Writes `source` as the target directory of `staging`, with the files of `layout`.

        size           the bytes of all these files
        read_shells    reads the manifest of the new files, which have no tensor data yet
        seal           writes checksums into the files after the copy
        begin          gets the number of bytes to process; returns a function that gets the number
                       of bytes processed since its last call
        checks         tensors to compare meanwhile
        has_digests    decides whether to compute a CRC-32 of each tensor

    Returns None if another part of the run will complete the target. After an error there is no
    target. Raises NotEnoughSpace, CorruptCheckpoint if a checksum of the source is wrong,
    SourceChanged, MissingData, ProcessLost, OSError, and the errors of `checks` and of `Staging`.
    """
    with (
        naming_full_disk(staging.target, size, staging.partial),
        staging,
        unchanged(source.files.fingerprints),
    ):
        staging.lay(layout.shells(), _strictest_mode(source))
        staging.lay_beside(layout.siblings)
        shells = read_shells(staging.path)
        staging.root.refuse_another()
        staging.share()
        outcome = copy(
            plan.join(source, shells, layout.from_masters),
            source,
            shells,
            staging.root,
            copying,
            begin(size + length_of(checks)) if begin else None,
            staging.journal,
            staging.sharing,
            [*_beside(layout, staging.path)],
            checks,
            has_digests(shells),
        )
        if outcome is None:
            if not staging.sharing.part:
                raise ProcessLost(
                    "process-lost", f"parts of {staging.target} are missing: a process was lost"
                )
            staging.postpone()
            return None
        for name, sibling in layout.siblings:
            copied = outcome.files.pop(waiting(staging.path, name), (0, 0))
            outcome.files[staging.put(name, sibling.path)] = copied
        staging.root.remove(waiting(staging.path, ""))
        seal(staging.root, shells, outcome)
        for path in shells.files.paths:  # give all files one time, however long the copy took
            with staging.root.opened(path) as file:
                os.utime(file)
    return outcome


def _beside(layout: Layout, root: str) -> Iterator[plan.Pair]:
    """Yields a pair for each file that is copied unchanged: the source file and its copy.

    Both are described as tensors of bytes, so that they are copied like tensors.
    """
    for name, sibling in layout.siblings:
        source, target = (
            Entry(name, "file", "U8", (size,), solid(size, Extent(path, 0, size)))
            for path in (sibling.path, waiting(root, name))
            for size in [sibling.size]
        )
        yield plan.Pair(source, target)


@contextmanager
def naming_full_disk(target: str, size: int, partial: str) -> Iterator[None]:
    """Turns an OSError of a full disk into NotEnoughSpace; `target` needs `size` bytes.

    The hint mentions the directory of the unfinished target, `partial`, if it still exists.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            rest = f"; {partial} is still there: add --resume, or remove it: {removal(partial)}"
            raise NotEnoughSpace(
                "not-enough-space",
                f"the filesystem of {target} is full: {error.filename}: {error.strerror}",
                hint=f"free some space ({sized(size)} are needed), or choose a target on "
                f"another filesystem{rest if os.path.lexists(partial) else ''}",
                file=target,
            ) from error
        raise


def take_part(
    source: Manifest,
    target: str,
    identity: Identity,
    layout: Layout,
    read_shells: ReadShells,
    copying: Copying,
    sharing: Sharing,
    checks: Sequence[FullCheck] = (),
    has_digests: HasDigests = lambda _: True,
) -> None:
    """Writes this process's share of a target that another process creates and completes.

    Raises the errors of `convert`. On a filesystem with locks, a KeyboardInterrupt becomes
    Interrupted, since the user can continue the unfinished target.
    """
    if (begun := sharing.begun()) is None:
        sharing.end()
        return
    length, crc, *writer = begun
    size = sum(identity.files.values())
    try:
        with (
            naming_full_disk(target, size, f"{os.path.abspath(target)}.partial"),
            unchanged(source.files.fingerprints),
            joined(target, *writer) as (folder, root),
            closing(ProcessJournal(folder, identity, sharing.part, (length, crc))) as journal,
        ):
            shells = read_shells(root.path)
            pairs = plan.join(source, shells, layout.from_masters)
            beside = [*_beside(layout, root.path)]
            about = pairs, source, shells, root, copying, None, journal, sharing
            copy(*about, beside, checks, has_digests(shells))
        sharing.end()
    except KeyboardInterrupt as error:
        if writer:  # without locks, nobody continues it
            raise
        raise Interrupted(*error.args) from error


def _strictest_mode(source: Manifest) -> int:
    """The permissions that all source files have; the target's files get them."""
    mode = 0o666
    for file in source.files.paths:
        mode &= os.stat(file).st_mode
    return mode | stat.S_IRUSR | stat.S_IWUSR  # a sealed checkpoint may be read-only
