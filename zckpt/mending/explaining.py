"""Finds the original bytes of a damaged record, which is a range of bytes with a checksum.

The file states a CRC-32 of the record. If flipping one bit gives the record that CRC-32, the bit is
flipped back. But damage of many bits may look like one flipped bit. Its probability (`chance`)
grows with the size of the record:

    bytes     19 kB        256 KiB     4 MiB      256 MiB    from 512 MiB on
    chance    1 in 28,000  1 in 2,000  1 in 128   1 in 2     several bits explain every CRC-32

So in a record of up to 256 KiB the bit is restored. In a larger record, other bytes (a witness)
must confirm the bit, or the user accepts the probability. A lost sector of a disk leaves an aligned
block of one repeated value (a burst), which is damage of many bits. So in a record with such a
block, the CRC-32 alone is not sufficient. A second CRC-32 of the same bytes is no witness: CRCs are
linear, so it agrees with every explanation of the first one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing

from msgspec import Struct

from ..core.checkpoint.dtypes import NUMBERS, SIZES, decode
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.mended import By, Mended, Value
from ..core.storage.checksum import flipped_bits
from ..core.storage.corrections import Correction
from ..core.storage.fileio import Buffer, Reader
from ..core.storage.fragments import Extent
from ..core.storage.records import Damage
from ..errors import Notice, counted, note, problem, warning
from .witnesses import Contents, Witnesses

BELIEVED = 256 << 10  # bytes of a record whose one flipped bit is believed: 1 in 2,000
SECTOR = 512  # bytes
BLOCK = 1 << 20  # bytes that are looked at at once


class Place(Struct, frozen=True):
    """One damaged record (a byte range with a stated checksum), and how to restore its bytes.

    corrections    changes that restore the bytes or the checksum; empty if the record is lost
    by             evidence: "checksum", "witness" (other bytes), "chance" (the user must accept
                   the corrections) or None (the record is lost)
    chance         probability that damage of many bits looks like one flipped bit
    why            why the record is lost, or the user must accept the corrections
    bits           single bits that explain the CRC-32: (byte in the record, bit)
    burst          offset in the file of a block of one repeated value
    """

    damage: Damage
    contents: Contents
    chance: float
    bits: Sequence[tuple[int, int]] = ()
    burst: int | None = None
    corrections: tuple[Correction, ...] = ()
    by: By | None = None
    witness: str = ""
    why: str = ""

    @property
    def extent(self) -> Extent:
        return self.damage.record.extent

    @property
    def is_of_checksum(self) -> bool:
        """Whether only the stated checksum is damaged, not the bytes of the record."""
        start, stop = self.extent.offset, self.extent.offset + self.extent.length
        return any(not start <= each.offset < stop for each in self.corrections)

    def is_written(self, accepts_chance: bool) -> bool:
        """Whether the copy gets the corrected bytes.

        `accepts_chance` says that the user accepts corrections which are only probable.
        """
        return self.by is not None and (self.by != "chance" or accepts_chance)

    def element(self) -> tuple[Entry, int, Extent] | None:
        """The element that is corrected: its tensor, its row-major index, and its byte range.

        None if more than one byte is corrected, or if the corrected byte is in no tensor.
        """
        if len(self.corrections) != 1 or len(self.corrections[0].after) != 1:
            return None
        return element_at(self.contents, self.corrections[0].offset)

    def mended(self, root: str) -> Mended | None:
        """Describes how the record was restored, for zckpt-mended.json in the copy.

        None if the record is lost and nothing was restored. The file's path is relative to `root`.
        """
        if self.by is None:
            return None
        first, element = self.corrections[0], self.element()
        bit = before = after = None
        if len(self.corrections) == 1 and len(first.after) == 1:
            changed = first.before[0] ^ first.after[0]
            bit = changed.bit_length() - 1 if changed & (changed - 1) == 0 else None
        if element is not None:
            entry, _, extent = element
            before, after = values(entry, extent, first)
        names = {entry.name for entry, _ in self.contents}
        return Mended(
            file=os.path.relpath(first.file, root),
            offset=first.offset,
            bytes=sum(len(each.after) for each in self.corrections),
            by=self.by,
            chance=self.chance,
            bit=bit,
            tensor=element[0].name if element else names.pop() if len(names) == 1 else None,
            element=element[1] if element else None,
            before=before,
            after=after,
            witness=self.witness,
        )

    def notice(self, root: str) -> Notice:
        """The line of the report: what was damaged, and the evidence for the correction."""
        file = os.path.relpath(self.extent.file, root)
        restored = self.mended(root)
        names = [*dict.fromkeys(entry.name for entry, _ in self.contents)]
        what = f"{counted(self.extent.length, 'byte')} at {self.extent.offset} of {file}"
        subject = restored.tensor if restored else names[0] if len(names) == 1 else None
        about = {"subject": subject, "file": self.extent.file}
        if restored is None:
            message = f"{what} cannot be restored: {self.why}"
            return problem("not-mendable", message, hint=LOST, **about)
        where = (
            f", element {restored.element} of {restored.tensor}"
            if restored.element is not None
            else ""
        )
        if restored.bit is not None:
            found = f"bit {restored.bit} of byte {restored.offset} of {file} was flipped{where}"
        else:
            found = (
                f"{counted(restored.bytes, 'byte')} of the {what} differ from {restored.witness}"
            )
        if restored.before is not None or restored.after is not None:
            found += f": {restored.before} instead of {restored.after}"
        if self.by == "witness":
            confirmed = (
                "" if restored.bit is None else f"; {restored.witness} confirms the correction"
            )
            return note("mended", f"{found}{confirmed}", **about)
        found += f" (damage of many bits would look the same in {one_in(self.chance)})"
        if self.by == "checksum":
            return note("mended", found, **about)
        return warning("mended", f"{found}; {self.why}", hint=CHANCE, **about)


LOST = (
    "give an older checkpoint that has the same bytes (--older PATH), or take another copy of the "
    "file"
)
CHANCE = "type --accept-chance to flip the bit back, or give an older checkpoint (--older PATH)"


def one_in(chance: float) -> str:
    """Formats a probability for a sentence: "1 of 2,000 cases"."""
    return f"1 of {round(1 / chance):,} cases" if chance < 1 else "every case"


def explained(damage: Damage, contents: Contents, witnesses: Witnesses) -> Place:
    """Finds the original bytes of a damaged record, and the evidence for them.

    `contents` are the tensors that have elements in the record. The record is read, and so are
    tensors elsewhere that may confirm a correction (`witnesses`).
    """
    extent, stated = damage.record.extent, damage.record.crc
    assert stated is not None
    chance = chance_of(extent.length)
    bits = _outside(flipped_bits(stated, damage.crc, extent.length), damage, contents)
    burst = burst_in(extent)
    about = damage, contents, chance, bits, burst
    doubts = [witnesses.says(contents, extent.offset + byte, bit) for byte, bit in bits]
    confirmed = [item for item in zip(bits, doubts, strict=True) if item[1].confirms]
    one = len(bits) == 1 and not doubts[0].contradicts
    if one and burst is None and extent.length <= BELIEVED:
        return Place(*about, (flipped_back(extent, *bits[0]),), "checksum")
    if len(confirmed) == 1:
        ((byte, bit), said) = confirmed[0]
        return Place(*about, (flipped_back(extent, byte, bit),), "witness", said.who)
    substituted = witnesses.substituted(damage, contents)
    if substituted is not None:
        return Place(*about, substituted.corrections, "witness", substituted.who)
    if one:
        why = doubt(extent.length)
        if burst is not None:
            why = (
                f"the {SECTOR} bytes at {burst} have one value, as after the loss of a disk sector"
            )
        return Place(*about, (flipped_back(extent, *bits[0]),), "chance", why=why)
    if not bits:
        why = "no single flipped bit explains the wrong checksum"
    elif len(bits) > 1:
        why = (
            f"flipping any one of {len(bits)} bits would make the checksum match, and nothing "
            "shows which one was flipped"
        )
    else:
        why = f"one flipped bit explains the wrong checksum, but {doubts[0].who} contradicts that"
    return Place(*about, why=why)


def doubt(length: int) -> str:
    """Explains why one flipped bit that restores a CRC-32 may still not be the real damage.

    `length` is the number of bytes that the CRC-32 covers.
    """
    return f"the checksum of {counted(length, 'byte')} is no proof that only one bit was flipped"


def chance_of(length: int) -> float:
    """The probability that damage of many bits in `length` bytes looks like one flipped bit."""
    return min(1.0, 8 * length / 2**32)


def flipped_back(extent: Extent, byte: int, bit: int) -> Correction:
    """Makes the correction that flips one bit of a record back; reads the byte of this bit."""
    with closing(Reader()) as reader:
        view = memoryview(bytearray(1))
        reader.read(extent.part(byte, byte + 1), view)
    return Correction.of_bit(extent.file, extent.offset + byte, bit, view[0])


def element_at(contents: Contents, offset: int) -> tuple[Entry, int, Extent] | None:
    """Finds the element at byte `offset` of the file: its tensor, row-major index, and byte range.

    None if no tensor in `contents` contains the byte.
    """
    for entry, fragment in contents:
        extent, size = fragment.extent, SIZES[entry.dtype]
        if extent.offset <= offset < extent.offset + extent.length:
            start = (offset - extent.offset) // size * size
            return entry, fragment.element_at(offset, size), extent.part(start, start + size)
    return None


def values(entry: Entry, extent: Extent, correction: Correction) -> tuple[Value, Value]:
    """The value of an element before and after a correction of one byte.

    Both are None for a type whose values are no numbers.
    """
    if entry.dtype not in NUMBERS:
        return None, None
    data = bytearray(extent.length)
    with closing(Reader()) as reader:
        reader.read(extent, memoryview(data))
    place = correction.offset - extent.offset
    pair = []
    for byte in (correction.before, correction.after):
        data[place : place + 1] = byte
        value = decode(entry.dtype, bytes(data))
        pair.append(value if value == value and abs(value) != float("inf") else str(value))
    return pair[0], pair[1]


def _outside(
    bits: list[tuple[int, int]], damage: Damage, contents: Contents
) -> list[tuple[int, int]]:
    """Drops the `bits` inside tensors, if these tensors have checksums of their own.

    This applies to the files of a universal checkpoint. Damaged tensors were corrected before, so
    only bytes outside tensors can still be wrong. For other records, all `bits` are returned.
    """
    extent = damage.record.extent
    if not any(entry.digest is not None for entry, own in contents if own.extent != extent):
        return bits
    return [item for item in bits if element_at(contents, extent.offset + item[0]) is None]


def burst_in(extent: Extent) -> int | None:
    """Finds a block of a record whose bytes are all the same: the trace of a lost disk sector.

    Blocks have 512 bytes and are aligned in the file. Returns the block's offset in the file, or
    None.
    """
    import numpy

    start = -(-extent.offset // SECTOR) * SECTOR
    stop = (extent.offset + extent.length) // SECTOR * SECTOR
    buffer = Buffer(BLOCK).view
    with closing(Reader()) as reader:
        for offset in range(start, stop, BLOCK):
            length = min(BLOCK, stop - offset)
            reader.read(Extent(extent.file, offset, length), buffer[:length])
            words = numpy.frombuffer(buffer[:length], "<u8").reshape(-1, SECTOR // 8)
            first = words[:, 0]
            are_same = (words == first[:, None]).all(axis=1)
            are_same &= first == (first & 0xFF) * numpy.uint64(0x0101010101010101)
            if are_same.any():
                return offset + int(are_same.argmax()) * SECTOR
    return None
