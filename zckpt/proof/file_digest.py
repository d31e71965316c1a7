"""Computes a checksum over the files of a checkpoint, to find out if two checkpoints are copies.

Where files state no names of parameters, zckpt infers them. It may make the same error in two
checkpoints, so that equal tensors do not prove the names. For two copies this does not matter: they
are equal whatever the names are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain

from ..core.checkpoint.manifest import Manifest
from ..core.storage import sources
from ..core.storage.checksum import crc32
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent

Covered = tuple[int, int, int]
"""The offset and length of a range of bytes, and their CRC-32, or -1 for a tensor's bytes."""


def same_files(a: Manifest, b: Manifest) -> bool:
    return digest(a) == digest(b)


def digest(manifest: Manifest) -> str:
    """Computes a CRC-32 over a checkpoint's files without the elements of its tensors.

    It covers the names and sizes of files, the checksums that they state, the offsets of tensors,
    and all bytes that belong to no tensor and no checksum. If the checkpoint is a single file, the
    file's name is left out.
    """
    covered: dict[str, set[Covered]] = {}
    for record in manifest.files.records:
        if record.crc is not None:
            covered.setdefault(record.extent.file, set()).add(_covered(record.extent, record.crc))
    for entry in chain(manifest.entries.values(), manifest.replicas):
        for extent in (fragment.extent for fragment in entry.fragments):
            covered.setdefault(extent.file, set()).add(_covered(extent))
    crc = 0
    for path in sorted(manifest.files.paths):
        name = os.path.relpath(path, manifest.root) if len(manifest.files.paths) > 1 else ""
        places = sorted(covered.get(path, ()))
        crc = crc32(repr((name, sources.size(path), places)).encode(), crc)
        crc = crc_of(_between(path, places), crc)
    return f"{crc:08x}"


def _covered(extent: Extent, crc: int = -1) -> Covered:
    return extent.offset, extent.length, crc


def _between(path: str, places: Iterable[Covered]) -> Iterator[Extent]:
    reached = 0
    for offset, length, _ in (*places, (sources.size(path), 0, 0)):
        if reached < offset:
            yield Extent(path, reached, offset - reached)
        reached = max(reached, offset + length)
