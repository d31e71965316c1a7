"""Are the files of two checkpoints equal, whatever their tensors mean?

Then no name that is inferred can be wrong in one of them alone: a copy cannot differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..core import sources
from ..core.checksum import crc32
from ..core.fileio import CRC_BLOCK
from ..core.fragments import Extent
from ..core.manifest import Manifest


def digest(manifest: Manifest) -> str:
    """The CRC-32 of all that its files state beside tensors, and of where tensors lie.

    It is of the checksums that the files have, and of all bytes that no checksum and no tensor
    covers. The name of a checkpoint that is one file does not count.
    """
    tensors = {part.extent for entry in manifest.entries.values() for part in entry.fragments}
    known: dict[str, list[tuple[Extent, int | None]]] = {}
    for record in manifest.records:
        if record.crc is not None or record.extent in tensors:
            known.setdefault(record.extent.file, []).append((record.extent, record.crc))
    crc = 0
    for path in sorted(manifest.files):
        name = "" if path == manifest.root else os.path.relpath(path, manifest.root)
        covered = sorted(known.get(path, []), key=lambda item: item[0].offset)
        places = [(extent.offset, extent.length, own) for extent, own in covered]
        crc = crc32(repr((name, sources.size(path), places)).encode(), crc)
        crc = _crc_between(path, [extent for extent, _ in covered], crc)
    return f"{crc:08x}"


def _crc_between(path: str, covered: Iterable[Extent], crc: int) -> int:
    """Continues a CRC-32 with the bytes of a file that these extents do not cover."""
    size = sources.size(path)
    with sources.opened(path) as file:
        reached = 0
        for extent in (*covered, Extent(path, size, 0)):
            while reached < extent.offset:
                length = min(CRC_BLOCK, extent.offset - reached)
                crc = crc32(sources.pread(file.fileno(), length, reached), crc)
                reached += length
            reached = max(reached, extent.offset + extent.length)
    return crc
