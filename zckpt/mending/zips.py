"""Finds a flipped bit in the headers or the directory of a zip.

A zip of torch.save, or of zckpt, states each fact about a member twice:

    local header    flags, name, where the data begin; in zckpt's files length and CRC-32
    descriptor      length and CRC-32, behind the data; in torch's files
    directory       flags, name, length, CRC-32, where the local header is
    end             count, length and place of the directory, in two records

Members follow each other without gaps, and have the names that torch gives. If two facts contradict
each other, each bit near them is flipped in turn. If all facts agree with exactly one of these bits
flipped, it is restored. Fields that no reader uses, such as times, are not compared.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ..core.storage import sources
from ..core.storage.corrections import Correction, corrected
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent
from ..errors import ZckptError
from ..files.zipdirectory import END, LOCATING, SHORT_TAIL, WIDE, WIDE_END

TAIL = 98  # bytes: the zip64 record, its locator, the last record
LOCAL, ENTRY, DESCRIPTOR = 30, 46, 24  # bytes of each without names
DESCRIBED = 8  # the flag of a member whose length and CRC-32 stand behind its data
NAME = re.compile(
    r"(?P<folder>.+?)/(data/(?P<key>\d+)|data\.pkl|byteorder|version|\.format_version"
    r"|\.storage_alignment|\.data/serialization_id)",
    re.DOTALL,
)
"""The names of members that torch 2.13 and zckpt write."""
LIMIT = 1 << 28  # bytes of a directory


class _Member(Struct, frozen=True):
    """A member of a zip, as the zip's directory describes it.

    `place` and `size` are the offset and the length of this description in the directory. `header`
    is the offset of the member's local header.
    """

    place: int
    size: int
    name: bytes
    flags: int
    crc: int
    length: int
    header: int


class _Wrong(Exception):
    """Raised if a zip contradicts itself; a byte in one of these `ranges` of the file is wrong."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        super().__init__()
        self.ranges = ranges


def flipped_in(path: str) -> list[Correction]:
    """Finds the flipped bits in the headers and directories of all zips in a file.

    A zip has a flipped bit if two of its facts contradict each other, and exactly one bit explains
    that. Other zips are left out. The list begins with the last zip of the file; it is empty if the
    file is no zip.
    """
    found = list[Correction]()
    try:
        with sources.opened(path) as file:
            stop = os.fstat(file.fileno()).st_size
            while stop > 0:
                end = _end(file.fileno(), stop)
                if end is None:
                    break
                correction = _flipped(path, end)
                if correction is not None:
                    found.append(correction)
                with corrected([correction] if correction else []), sources.opened(path) as again:
                    stop = _Zip(path, again.fileno(), end).begin
    except (ZckptError, OSError, _Wrong):
        pass
    return found


def _end(file: int, stop: int) -> int | None:
    """Finds the end of the last zip before the offset `stop`; None if there is none.

    A zip ends with three signatures, of which one may be damaged.
    """
    behind = max(0, stop - SHORT_TAIL)
    tail = sources.pread(file, stop - behind, behind)
    places = [
        place + further
        for signature, further in ((END, 22), (LOCATING, 42), (WIDE_END, TAIL))
        if (place := tail.rfind(signature)) >= 0 and place + further <= len(tail)
    ]
    return behind + max(places) if places and behind + max(places) >= TAIL else None


def _flipped(path: str, end: int) -> Correction | None:
    """Finds the one flipped bit that explains why the zip that ends at `end` contradicts itself.

    None if it does not contradict itself, or if no bit or several bits explain that.
    """
    ranges = _contradiction(path, end)
    if not ranges:
        return None
    first, found = ranges[0][0], list[Correction]()
    for start, stop in dict.fromkeys(ranges):
        with sources.opened(path) as file:
            data = sources.pread(file.fileno(), stop - start, start)
        for place, byte in enumerate(data):
            for bit in range(8):
                correction = Correction.of_bit(path, start + place, bit, byte)
                if correction not in found and _explains(correction, end, first):
                    found.append(correction)
                if len(found) > 1:
                    return None
    return found[0] if found else None


def _contradiction(path: str, end: int) -> Sequence[tuple[int, int]]:
    try:
        with sources.opened(path) as file:
            _Zip(path, file.fileno(), end).check()
    except _Wrong as wrong:
        return wrong.ranges
    return ()


def _explains(correction: Correction, end: int, place: int) -> bool:
    """Whether a zip that ends at `end` agrees with itself once `correction` is applied.

    Members near the correction must also match their CRC-32s. Members near the offset `place`
    are checked first.
    """
    with corrected([correction]), sources.opened(correction.file) as file:
        try:
            zip_ = _Zip(correction.file, file.fileno(), end)
            zip_.check(place)
            return all(map(zip_.has_its_crc, zip_.near(correction.offset)))
        except _Wrong:
            return False


class _Zip:
    """The zip in a file that ends at a given offset.

    Raises _Wrong if the records at its end contradict each other.
    """

    def __init__(self, path: str, file: int, end: int) -> None:
        self.path, self.file = path, file
        self.tail = end - TAIL
        self.count, self.length, start = self._read_end(end)
        self.begin = self.tail - self.length - start
        self.start = self.begin + start
        if self.begin < 0 or self.length > LIMIT:
            raise _Wrong((self.tail, end))

    def _read_end(self, end: int) -> tuple[int, int, int]:
        data = self._read(self.tail, TAIL)
        *record, count, length, start = struct.unpack_from("<4sQ4xIIQQQQ", data)
        locator = struct.unpack_from("<4sIQI", data, 56)
        last = struct.unpack_from("<4sHHHHIIH", data, 76)
        wide = (WIDE_END, TAIL - 54, 0, 0, count)
        short = (min(count, 0xFFFF), min(count, 0xFFFF), min(length, WIDE), min(start, WIDE))
        agree = (
            (*record,) == wide
            and locator == (LOCATING, 0, start + length, 1)
            and last == (END, 0, 0, *short, 0)
        )
        if not agree:
            raise _Wrong((self.tail, end))
        return count, length, start

    def _read(self, offset: int, length: int) -> bytes:
        data = sources.pread(self.file, length, max(0, offset)) if length > 0 else b""
        return data.ljust(max(0, length), b"\0")

    def check(self, place: int | None = None) -> None:
        """Raises _Wrong if the zip contradicts itself; checks members near `place` first."""
        self.members = [*self._entries()]
        near = [] if place is None else self.near(place)
        for number in (*near, *range(len(self.members))):
            self._check(number)
        keys = 0
        folders = set()
        for number, member in enumerate(self.members):
            match = NAME.fullmatch(member.name.decode("utf-8", "replace"))
            if match is None or (match["key"] is not None and match["key"] != str(keys)):
                raise self._wrong(number)
            keys += match["key"] is not None
            folders.add(match["folder"])
        if len(folders) != 1 or len({member.name for member in self.members}) != self.count:
            raise _Wrong((self.start, self.tail))

    def near(self, place: int) -> list[int]:
        """The indices of members whose headers, data or directory entry contain byte `place`.

        Before each of them comes the index of the preceding member.
        """
        numbers = []
        for number, member in enumerate(self.members):
            entry = self.start + member.place
            header = self.begin + member.header
            if entry <= place < entry + member.size or (
                header <= place < self._next(number) + DESCRIPTOR
            ):
                numbers += [max(0, number - 1), number]
        return [*dict.fromkeys(numbers)]

    def has_its_crc(self, number: int) -> bool:
        member = self.members[number]
        offset = self._offset(member)
        return crc_of([Extent(self.path, offset, member.length)]) == member.crc

    def _entries(self) -> Iterator[_Member]:
        directory, place, before = self._read(self.start, self.length), 0, 0
        for number in range(self.count):
            member = _entry(directory, place)
            is_last = number == self.count - 1
            if member is None or is_last != (place + member.size == len(directory)):
                stop = min(place + 2 * ENTRY + 256, len(directory))
                raise _Wrong(
                    (self.start + before, self.start + stop), (self.tail, self.tail + TAIL)
                )
            yield member
            before, place = place, place + member.size

    def _check(self, number: int) -> None:
        """Raises _Wrong unless a member's local header, descriptor and directory entry agree."""
        member = self.members[number]
        name = len(member.name)
        head = self._read(self.begin + member.header, LOCAL + name)
        magic, flags, method, crc, packed, length, named, _ = struct.unpack_from(
            "<4s2xHH4xIIIHH", head
        )
        header_sizes = (crc, packed, length)
        short = min(member.length, WIDE)
        expected = (member.crc, short, short)
        stop = self._offset(member) + member.length
        agree = (
            (magic, method, named, head[LOCAL:]) == (b"PK\3\4", 0, name, member.name)
            and flags == member.flags == self._flags(member)
            and header_sizes == ((0, 0, 0) if flags & DESCRIBED else expected)
            and (number > 0 or member.header == 0)
        )
        if flags & DESCRIBED and agree:
            form = "<4sIQQ" if member.length >= WIDE else "<4sIII"
            data = self._read(stop, struct.calcsize(form))
            facts = (b"PK\7\10", member.crc, member.length, member.length)
            agree = struct.unpack(form, data) == facts
            stop += len(data)
        if not agree or stop != self._next(number):
            raise self._wrong(number)

    def _flags(self, member: _Member) -> int:
        """The flags that a member must have: those of the zip's first member, with one exception.

        torch writes no descriptor behind a member without bytes. So the flag that announces a
        descriptor is not set for such a member.
        """
        flags = self.members[0].flags
        return flags if member.length else flags & ~DESCRIBED

    def _offset(self, member: _Member) -> int:
        """Where a member's data begin in the file, computed from its local header."""
        header = self.begin + member.header
        name, extra = struct.unpack("<HH", self._read(header + 26, 4))
        return int(header + LOCAL + name + extra)

    def _next(self, number: int) -> int:
        """Where member `number` ends in the file, and the next one or the directory begins."""
        following = self.members[number + 1 : number + 2]
        return self.begin + following[0].header if following else self.start

    def _wrong(self, number: int) -> _Wrong:
        """Makes the error about a member that contradicts itself.

        Its `ranges` are all bytes that may be wrong: the member's local header, descriptor and
        directory entry, and the next directory entry, which states where the next member begins.
        """
        member = self.members[number]
        header, entry = self.begin + member.header, self.start + member.place
        stop = self._offset(member) + member.length
        ranges = [
            (entry, entry + member.size),
            (header, header + LOCAL + len(member.name)),
            (stop, stop + DESCRIPTOR),
        ]
        if number + 1 < len(self.members):
            following = entry + member.size
            ranges.append((following, following + ENTRY))
        return _Wrong(*((max(0, start), end) for start, end in ranges if end <= self.tail + TAIL))


def _entry(directory: bytes, place: int) -> _Member | None:
    """Parses the directory's entry at `place`; None if torch would not write such an entry."""
    if len(directory) < place + ENTRY:
        return None
    magic, flags, method, crc, packed, length, named, extras, comment, disk, header = (
        struct.unpack_from("<4s4xHH4xIIIHHHH6xI", directory, place)
    )
    start = place + ENTRY + named
    if (magic, method, comment, disk) != (b"PK\1\2", 0, 0, 0) or packed != length:
        return None
    if extras:
        extra = directory[start : start + extras]
        fields = [field for field in (length, packed, header) if field == WIDE]
        form = struct.Struct(f"<HH{len(fields)}Q")
        if form.size != len(extra) or form.unpack(extra)[:2] != (1, form.size - 4):
            return None
        wide = [*form.unpack(extra)[2:]]
        if length == WIDE:
            length, packed = wide.pop(0), wide.pop(0)
        if header == WIDE:
            header = wide.pop(0)
    size = ENTRY + named + extras
    name = directory[place + ENTRY : start]
    return _Member(place, size, name, flags, crc, length, header) if packed == length else None
