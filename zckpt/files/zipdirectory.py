"""Where do the members of a zip lie, according to its directory?

Members must be STORED and lie inside the zip. The ranks of one run write directories that differ in
offsets, lengths and CRC-32s, and in the name of the folder: torch calls it after the file. The
first directory is parsed entry by entry and gives the form of the others: a directory has this form
only if all its other bytes are the same. The fields that differ are checked for every file.
"""

from __future__ import annotations

import struct
from _thread import allocate_lock  # of `threading`, which takes longer to import
from collections.abc import Sequence
from itertools import groupby, pairwise, repeat
from operator import add, gt

from msgspec import Struct
from msgspec.structs import replace

from ..core import sources
from ..core.fragments import Extent
from ..errors import CorruptCheckpoint, UnsupportedCheckpoint

# Bytes of a zip's directory: a storage takes 100 to 150, and a rank of stage 3 has one for each of
# a model's parameters. There are 50,000 in the largest models; a million fit in.
MAX_DIRECTORY = 1 << 28
LOCATOR = 20  # bytes in front of END: where the record of zip64 is
# Bytes at the end of a zip that are read at once: LOCATOR, the record of END, the longest comment.
# Less is read at first of a zip inside of a larger file, which may have thousands of them.
TAIL, SHORT_TAIL = LOCATOR + 22 + 65535, 4096
WIDE = 0xFFFFFFFF  # a field whose value is in the zip64 field
BYTES_PER_COLUMN = 32  # of a directory: to change more columns takes longer than to parse it
END = b"PK\5\6"  # begins the record at the end of a zip
_ENTRY = struct.Struct("<4s4xHH4xIIIHHH8xI")
_CRC = struct.Struct("<I")


class ZipMember(Struct, frozen=True):
    """One member of a zip, as its directory states it.

    `header`, `entry` and `offset` are the offsets of its local header, of its entry in the
    directory, and of its data.
    """

    name: str
    header: int
    entry: int
    offset: int
    length: int
    crc: int | None


class _Listing(Struct, frozen=True, eq=False):
    """What a directory lists, one item for each entry; offsets count from the zip's beginning.

    `entries` are the entries' places in the directory, `named` the lengths of their names. `spans`
    are the bytes that a member takes at least, with its header. `filled` are the numbers of the
    members that have bytes.
    """

    directory: bytes
    entries: Sequence[int]
    named: Sequence[int]
    lengths: Sequence[int]
    spans: Sequence[int]
    filled: Sequence[int]
    headers: Sequence[int]
    crcs: Sequence[int]

    def name(self, number: int) -> bytes:
        start = self.entries[number] + 46
        return self.directory[start : start + self.named[number]]


class _Form:
    """The bytes of a directory without what those of other ranks may differ in."""

    def __init__(self, directory: bytes, listing: _Listing) -> None:
        ends = [entry + 16 for entry in listing.entries[1:]] + [len(directory)]
        sizes = [end - entry - 46 for entry, end in zip(listing.entries, ends, strict=True)]
        self._fields = struct.Struct("<16s" + "".join([f"III14sI{size}s" for size in sizes]))
        self._listing = listing
        self._folder = _folder(listing)
        self._rows = _rows(listing.entries) if self._folder else []
        self._plain = self._without_crcs(directory)
        self._fixed = _fixed(self._fields.unpack(directory))

    def listing(self, directory: bytes) -> _Listing | None:
        """What a directory of the same length lists; None if it has another form."""
        if directory == self._listing.directory:
            return self._listing
        plain = self._renamed(directory)
        if plain is None:
            return None
        if self._without_crcs(plain) == self._plain:
            return self._with_crcs(directory)
        return self._with_numbers(directory, plain)

    def _with_crcs(self, directory: bytes) -> _Listing:
        """The listing of a directory that differs in CRC-32s alone, as those of most ranks do."""
        listing = self._listing
        crcs = list(listing.crcs)
        for number in listing.filled:
            (crcs[number],) = _CRC.unpack_from(directory, listing.entries[number] + 16)
        self._listing = replace(listing, directory=directory, crcs=crcs)
        return self._listing

    def _with_numbers(self, directory: bytes, plain: bytearray) -> _Listing | None:
        """The listing of a directory that differs in offsets and lengths too."""
        values, listing = self._fields.unpack(directory), self._listing
        crcs, packed, lengths, headers = (values[field::6] for field in (1, 2, 3, 5))
        is_wide = max(max(headers), max(lengths)) == WIDE
        if _fixed(self._fields.unpack(plain)) != self._fixed or packed != lengths or is_wide:
            return None
        if lengths != listing.lengths:
            listing = _with_lengths(listing, lengths)
        self._listing = replace(listing, directory=directory, headers=headers, crcs=crcs)
        self._plain = self._without_crcs(plain)
        return self._listing

    def _without_crcs(self, plain: bytes | bytearray) -> bytearray:
        """A directory without the CRC-32s of its filled members."""
        rest = bytearray(plain)
        for number in self._listing.filled:
            place = self._listing.entries[number] + 16
            rest[place : place + 4] = bytes(4)
        return rest

    def _renamed(self, directory: bytes) -> bytearray | None:
        """A directory with the first one's folder instead of its own, in the name of each entry.

        None if its names do not all begin with one folder, or if parsing it takes less time.
        """
        plain, own = bytearray(directory), directory[46 : 46 + len(self._folder)]
        bytes_of_both = enumerate(zip(own, self._folder, strict=True), 46)
        changes = [(place, *both) for place, both in bytes_of_both if both[0] != both[1]]
        if len(changes) * len(self._rows) > len(directory) // BYTES_PER_COLUMN:
            return None
        if own[-1:] != self._folder[-1:]:  # which is a slash
            return None
        for place, byte, first in changes:
            for row in self._rows:
                column = slice(row.start + place, row.stop + place, row.step)
                if plain[column] != bytes((byte,)) * len(row):
                    return None
                plain[column] = bytes((first,)) * len(row)
        return plain


def _folder(listing: _Listing) -> bytes:
    """The folder with all members, and its slash; empty if there is none."""
    names = [listing.name(number) for number in range(len(listing.entries))]
    folder = names[0][: names[0].find(b"/") + 1]
    return folder if all(map(bytes.startswith, names, repeat(folder))) else b""


def _rows(entries: Sequence[int]) -> list[range]:
    """The places of entries, in rows in which each is as long as the others."""
    steps = [stop - start for start, stop in pairwise((*entries, entries[-1] + 1))]
    rows, start = [], entries[0]
    for step, group in groupby(steps):
        stop = start + step * len([*group])
        rows.append(range(start, stop, step))
        start = stop
    return rows


def _fixed(values: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return values[::6], values[4::6]


class Directories:
    """The directories of many zips: those of one form are parsed once."""

    def __init__(self) -> None:
        # by the length of the directory, and its count of entries
        self._forms: dict[tuple[int, int], _Form] = {}
        # the headers and spans that were checked last; the directory's offset, and where filled
        # members end
        self._checked: tuple[Sequence[int], Sequence[int], int, Sequence[int]] = (), (), 0, ()
        self._lock = allocate_lock()  # what one thread parses, the others wait for

    def members(self, file: int, within: Extent) -> dict[str, ZipMember]:
        """The members of a zip that have bytes, by name; the zip is found from its end.

        Raises CorruptCheckpoint, and UnsupportedCheckpoint for members that are not STORED.
        """
        zip_ = _Zip(file, within)
        with self._lock:
            listing = self._listing(within.file, zip_.directory, zip_.count)
        members = zip_.members(listing)
        stops = [member.offset + member.length - within.offset for member in members.values()]
        # ranks of stage 3 often have files of equal sizes: one check is enough
        headers, spans, *places = self._checked
        is_known = listing.headers is headers and listing.spans is spans
        if not is_known or places != [zip_.start, stops]:
            _check_places(within.file, listing, stops, zip_.start)
            self._checked = listing.headers, listing.spans, zip_.start, stops
        return members

    def _listing(self, path: str, directory: bytes, count: int) -> _Listing:
        form = self._forms.get((len(directory), count))
        listing = form.listing(directory) if form else None
        if listing is None:
            listing = _listing(path, directory, count)
            # what is in a zip64 field is not where the form expects it
            if count and max(max(listing.headers), max(listing.lengths)) < WIDE:
                self._forms[len(directory), count] = _Form(directory, listing)
        return listing


class _Zip:
    """A zip inside a file: its directory, and where its members lie."""

    def __init__(self, file: int, within: Extent) -> None:
        self.file = file
        self.within = within
        self._read_tail(SHORT_TAIL if within.offset else TAIL)
        if self.behind and self.tail.rfind(END) < LOCATOR:
            self._read_tail(TAIL)
        self.start, length, self.count = self._find()
        self.directory = self.read(self.start, length)

    def _read_tail(self, most: int) -> None:
        self.behind = max(0, self.within.length - most)
        length = self.within.length - self.behind
        self.tail = sources.pread(self.file, length, self.within.offset + self.behind)

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the zip; none if they reach past its end."""
        if start >= self.behind:
            return self.tail[start - self.behind :][:length]
        if start + length > self.within.length:
            return b""
        return sources.pread(self.file, length, self.within.offset + start)

    def _find(self) -> tuple[int, int, int]:
        """Where the directory begins, its length, and its count of entries."""
        path, end = self.within.file, self.tail.rfind(END)
        if end < 0 or len(self.tail) < end + 22:
            raise CorruptCheckpoint(
                f"{path} ends early: its zip directory is missing",
                hint="use another copy, or an earlier checkpoint: the file was cut short, or the "
                "save did not finish",
            )
        count, length, start = struct.unpack_from("<HII", self.tail, end + 10)
        locator = max(0, end - LOCATOR)
        if self.tail[locator : locator + 4] == b"PK\6\7":  # zip64: torch always has it
            (place,) = struct.unpack_from("<Q", self.tail, locator + 8)
            record = self.read(place, 56)
            if len(record) != 56 or record[:4] != b"PK\6\6":
                raise _damaged(path)
            count, length, start = struct.unpack_from("<QQQ", record, 32)
        if start + length > self.within.length or 46 * count > length:
            raise _damaged(path)
        if length > MAX_DIRECTORY:
            raise UnsupportedCheckpoint(
                f"{path} has a zip directory of {length} bytes; zckpt reads up to {MAX_DIRECTORY}",
                hint="save the checkpoint in several files, or by its ranks",
            )
        return start, length, count

    def members(self, listing: _Listing) -> dict[str, ZipMember]:
        """The members that have bytes; raises if they are not where they should be."""
        base = self.within.offset
        # torch.serialization.set_crc32_options(False) leaves zeros everywhere (torch >= 2.6)
        has_crcs = any(listing.crcs[number] for number in listing.filled)
        members: dict[str, ZipMember] = {}
        # ZeRO-3 leaves an empty storage per parameter on every rank: they are not worth a read
        for number in listing.filled:
            inside, header = listing.name(number), listing.headers[number]
            name, offset = _text(inside), self._data_offset(header, inside)
            entry = base + self.start + listing.entries[number]
            crc = listing.crcs[number] if has_crcs else None
            members[name] = ZipMember(
                name, base + header, entry, base + offset, listing.lengths[number], crc
            )
        return members

    def _data_offset(self, header: int, name: bytes) -> int:
        """The offset of a member's data, which only its local header determines."""
        head = self.read(header, 30 + len(name))
        if head[:4] != b"PK\3\4" or head[30:] != name:
            raise CorruptCheckpoint(
                f"{self.within.file}: the zip directory points to a place without a member"
            )
        length, extra = struct.unpack_from("<HH", head, 26)
        return int(header + 30 + length + extra)


def _check_places(path: str, listing: _Listing, stops: Sequence[int], end: int) -> None:
    """Raises if members overlap or reach past `end`; filled members end at `stops`."""
    ends = list(map(add, listing.headers, listing.spans))
    if ends and max(ends) > end:
        name = listing.name(ends.index(max(ends)))
        raise _contradiction(path, _text(name))
    for number, stop in zip(listing.filled, stops, strict=True):
        ends[number] = stop
    if not _overlap(listing.headers, ends, end):
        return
    order = sorted(range(len(ends)), key=listing.headers.__getitem__)  # perhaps in another order
    headers = [listing.headers[number] for number in order]
    if _overlap(headers, [ends[number] for number in order], end):
        raise CorruptCheckpoint(f"{path}: members of the zip overlap")


def _overlap(headers: Sequence[int], ends: Sequence[int], end: int) -> bool:
    """Whether a member reaches into the next one, or the last one past `end`."""
    return any(map(gt, ends, (*headers[1:], end)))


def _listing(path: str, directory: bytes, count: int) -> _Listing:
    """What the `count` entries of a directory say, each of them checked."""
    names, entries, lengths, headers, crcs = [], [], [], [], []
    place = 0
    for _ in range(count):
        if len(directory) < place + 46:
            raise _damaged(path)
        magic, flags, method, crc, packed, length, named, extras, comment, header = (
            _ENTRY.unpack_from(directory, place)
        )
        if magic != b"PK\1\2":
            raise _damaged(path)
        name = directory[place + 46 : place + 46 + named]
        if extras:
            extra = directory[place + 46 + named : place + 46 + named + extras]
            length, packed, header = _zip64(path, extra, length, packed, header)
        if method or packed != length or flags & 1:
            raise UnsupportedCheckpoint(f"{path}: {_text(name)} is compressed or encrypted")
        names.append(name)
        entries.append(place)
        lengths.append(length)
        headers.append(header)
        crcs.append(crc)
        place += 46 + named + extras + comment
    _refuse_repeated(path, [*map(_text, names)])
    named = [*map(len, names)]
    listing = _Listing(directory, entries, named, (), (), (), headers, crcs)
    return _with_lengths(listing, tuple(lengths))


def _with_lengths(listing: _Listing, lengths: Sequence[int]) -> _Listing:
    spans = [30 + named + length for named, length in zip(listing.named, lengths, strict=True)]
    filled = [number for number, length in enumerate(lengths) if length]
    return replace(listing, lengths=lengths, spans=spans, filled=filled)


def _refuse_repeated(path: str, names: Sequence[str]) -> None:
    """Raises if two members have one name."""
    if len({*names}) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _contradiction(path, name)
        seen.add(name)


def _zip64(path: str, extra: bytes, *fields: int) -> list[int]:
    """Length, packed length and offset: a field of 0xFFFFFFFF comes from the zip64 field."""
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
    return CorruptCheckpoint(f"{path}: the zip directory is damaged")


def _contradiction(path: str, name: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path}: the zip directory contradicts itself at {name!r}")


def read_directory(file: int, within: Extent) -> dict[str, ZipMember]:
    """The members of one zip that have bytes; raises as `Directories.members`."""
    return Directories().members(file, within)
