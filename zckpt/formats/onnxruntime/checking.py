"""What only the bytes of a checkpoint tell: stale weights, and copies that are not copies.

Called when a writer is about to copy, so that `inspect` reads no tensor: one more pass over the
weights, in blocks.

A 16-bit copy is made of its fp32 master after every update. A master that does not round to it is
one that was left behind: of a rank that does not own it, or from before the last load.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cast import cast
from ...core.checksum import crc32
from ...core.dtypes import SIZES
from ...core.fileio import Reader
from ...core.fragments import Extent, Record
from ...core.manifest import Entry, Manifest
from ...errors import CorruptCheckpoint, InconsistentCheckpoint
from .read import differing

BLOCK = 1 << 18  # elements


def check(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint where a master is stale or ranks hold different weights.

    CorruptCheckpoint where that is because the file is damaged.
    """
    stated = {record.extent: record.crc for record in manifest.records}
    reader = Reader()
    try:
        _check(manifest, reader, stated)
    except InconsistentCheckpoint:
        for record in manifest.records:  # a flipped bit is a better reason
            _check_record(reader, record)
        raise
    finally:
        reader.close()


def _check(manifest: Manifest, reader: Reader, stated: Mapping[Extent, int | None]) -> None:
    for name in manifest.parameters:
        master, half = (manifest.entries.get(f"{name}/{slot}") for slot in ("master", "param"))
        if master is not None and half is not None:
            _check_rounding(reader, name, master, half)
    for replica in manifest.replicas:
        first, other = manifest.entries[replica.name].fragments, replica.fragments
        crcs = {stated.get(part.extent) for part in (*first, *other)}
        if len(crcs) == 1 and None not in crcs:
            continue  # reading.py has compared these
        if replica.slot != "state":  # and legacy.py those
            _check_equal(reader, manifest.entries[replica.name], replica)


def _check_record(reader: Reader, record: Record) -> None:
    """Raises CorruptCheckpoint where bytes do not have the CRC-32 that their file states."""
    crc, extent = 0, record.extent
    for start in range(0, extent.length if record.crc is not None else 0, 4 * BLOCK):
        part = extent.part(start, min(start + 4 * BLOCK, extent.length))
        block = memoryview(bytearray(part.length))
        reader.read(part, block)
        crc = crc32(block, crc)
    if record.crc not in (None, crc):
        raise CorruptCheckpoint(
            f"{extent.file} is damaged: the {extent.length} bytes at {extent.offset} do not have "
            "the CRC-32 that the file states"
        )


def _check_rounding(reader: Reader, name: str, master: Entry, half: Entry) -> None:
    import numpy as np

    rounded = memoryview(bytearray(min(BLOCK, half.numel) * SIZES[half.dtype]))
    for start in range(0, master.numel, BLOCK):
        stop = min(start + BLOCK, master.numel)
        into = rounded[: (stop - start) * SIZES[half.dtype]]
        cast(_block(reader, master, start, stop), master.dtype, into, half.dtype)
        held = _block(reader, half, start, stop)
        if into == held:
            continue
        first, other = np.frombuffer(into, "<u2"), np.frombuffer(held, "<u2")
        above = np.uint16(0x7C00 if half.dtype == "F16" else 0x7F80)  # beyond which a NaN is
        nan = (first & np.uint16(0x7FFF) > above) & (other & np.uint16(0x7FFF) > above)
        wrong = np.flatnonzero((first != other) & ~nan)
        if len(wrong):
            where = start + int(wrong[0])
            part = next(iter(master.fragments.overlapping(where, where + 1)))
            raise InconsistentCheckpoint(
                f"{part.extent.file}: the fp32 weight {name} does not round to its {half.dtype} "
                f"copy (first at element {where}): one of them is stale",
                hint="files of two saves are mixed, or the rank's file was saved before its "
                "weights were current",
            )


def _check_equal(reader: Reader, entry: Entry, replica: Entry) -> None:
    for start in range(0, entry.numel, BLOCK):
        stop = min(start + BLOCK, entry.numel)
        if _block(reader, entry, start, stop) != _block(reader, replica, start, stop):
            files = [next(iter(each.fragments)).extent.file for each in (entry, replica)]
            raise differing(entry.name, *files)


def _block(reader: Reader, entry: Entry, start: int, stop: int) -> memoryview:
    """Elements [start, stop) of an entry, whose fragments are runs."""
    size = SIZES[entry.dtype]
    block = memoryview(bytearray((stop - start) * size))
    for fragment in entry.fragments.overlapping(start, stop):
        first, end = max(start, fragment.start), min(stop, fragment.stop)
        part: Extent = fragment.extent.part(
            (first - fragment.start) * size, (end - fragment.start) * size
        )
        reader.read(part, block[(first - start) * size : (end - start) * size])
    return block
