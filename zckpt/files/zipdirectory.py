"""Reads the directory of a zip: where its members lie.

Members must be STORED (not compressed), lie inside the zip, and not overlap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from ..core.storage import byte_sources, sources
from ..core.storage.fragments import Extent
from ..errors import CorruptCheckpoint, UnsupportedCheckpoint

# The most bytes of a zip's directory. A storage takes 100 to 150, and a rank of stage 3 has one for
# each of a model's parameters. The largest models have 50,000 parameters; a million fit.
MAX_DIRECTORY = 1 << 28
LOCATOR = 20  # bytes before END, with the offset of the zip64 record
# Bytes at the end of a zip that are read together: LOCATOR, the record of END, the longest comment.
# For a zip inside of a larger file, which may have thousands of them, fewer are read first.
TAIL, SHORT_TAIL = LOCATOR + 22 + 65535, 4096
WIDE = 0xFFFFFFFF  # the value is in the zip64 field instead
# bytes: the alignment of data, and the lengths of what may follow data
ALIGNMENT, DESCRIPTORS = 64, (0, 16, 24)
END = b"PK\5\6"  # the beginning of the record at the end of a zip
LOCATING, WIDE_END = b"PK\6\7", b"PK\6\6"  # zip64, which torch always writes
MANY = 1000  # members; a directory with at least as many is kept
_FIELDS = struct.Struct("<4s4xHH4xIIIHHH8xI")


class ZipMember(Struct, frozen=True):
    """One member of a zip, as the zip's directory states it.

    `header`, `entry` and `offset` are the offsets of the member's local header, of its entry in the
    directory, and of its data.
    """

    name: str
    header: int
    entry: int
    offset: int
    length: int
    crc: int | None


class _Entry(Struct, frozen=True, gc=False):
    """One entry of a zip's directory.

    `place` is the entry's offset in the directory. `header` is the offset of the member's local
    header from the beginning of the zip.
    """

    name: bytes
    place: int
    header: int
    length: int
    crc: int

    @property
    def stop(self) -> int:
        """The earliest end of the member's data; further fields in its header would move it."""
        return self.header + 30 + len(self.name) + self.length


class _Known(Struct, frozen=True, eq=False):
    """A parsed zip directory, kept to recognize others that differ only in the name of the folder.

    The bytes of `folder` occur in the directory only at the beginning of each name. `members` are
    its entries, each with the offset of its data.
    """

    folder: bytes
    directory: bytes
    members: list[tuple[_Entry, int]]
    has_crcs: bool


Directories = dict[tuple[int, int, int], _Known]
"""A cache of parsed zip directories with at least MANY members.

A key is the directory's offset in the zip, its number of members, and the length of the folder's
name.
"""


def read_directory(
    file: int, within: Extent, directories: Directories | None = None
) -> dict[str, ZipMember]:
    """Reads the directory at the end of a zip: the members that are not empty, by name.

    `directories` is a cache: a directory that differs from a cached one only in the folder's name
    is not parsed. Raises CorruptCheckpoint; UnsupportedCheckpoint for members that are compressed
    or encrypted, or a directory that is too large.
    """
    zip_ = _Zip(file, within)
    directories = {} if directories is None else directories
    folder = zip_.folder if zip_.count >= MANY else b""
    key = (zip_.start, zip_.count, len(folder))
    if key in directories:  # with ZeRO-3, all ranks' files differ only in the folder's name
        members = _members_as(directories[key], zip_)
        if members is not None:
            return members
    entries = _entries(within.file, zip_.directory, zip_.count)
    # torch.serialization.set_crc32_options(False) leaves zeros everywhere (torch >= 2.6)
    has_crcs = any(entry.crc for entry in entries if entry.length)
    members_with_offsets: list[tuple[_Entry, int]] = []
    places: list[tuple[int, int]] = []
    # in a store, every read is a request
    followed = zip_.followed(entries) if byte_sources.of(file) else {}
    for entry in entries:
        stop = entry.stop
        if entry.length:  # ZeRO-3 leaves empty storages on every rank, whose headers are not read
            offset = followed.get(entry) or zip_.data_offset(entry)
            members_with_offsets.append((entry, offset))
            stop = offset + entry.length
        places.append((entry.header, stop))
    _require_apart(within.file, entries, places, zip_.start)
    is_in_names_alone = folder and zip_.directory.count(folder) == len(entries)
    if is_in_names_alone and all(entry.name.startswith(folder) for entry in entries):
        directories[key] = _Known(folder, zip_.directory, members_with_offsets, has_crcs)
    return zip_.members(members_with_offsets, has_crcs)


def zips_in(file: int, within: Extent) -> list[Extent]:
    """The consecutive zips in these bytes of a file, the last one first.

    Each zip ends with its directory, which states its distance from the zip's beginning. There may
    be padding between the zips. Raises CorruptCheckpoint.
    """
    zips, stop = [], within.offset + within.length
    while stop > within.offset:
        behind = max(within.offset, stop - SHORT_TAIL)
        tail = sources.pread(file, stop - behind, behind)
        end = tail.rfind(END)
        if end < 0 or len(tail) < end + 22:
            raise _damaged(within.file)
        length, start = struct.unpack_from("<II", tail, end + 12)
        place = behind + end
        if tail[max(0, end - LOCATOR) :][:4] == LOCATING:
            place -= LOCATOR + 56
            record = sources.pread(file, 56, place)
            if record[:4] != WIDE_END or len(record) < 56:
                raise _damaged(within.file)
            length, start = struct.unpack_from("<QQ", record, 40)
        begin = place - length - start
        if not within.offset <= begin < place:
            raise _damaged(within.file)
        zips.append(Extent(within.file, begin, behind + end + 22 - begin))
        stop = begin
    return zips


def _members_as(parsed: _Known, zip_: _Zip) -> dict[str, ZipMember] | None:
    """Reuses the parsed directory of another zip, if `zip_` differs only in its folder's name.

    Returns the members by name. None if the directories differ in anything else, or if the data of
    a member begin at another offset.
    """
    folder = zip_.folder
    if parsed.directory.replace(parsed.folder, folder) != zip_.directory:
        return None
    members_with_offsets = [
        (replace(entry, name=folder + entry.name[len(folder) :]), offset)
        for entry, offset in parsed.members
    ]
    if any(zip_.data_offset(entry) != offset for entry, offset in members_with_offsets):
        return None
    return zip_.members(members_with_offsets, parsed.has_crcs)


class _Zip(Struct, eq=False, dict=True):
    """A zip inside a file: its directory, and where its members lie."""

    file: int
    within: Extent

    def __post_init__(self) -> None:
        self._read_tail(SHORT_TAIL if self.within.offset else TAIL)
        if self.behind and self.tail.rfind(END) < LOCATOR:
            self._read_tail(TAIL)
        self.start, length, self.count = self._find()
        self.directory = self.read(self.start, length)

    @property
    def folder(self) -> bytes:
        """The folder in the first member's name, with its slash; empty if there is no folder."""
        name = self.directory[46 : 46 + int.from_bytes(self.directory[28:30], "little")]
        return name[: name.find(b"/") + 1]

    def members(
        self, members_with_offsets: Iterable[tuple[_Entry, int]], has_crcs: bool
    ) -> dict[str, ZipMember]:
        """The members by name, given entries and the offsets of their data in the zip."""
        members = {}
        for entry, offset in members_with_offsets:
            name, base = _text(entry.name), self.within.offset
            places = base + entry.header, base + self.start + entry.place, base + offset
            members[name] = ZipMember(name, *places, entry.length, entry.crc if has_crcs else None)
        return members

    def _read_tail(self, most: int) -> None:
        self.behind = max(0, self.within.length - most)
        length = self.within.length - self.behind
        self.tail = sources.pread(self.file, length, self.within.offset + self.behind)

    def read(self, start: int, length: int) -> bytes:
        """Reads bytes of the zip; returns b"" if they exceed its end."""
        if start >= self.behind:
            return self.tail[start - self.behind :][:length]
        if start + length > self.within.length:
            return b""
        return sources.pread(self.file, length, self.within.offset + start)

    def _find(self) -> tuple[int, int, int]:
        """Finds the directory: its first byte, its length, and its number of entries."""
        path, end = self.within.file, self.tail.rfind(END)
        if end < 0 or len(self.tail) < end + 22:
            raise CorruptCheckpoint(
                "file-cut-short",
                f"{path} ends early: its zip directory is missing",
                file=path,
            )
        count, length, start = struct.unpack_from("<HII", self.tail, end + 10)
        locator = max(0, end - LOCATOR)
        if self.tail[locator : locator + 4] == LOCATING:
            (place,) = struct.unpack_from("<Q", self.tail, locator + 8)
            record = self.read(place, 56)
            if len(record) != 56 or record[:4] != WIDE_END:
                raise _damaged(path)
            count, length, start = struct.unpack_from("<QQQ", record, 32)
        if start + length > self.within.length or 46 * count > length:
            raise _damaged(path)
        if length > MAX_DIRECTORY:
            raise UnsupportedCheckpoint(
                "file-too-large",
                f"{path} has a zip directory of {length} bytes; zckpt reads up to {MAX_DIRECTORY}",
                hint="save the checkpoint as several files, such as one per rank",
                file=path,
            )
        return start, length, count

    def data_offset(self, entry: _Entry) -> int:
        """Reads a member's local header; returns the offset of the member's data."""
        head = self.read(entry.header, 30 + len(entry.name))
        if head[:4] != b"PK\3\4" or head[30:] != entry.name:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.within.file}: the zip directory points to bytes that are no member",
                file=self.within.file,
            )
        length, extra = struct.unpack_from("<HH", head, 26)
        return int(entry.header + 30 + length + extra)

    def followed(self, entries: Sequence[_Entry]) -> dict[_Entry, int]:
        """Computes the offset of each member's data from the place of the next member.

        No local header is read. Members are left out if no aligned offset is found: for them, call
        `data_offset`.
        """
        # torch puts a descriptor of 16 or 24 bytes after the data, zckpt puts none
        ordered = sorted(entries, key=lambda entry: entry.header)
        nexts = [*(entry.header for entry in ordered[1:]), self.start]
        return {
            entry: offset
            for entry, end in zip(ordered, nexts, strict=True)
            for offset in (end - entry.length - descriptor for descriptor in DESCRIPTORS)
            if not offset % ALIGNMENT and entry.stop - entry.length <= offset
        }


def _require_apart(
    path: str, entries: Sequence[_Entry], places: list[tuple[int, int]], end: int
) -> None:
    """Raises CorruptCheckpoint if members of a zip overlap, or exceed `end`.

    `places` has the first byte and the end of each member.
    """
    last = max(entries, key=lambda entry: entry.stop, default=None)
    if last and last.stop > end:
        raise _contradiction(path, _text(last.name))
    places.sort(key=itemgetter(0))
    if any(stop > start for (_, stop), (start, _) in pairwise([*places, (end, end)])):
        raise CorruptCheckpoint("file-damaged", f"{path}: members of the zip overlap", file=path)


def _entries(path: str, directory: bytes, count: int) -> list[_Entry]:
    """Parses and checks the `count` entries of a directory."""
    entries: list[_Entry] = []
    names: set[str] = set()
    place = 0
    for _ in range(count):
        if len(directory) < place + 46:
            raise _damaged(path)
        magic, flags, method, crc, packed, length, named, extras, comment, header = (
            _FIELDS.unpack_from(directory, place)
        )
        if magic != b"PK\1\2":
            raise _damaged(path)
        name = directory[place + 46 : place + 46 + named]
        if extras:
            extra = directory[place + 46 + named : place + 46 + named + extras]
            length, packed, header = _zip64(path, extra, length, packed, header)
        if method or packed != length or flags & 1:
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{path}: {_text(name)} is compressed or encrypted",
                file=path,
            )
        text = _text(name)
        if text in names:
            raise _contradiction(path, text)
        names.add(text)
        entries.append(_Entry(name, place, header, length, crc))
        place += 46 + named + extras + comment
    return entries


def _zip64(path: str, extra: bytes, *fields: int) -> list[int]:
    """Replaces each of the `fields` that is 0xFFFFFFFF by its value in the zip64 field `extra`.

    The fields are length, packed length and offset, in this order.
    """
    wide: bytes = b""
    place = 0
    while place + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, place)
        if tag == 1:
            wide = extra[place + 4 : place + 4 + size]
        place += 4 + size
    values = []
    for value in fields:
        if value == WIDE:
            if len(wide) < 8:
                raise _damaged(path)
            value, wide = struct.unpack_from("<Q", wide)[0], wide[8:]
        values.append(value)
    return values


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _damaged(path: str) -> CorruptCheckpoint:
    return CorruptCheckpoint("file-damaged", f"{path}: the zip directory is damaged", file=path)


def _contradiction(path: str, name: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "file-damaged", f"{path}: the zip directory contradicts itself at {name!r}", file=path
    )
