"""Finds damaged members of zips, in a file that its reader refuses.

The reader lists no tensors of such a file. But each zip of torch.save states a CRC-32 for each of
its members, also for the pickle. The file of a rank is one zip. An item file of
torch.distributed.checkpoint consists of several zips, one after another.
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
    """Finds the members of zips in a file whose bytes do not have the CRC-32 that the zip states.

    The list is empty if the file does not begin with a zip, or if the zip's directory is
    unreadable.
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
    """Corrects the CRC-32 in a zip's directory, if one bit of it was flipped; None otherwise.

    The zip states the CRC-32 a second time beside the data, and the data must have this second one.
    """
    extent, stated_crc = damage.record.extent, damage.record.crc
    assert stated_crc is not None
    if (stated_crc ^ damage.crc).bit_count() != 1:
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
        # the second CRC-32 is in the local header, or behind the data
        second = struct.unpack_from("<I", head, 14)[0]
        if behind[:4] == DESCRIPTOR:
            second = struct.unpack_from("<I", behind, 4)[0]
        if second == damage.crc:
            before, after = (struct.pack("<I", crc) for crc in (stated_crc, damage.crc))
            return Correction(extent.file, member.entry + 16, before, after)
    return None
