"""Finds damaged members of zips, in a file that its reader refuses.

Such a file has no manifest that would name its records. But each zip of torch.save states a CRC-32
for each of its members, the pickle too. The file of a rank is one zip, and an item file of
torch.distributed.checkpoint has one after another.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing

from ..core.storage import sources
from ..core.storage.corrections import Correction
from ..core.storage.fileio import Reader
from ..core.storage.fragments import Extent, Record
from ..core.storage.records import Damage, RecordChecker
from ..errors import ZckptError
from ..files.zipdirectory import ZipMember, read_directory, zips_in

DESCRIPTOR = b"PK\7\10"  # begins the record behind the data of a member


def damage_in(path: str) -> list[Damage]:
    """Returns the members whose bytes have another CRC-32 than stated, of all zips in a file.

    The list is empty for a file that begins with no zip, or whose directory cannot be read.
    """
    try:
        records = [
            Record(Extent(path, member.offset, member.length), member.crc)
            for member in members_of(path)
        ]
    except (ZckptError, OSError):
        return []
    checker = RecordChecker(records, collect=True)
    with closing(Reader()) as reader:
        checker.finish(reader, everything=True)
    return [*checker.damage.values()]


def members_of(path: str) -> Iterator[ZipMember]:
    """Yields the members of all zips in a file, if it begins with one; raises ZckptError."""
    with sources.opened(path) as file:
        number = file.fileno()
        if sources.pread(number, 4, 0) != b"PK\3\4":
            return
        for within in zips_in(number, Extent(path, 0, os.fstat(number).st_size)):
            yield from read_directory(number, within).values()


def stated_twice(damage: Damage) -> Correction | None:
    """Returns the correction of a CRC-32 in a zip's directory, if one bit of it was flipped.

    A member states its CRC-32 a second time, in its local header or behind its data: if the bytes
    have that one, they are right, and the directory is not. Returns None otherwise.
    """
    extent, stated = damage.record.extent, damage.record.crc
    assert stated is not None
    if (stated ^ damage.crc).bit_count() != 1:
        return None
    try:
        members = [item for item in members_of(extent.file) if item.offset == extent.offset]
    except (ZckptError, OSError):
        return None
    for member in members:
        with sources.opened(extent.file) as file:
            number = file.fileno()
            head = sources.pread(number, 30, member.header)
            behind = sources.pread(number, 8, extent.offset + extent.length)
        second = struct.unpack_from("<I", head, 14)[0]
        if behind[:4] == DESCRIPTOR:
            second = struct.unpack_from("<I", behind, 4)[0]
        if second == damage.crc:
            before, after = (struct.pack("<I", crc) for crc in (stated, damage.crc))
            return Correction(extent.file, member.entry + 16, before, after)
    return None
