"""Reads the item files of a directory of torch.distributed.checkpoint.

An item is stored as a file of torch.save inside of an item file, or as a tensor of the safetensors
file at the end of it. `.metadata` states where the item begins; this module reads its bytes.

    item of one tensor    [ head: pickle | data | padding, directory: place, length and CRC-32 ]
                                         the data begin at byte 704 of the item in all genuine
                                         files that were examined (torch 2.13, Megatron-Core)

Opening an item costs more than torch's complete reading of its description. Items with similar keys
and equal dtypes are laid out alike. So a few of each kind are opened, and the data offsets of the
others are computed ("planned"). Before the data of a planned item are read, the item is opened
(`Record.crc`), and the computed offset is checked.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from resource import RLIMIT_NOFILE, getrlimit
from threading import Lock
from typing import Any
from weakref import finalize

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.dtypes import SIZES
from ..core.storage import sources
from ..core.storage.byte_sources import Fingerprint
from ..core.storage.checksum import crc32
from ..core.storage.fragments import Extent, Record
from ..core.storage.inventory import missing_file
from ..core.storage.sequences import Joined, Made
from ..errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint, safe
from .dcpfile import ITEMS
from .dcptable import METADATA, ItemBox, ItemLocation, ItemTable, Places
from .safefile import SavedTensor, read_with_metadata
from .torchfile import Parsed, Tensor, TorchFile
from .zipdirectory import read_directory

ALIGNMENT = 64  # bytes; in the files that zckpt writes, items are aligned to it, and are longer
AT_ONCE = 8 << 10  # bytes; an item up to this size is read with one call
SERIALIZATION_ID = "/.data/serialization_id"  # random bytes in each file of torch >= 2.1
UNOPENED, WITHOUT = -1, -2  # stand for the checksum of an item that is not opened, or states none
NUMBER = re.compile(r"\d+")


class ItemFiles:
    """The item files (`.distcp`) of a folder; each is opened when one of its items is needed.

    An item is one stored value. If its data offset is computed from similar items, it is "planned".

    sizes         the size of each file that was needed, in bytes, by path
    records       the byte ranges of the data of items that were read or planned
    keeps_open    True to keep files open, up to a quarter of the process's limit
    plans         True to plan items, and to open them only when their CRC-32 is needed
    is_laid       True if zckpt has just written the files: planned items are never opened
    """

    def __init__(self, keeps_open: bool = True, plans: bool = False, is_laid: bool = False) -> None:
        self.sizes: dict[str, int] = {}
        self.records = Joined[Record]()
        self.plans, self.is_laid = plans, is_laid
        self.forms = _Forms()
        self.outlines: dict[tuple[str, tuple[int, ...], int], _Outline] = {}
        self.lock = Lock()  # for threads that open planned items, or read them, while others copy
        self._parsed = Parsed()
        self._tensors: dict[tuple[str, int], dict[str, SavedTensor]] = {}
        self._open: dict[str, tuple[int, Fingerprint]] = {}
        # opening takes a millisecond on some network filesystems; a file has thousands of items
        self._most_open = getrlimit(RLIMIT_NOFILE)[0] // 4 if keeps_open else 0
        finalize(self, _close, self._open)

    def missing(
        self, location: ItemLocation, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> SavedTensor | None:
        """Describes a tensor of a lost file as if the file were there; None for any other file.

        At its path is a copy of another rank's file (`sources.standing_in`), which is not opened.
        """
        if not sources.is_stand_in(location.file):
            return None
        self.sizes.setdefault(location.file, 0)
        extent = Extent(location.file, location.offset, prod(sizes) * SIZES[dtype])
        return SavedTensor(key, dtype, sizes, extent)

    def stored(self, location: ItemLocation, key: str) -> SavedTensor | None:
        """The tensor `key` of the safetensors file at a location; None for an item of torch.save.

        Raises IncompleteCheckpoint if the safetensors file lacks the tensor.
        """
        begin = location.file, location.offset
        if begin not in self._tensors:
            self._require(location.file, location.offset, 1)
            with self._opened(location.file) as file:
                is_torch = sources.pread(file, 2, location.offset) == b"PK"
            if is_torch:
                return None
            tensors, _ = read_with_metadata(location.file, location.offset)
            self._tensors[begin] = {stored.name: stored for stored in tensors}
        if key not in self._tensors[begin]:
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{location.file} lacks {key}, which should be there according to {METADATA}",
                file=location.file,
            )
        return self._tensors[begin][key]

    def torch_file(self, location: ItemLocation) -> TorchFile:
        """Opens the item at a location as a complete file of torch.save."""
        if location.shared:
            raise InconsistentCheckpoint(
                "elements-overlap",
                f"{METADATA} says that two items begin at byte {location.offset} of "
                f"{location.file}",
                file=location.file,
            )
        self._require(location.file, location.offset, location.length)
        item = self.open(location)
        self.records += item.records.values()
        return item

    def open(self, location: ItemLocation) -> TorchFile:
        """Reads the item at a location as a file of torch.save, without checking the location."""
        with self._opened(location.file) as file:
            return TorchFile(location.file, self._parsed, location.extent, file)

    def planned(
        self, location: ItemLocation, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> Record | None:
        """The byte range and CRC-32 of the data of a tensor or chunk, without opening its item.

        None if the item must be opened, such as the first one of a file or of a kind (`_Forms`).
        """
        if not self.plans or location.shared or location.file not in self.sizes:
            return None
        length = prod(sizes) * SIZES[dtype]
        if (place := self.forms.place(key, dtype, length, location.length)) is None:
            return None
        self._require(location.file, location.offset, location.length)
        extent = Extent(location.file, location.offset + place, length)
        planned = None if self.is_laid else _Planned(self, location, key, dtype, sizes, extent)
        self.records.append(record := Record(extent, planned))
        return record

    def planned_boxes(self, table: ItemTable, key: str, dtype: str) -> PlannedBoxes | None:
        """The boxes (chunks) of a tensor that are not empty, with computed data ranges.

        None if all are empty, or one cannot be computed. Raises IncompleteCheckpoint (short file).
        """
        places = table.locations
        if (item := table.items[key]) is None or not self.plans:
            return None
        size, kind = SIZES[dtype], self.forms.kind(key, dtype)
        numbers, rows, begins = array("i"), array("i"), array("i")
        for number, box in enumerate(item.boxes if kind else ()):
            if box.is_empty:
                continue
            if (row := places.row(key, box.offsets)) is None or places.shared[row]:
                return None
            path, length = places.paths[places.files[row]], prod(box.sizes) * size
            begin = self.forms.begin(length, places.lengths[row])
            if begin is None or path not in self.sizes or sources.is_stand_in(path):
                return None
            self._require(path, places.offsets[row], places.lengths[row])
            numbers.append(number)
            rows.append(row)
            begins.append(begin)
        if not rows:
            return None
        planned = PlannedBoxes(self, places, key, dtype, item.boxes, numbers, rows, begins)
        self.records.join(planned.records)
        return planned

    def tensor_file(
        self, location: ItemLocation, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> TorchFile:
        """Opens the item of a tensor or chunk, and notes where in the item its data begin.

        From this offset, `planned` computes the data ranges of similar items. The caller must check
        that the item holds the expected tensor. Raises as `torch_file`.
        """
        file = self.torch_file(location)
        if self.forms.note(file, key, dtype, sizes, location):
            self._note_outline(file, location)
        return file

    def _note_outline(self, file: TorchFile, location: ItemLocation) -> None:
        (record,), extent = file.records.values(), location.extent
        shape = file.value.dtype, file.value.shape, location.length
        if record.crc is not None and shape not in self.outlines:
            with self._opened(location.file) as number:
                self.outlines[shape] = _Outline.of(number, extent, record.extent)

    def reopened(
        self, location: ItemLocation, dtype: str, sizes: tuple[int, ...], data: Extent
    ) -> TorchFile | int:
        """Opens an item whose data range, `data`, was computed without opening it (`planned`).

        If the item is laid out exactly like an item that was opened earlier, `data` is right, and
        the result is the CRC-32 that the item states for its data. Otherwise it is the parsed item,
        and the caller must check `data`.
        """
        # an item that differs from an earlier one only in data, checksums and ids is not parsed
        outline = self.outlines.get((dtype, sizes, location.length))
        if outline is not None and outline.data == data.offset - location.offset:
            with self._opened(location.file) as number:
                crc = outline.crc(number, location)
            if crc is not None:
                return crc
        return self.open(location)

    def boxes(
        self, table: ItemTable, key: str, dtype: str | None = None
    ) -> Iterator[tuple[ItemBox, TorchFile]]:
        """Yields the boxes (chunks) of a tensor that are not empty, each with its item.

        `dtype` is the expected type; None means the type that the metadata states. Raises
        InconsistentCheckpoint if an item holds another type or shape.
        """
        item = table.items[key]
        if item is None:
            return
        planned = self.planned_boxes(table, key, dtype or item.dtype)
        if planned is not None:
            for box, data in planned:
                yield box, TorchFile.of(data, planned.dtype, box.sizes, self.pread)
            return
        for box in item.boxes:
            if box.is_empty:
                continue
            location, described_as = table.location(key, box), (dtype or item.dtype, box.sizes)
            if (lost := self.missing(location, key, *described_as)) is not None:
                yield box, TorchFile.of(Record(lost.extent, None), *described_as)
                continue
            record = self.planned(location, key, *described_as)
            if record is not None:
                yield box, TorchFile.of(record, *described_as, self.pread)
                continue
            file = self.tensor_file(location, key, *described_as)
            require_same(location, key, described(file), described_as)
            yield box, file

    def unused(self, table: ItemTable) -> list[Extent]:
        """The byte ranges of item files that belong to no item: lost items, or remains of a save.

        zckpt aligns items, so a gap before an aligned item is not reported if no item fits into it.
        """
        locations = dict(table.by_file())
        with os.scandir(table.folder) as entries:
            files = {entry.path for entry in entries if entry.name.endswith(ITEMS)}
        unused = []
        for file in sorted(files | locations.keys()):
            if sources.is_stand_in(file):
                continue
            of_file = locations.get(file, [])
            for offset, _ in of_file:
                self._require(file, offset, 0)  # also if nothing of the file was read
            size, reached = sources.size(file), 0
            for start, length in of_file:
                if start > reached and (start - reached >= ALIGNMENT or start % ALIGNMENT):
                    unused.append(Extent(file, reached, start - reached))
                reached = max(reached, start + length)
                # a safetensors file extends to the end; its empty tensors were not read
                if (file, start) in self._tensors or not length:
                    reached = size
            if size > reached:
                unused.append(Extent(file, reached, size - reached))
        return unused

    def pread(self, path: str, length: int, offset: int) -> bytes:
        """Reads bytes of the item file at `path`; raises as `sources.open_file`."""
        with self.lock, self._opened(path) as file:
            return sources.pread(file, length, offset)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Yields the descriptor of the file at `path`; raises as `sources.open_file`."""
        with sources.naming(path):
            is_same = self.is_laid and path in self._open  # no other program writes there
            now = self._open[path][1] if is_same else Fingerprint.of(os.stat(path))
            if path in self._open and self._open[path][1] != now:
                sources.close(self._open.pop(path)[0])
            if path not in self._open and len(self._open) < self._most_open:
                self._open[path] = sources.open_file(path), now
            if path in self._open:
                yield self._open[path][0]
                return
        with sources.opened(path) as opened:
            yield opened.fileno()

    def _require(self, path: str, offset: int, length: int) -> None:
        """Raises IncompleteCheckpoint if the file is missing, or is too short for these bytes."""
        stop = offset + length
        if path not in self.sizes:
            if not sources.is_file(path):
                hint = "copy the whole directory: every rank writes separate files"
                raise missing_file(path, METADATA, hint)
            self.sizes[path] = sources.size(path)
        if min(offset, length) < 0 or stop > self.sizes[path]:
            raise IncompleteCheckpoint(
                "file-cut-short",
                f"{path} has {self.sizes[path]} bytes, but {METADATA} needs at least {stop}",
                hint="it was cut short: copy it again",
                file=path,
            )


@lru_cache(64)
def kind_of(key: str) -> str:
    """The key with `#` in place of its numbers, so that keys of all layers become equal."""
    return NUMBER.sub("#", key)


class _Forms:
    """Computes at which offset in an item the data begin, from similar items that were opened.

    Items are similar (of one kind) if they have the same dtype and keys that differ only in
    numbers. A kind is left out once an item of it is not a plain tensor (see `note`).
    """

    def __init__(self) -> None:
        # by kind and dtype: whether these items are planned
        self._kinds: dict[tuple[str, str], bool] = {}
        # by the bytes beside the data, and the alignment of their end: where the data begin. Only
        # the pickle before the data varies in length (torch and zckpt align data to 64 bytes)
        self._places: dict[tuple[int, int], int | None] = {}

    def place(self, key: str, dtype: str, length: int, item_length: int) -> int | None:
        """The offset in an item of its `length` bytes of data; None if it cannot be computed."""
        return self.begin(length, item_length) if length and self.kind(key, dtype) else None

    def kind(self, key: str, dtype: str) -> bool:
        """Whether the data offsets of items with this dtype and similar keys can be computed."""
        return self._kinds.get((kind_of(key), dtype), False)

    def begin(self, length: int, item_length: int) -> int | None:
        """As `place`, for a caller that has checked `kind`, and that the data are not empty."""
        return self._places.get((item_length - length, length % ALIGNMENT))

    def note(
        self, file: TorchFile, key: str, dtype: str, sizes: tuple[int, ...], location: ItemLocation
    ) -> bool:
        """Learns from an item that was opened; returns whether it is a plain tensor.

        A plain tensor has the stated type and shape, is row-major, and fills its only storage.
        """
        tensor, records = file.value, [*file.records.values()]
        kind, length = (kind_of(key), dtype), prod(sizes) * SIZES[dtype]
        is_plain = (
            described(file) == (dtype, sizes)
            and len(records) == 1
            and records[0].extent.length == length
            and not (tensor.offset or tensor.storage.start)
            and tensor.contiguous
        )
        self._kinds[kind] = is_plain and self._kinds.get(kind, True)
        if is_plain:
            place = records[0].extent.offset - location.offset
            beside = location.length - length, length % ALIGNMENT
            self._places[beside] = place if self._places.get(beside, place) == place else None
        return is_plain


class _Outline(Struct, frozen=True):
    """An item's bytes without its data, its random id, and the CRC-32s of both.

    Items with equal outlines have their data at the same place. Numbers are offsets in the item.

    data, behind  begin and end of the data
    head, tail    the bytes before and after the data, with zeros in the `gaps`
    crc_at        place of the data's CRC-32
    identity      begin and end of the id, and place of its CRC-32; None in files of zckpt
    """

    data: int
    behind: int
    head: bytes
    tail: bytes
    gaps: tuple[tuple[int, int], ...]
    crc_at: int
    identity: tuple[int, int, int] | None

    @classmethod
    def of(cls, file: int, item: Extent, data: Extent) -> _Outline:
        """Reads the outline of an item; `item` and `data` are byte ranges in the open `file`."""
        start, gaps, crc_at, identity = item.offset, list[tuple[int, int]](), 0, None
        for name, member in read_directory(file, item).items():
            stop = member.offset + member.length
            is_data = member.offset == data.offset
            if not is_data and not name.endswith(SERIALIZATION_ID):
                continue
            # in the local header, in the directory, and in a descriptor after the data
            places = [member.header + 14, member.entry + 16]
            if sources.pread(file, 4, stop) == b"PK\7\10":
                places.append(stop + 4)
            gaps += [(place - start, place - start + 4) for place in places]
            if is_data:
                crc_at = member.entry + 16 - start
            else:
                gaps.append((member.offset - start, stop - start))
                identity = (*gaps[-1], member.entry + 16 - start)
        begin, behind = data.offset - start, data.offset + data.length - start
        outline = cls(begin, behind, b"", b"", tuple(gaps), crc_at, identity)
        head, tail = outline.bytes_of(file, item.offset, item.length)
        return replace(outline, head=outline.blank(head, 0), tail=outline.blank(tail, behind))

    def bytes_of(self, file: int, offset: int, length: int) -> tuple[bytes, bytes]:
        """Reads an item's bytes before its data, and those after its data."""
        if length <= AT_ONCE:
            data = sources.pread(file, length, offset)
            return data[: self.data], data[self.behind :]
        tail = sources.pread(file, length - self.behind, offset + self.behind)
        return sources.pread(file, self.data, offset), tail

    def blank(self, data: bytes, start: int) -> bytes:
        """Returns `data`, the item's bytes from offset `start` on, with zeros in the `gaps`."""
        blank = bytearray(data)
        for begin, stop in self.gaps:
            if start <= begin and stop <= start + len(data):
                blank[begin - start : stop - start] = bytes(stop - begin)
        return bytes(blank)

    def crc(self, file: int, location: ItemLocation) -> int | None:
        """The CRC-32 that an item states for its data; None unless the item fits the outline."""
        head, tail = self.bytes_of(file, location.offset, location.length)
        if self.blank(head, 0) != self.head or self.blank(tail, self.behind) != self.tail:
            return None
        if self.identity is not None:
            begin, stop, stated = (place - self.behind for place in self.identity)
            if crc32(tail[begin:stop]) != _number(tail, stated):
                return None
        return _number(tail, self.crc_at - self.behind)


def _number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "little")


class _Planned(Struct, eq=False):
    """A function that returns the stated CRC-32 of a planned item's data (see ItemFiles)."""

    files: ItemFiles
    location: ItemLocation
    key: str
    dtype: str
    sizes: tuple[int, ...]
    extent: Extent
    is_open: bool = False
    crc: int | None = None

    def __call__(self) -> int | None:
        """Opens the item once; raises as `torch_file`, or UnsupportedCheckpoint (see `opened`)."""
        if not self.is_open:
            with self.files.lock:
                self.crc = self.opened()
            self.is_open = True
        return self.crc

    def opened(self) -> int | None:
        """Opens the item, checks that its data lie as computed, and returns the stated CRC-32."""
        file = self.files.reopened(self.location, self.dtype, self.sizes, self.extent)
        if isinstance(file, int):
            return file
        require_same(self.location, self.key, described(file), (self.dtype, self.sizes))
        whole = file.whole(file.value)
        if whole != self.extent or file.value.offset or not file.value.contiguous:
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{self.location.file}: item {safe(self.key)} at byte {self.location.offset} is "
                "not stored like the similar items that zckpt opened: its elements are in another "
                "order, or begin at another byte",
                hint="in Python, read it with zckpt.read(PATH, opens_items=True)",
                file=self.location.file,
            )
        return file.crc(file.value)[1]


class PlannedBoxes(Sequence[tuple[ItemBox, Record]]):
    """The boxes (chunks) of a tensor, each with the byte range of its data.

    The ranges were computed without opening the items. Boxes and ranges are made when read.
    """

    def __init__(
        self,
        files: ItemFiles,
        places: Places,
        key: str,
        dtype: str,
        boxes: Sequence[ItemBox],
        numbers: array[int],
        rows: array[int],
        begins: array[int],
    ) -> None:
        self.files, self.places = files, places
        self.key, self.dtype, self._boxes = key, dtype, boxes
        # of each box: its index in `boxes`, its row in `places`, the item's first byte of data
        self._numbers, self._rows, self._begins = numbers, rows, begins
        self._crcs = array("q")  # CRC-32s of items that were opened; empty until the first one is

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [*map(self.__getitem__, range(*place.indices(len(self))))]
        place = range(len(self))[place]
        return self._box(place), self._record(place)

    @property
    def boxes(self) -> Sequence[ItemBox]:
        return Made(self._box, range(len(self)))

    @property
    def records(self) -> Sequence[Record]:
        return Made(self._record, range(len(self)))

    @property
    def extents(self) -> Sequence[Extent]:
        """The byte ranges of the data of all boxes (chunks), in their order."""
        return Made(self._extent, range(len(self)))

    def is_open(self, place: int) -> bool:
        return bool(self._crcs) and self._crcs[place] != UNOPENED

    def crc(self, place: int) -> int | None:
        """The CRC-32 that the item of box `place` states, or None; raises as `_Planned`."""
        if not self.is_open(place):
            location, sizes = self.places.at(self._rows[place]), self._box(place).sizes
            item = self.key, self.dtype, sizes, self._extent(place)
            with self.files.lock:
                crc = _Planned(self.files, location, *item).opened()
                if not self._crcs:
                    self._crcs = array("q", [UNOPENED]) * len(self)
                self._crcs[place] = WITHOUT if crc is None else crc
        return None if self._crcs[place] == WITHOUT else self._crcs[place]

    def _box(self, place: int) -> ItemBox:
        box: ItemBox = self._boxes[self._numbers[place]]
        return box

    def _extent(self, place: int) -> Extent:
        row, places = self._rows[place], self.places
        begin = places.offsets[row] + self._begins[place]
        length = prod(self._box(place).sizes) * SIZES[self.dtype]
        return Extent(places.paths[places.files[row]], begin, length)

    def _record(self, place: int) -> Record:
        return Record(self._extent(place), None if self.files.is_laid else _OfBox(self, place))


class _OfBox(Struct, frozen=True):
    """A function like `_Planned`, for the item of the box with the number `place` in `planned`."""

    planned: PlannedBoxes
    place: int

    @property
    def is_open(self) -> bool:
        return self.planned.is_open(self.place)

    def __call__(self) -> int | None:
        return self.planned.crc(self.place)


def described(file: TorchFile) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and the shape of a file's tensor; None if it holds another value."""
    tensor = file.value
    return (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None


def _close(files: dict[str, tuple[int, Fingerprint]]) -> None:
    while files:
        sources.close(files.popitem()[1][0])


def require_same(
    location: ItemLocation,
    key: str,
    stored: tuple[str, tuple[int, ...]] | None,
    stated: tuple[str, tuple[int, ...]],
) -> None:
    """Raises InconsistentCheckpoint unless an item has the dtype and shape stated for it.

    `stored` is what the item has (None if it is not a tensor), `stated` what the metadata says.
    """
    if stored != stated:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{location.file} should have {stated[0]} {list(stated[1])} of {key} at byte "
            f"{location.offset} according to {METADATA}, but something else is there",
            file=location.file,
        )
