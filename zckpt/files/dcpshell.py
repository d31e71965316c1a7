"""Writes a directory of torch.distributed.checkpoint: `.distcp` files and `.metadata`.

An item file is a sequence of aligned items. `.metadata` is a pickle of the object that torch would
write. The data of tensors are filled in later.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from msgspec import Struct

from ..core.checkpoint.inert import Foreign, Global, Scalar, Size
from ..core.grouping import portions
from ..core.passes.layout import Shell
from ..core.passes.streaming import carry_out_all
from ..core.storage.fileio import align, write_all
from ..core.storage.folder import Folder
from ..core.storage.fragments import Extent
from ..core.storage.sources import pread
from .dcpfile import VERSION
from .dcptable import ItemBox, ItemKey, ItemLocation, Items, ItemTable, TensorItem
from .pickling import Record, Repeated
from .torchshell import ALIGNMENT, Storages, checksums_of, shell
from .zipdirectory import read_directory

BATCH = 128  # checksums in one task of a thread
FEW_BOXES = 16  # of a tensor, whose description is kept for tensors like it
NEAR = 4 << 10  # bytes; checksums nearer to each other are written together


class ItemShell(Struct, frozen=True):
    """An item of an item file, without the data of its tensor.

    `box` is the part of a tensor (chunk) that the item holds; None if it holds any other value.
    """

    key: str
    box: ItemBox | None
    shell: Shell


class SavedItem(Struct, frozen=True):
    """An item and its location, whose file is relative to the folder of `.metadata`."""

    item: ItemShell
    location: ItemLocation

    @property
    def key(self) -> ItemKey:
        """The item's key in `.metadata`."""
        box = self.item.box
        return self.item.key, None if box is None else box.offsets


@lru_cache(1 << 12)
def tensor_shell(dtype: str, sizes: tuple[int, ...]) -> Shell:
    """The file of one tensor, without its data; cached for tensors of equal dtype and sizes."""
    storages = Storages()
    return shell("archive", storages.tensor(dtype, sizes), storages)


@lru_cache(1 << 12)
def scalar_shell(value: Scalar, _text: str) -> Shell:
    """The file of one number, cached for equal numbers; `_text` keeps 0.0 and -0.0 apart."""
    storages = Storages()
    return shell("archive", storages.scalar(value), storages)


def in_files(items: Iterable[ItemShell], limit: int) -> Iterator[list[ItemShell]]:
    """Distributes items over files of at most `limit` bytes; a larger item gets a separate file."""
    return portions(items, lambda item: align(item.shell.size, ALIGNMENT), limit)


def item_file(name: str, items: Sequence[ItemShell]) -> tuple[Shell, list[SavedItem]]:
    """Makes the file `name` from these items, without tensor data; also returns their locations."""
    size, parts, saved = 0, [], []
    for item in items:
        start = align(size, ALIGNMENT)
        parts += [(start + offset, data) for offset, data in item.shell.parts]
        size = start + item.shell.size
        saved.append(SavedItem(item, ItemLocation(name, start, item.shell.size)))
    return Shell(name, size, tuple(parts)), saved


def seal_items(root: Folder, table: ItemTable, crcs: Mapping[str, Mapping[int, int]]) -> None:
    """Writes the CRC-32 of every record (zip member) into its item, which is a small zip.

    `root` contains the folder of `table`. `crcs` maps the path of a file, and then the offset of a
    record's data, to the CRC-32. zckpt must have laid out all items.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for path, items in table.by_file():
        crc_of = crcs.get(path, {})
        starts = sorted(crc_of)
        patches: list[tuple[int, int]] = []
        with root.opened(path, os.O_RDWR) as file:
            for offset, length in items:
                first = bisect_left(starts, offset)
                data = starts[first : bisect_left(starts, offset + length, first)]
                form = length, *(start - offset for start in data)
                if form not in places:  # items of one form have these fields at equal offsets
                    extent = Extent(path, offset, length)
                    places[form] = [place - offset for place in _places(file, extent, data)]
                twice = [crc_of[start] for start in data for _ in range(2)]
                at = (offset + place for place in places[form])
                patches += zip(at, twice, strict=True)
            # bytes that were written past the page cache are read from the disk
            carry_out_all([*portions(sorted(patches), lambda _: 1, BATCH)], partial(_write, file))


def _places(file: int, item: Extent, data: Collection[int]) -> list[int]:
    """The offsets of the CRC-32 fields in an item: two for each record (zip member).

    `data` are the offsets at which the data of these records begin.
    """
    members = {member.offset: member for member in read_directory(file, item).values()}
    return [place for start in data for place in checksums_of(members[start])]


def _write(file: int, patches: Sequence[tuple[int, int]]) -> None:
    """Writes checksums at their offsets, in order; neighboring ones are written together."""
    near: list[tuple[int, int]] = []
    for patch in patches:
        if near and patch[0] - near[-1][0] >= NEAR:
            _write_near(file, near)
            near = []
        near.append(patch)
    _write_near(file, near)


def _write_near(file: int, patches: Sequence[tuple[int, int]]) -> None:
    start, stop = patches[0][0], patches[-1][0] + 4
    data = bytearray(pread(file, stop - start, start) if len(patches) > 1 else 4)
    for place, crc in patches:
        struct.pack_into("<I", data, place - start, crc)
    write_all(file, memoryview(data), start)


def crcs_of(outcome: Any) -> dict[str, dict[int, int]]:
    """The CRC-32s of the zip members that a copy has filled, by file and then by offset."""
    crcs: dict[str, dict[int, int]] = {}
    for extent, crc in outcome.records.items():
        crcs.setdefault(extent.file, {})[extent.offset] = crc
    return crcs


def metadata(
    items: Items,
    paths: Mapping[str, tuple[Any, ...]],
    locations: Iterable[tuple[ItemKey, ItemLocation]],
    **further_fields: Any,
) -> Foreign:
    """Makes the object that is pickled as `.metadata`.

    `paths` are the keys that lead to each item in the program's state dict. `locations` has a
    location for each item, with a file path relative to the folder of `.metadata`. torch ignores
    `further_fields`.
    """
    return _record(
        "metadata.Metadata",
        state_dict_metadata={key: _item_record(item) for key, item in items.items()},
        planner_data=paths,
        storage_data={
            Record(INDEX, (key, None if offsets is None else _size(offsets), None)): Record(
                LOCATION, (location.file, location.offset, location.length)
            )
            for (key, offsets), location in locations
        },
        storage_meta=None,
        version=VERSION,
        **further_fields,
    )


def _item_record(item: TensorItem | None) -> Foreign | Repeated:
    if item is None:
        return _record("metadata.BytesStorageMetadata")
    description = _tensor if len(item.boxes) <= FEW_BOXES else _tensor_of_many
    return description(item.torch_dtype, item.shape, tuple(item.boxes))


def _tensor_of_many(
    torch_dtype: str, shape: tuple[int, ...], boxes: tuple[ItemBox, ...]
) -> Repeated:
    chunks = [_chunk(box.offsets, box.sizes) for box in boxes]
    return Repeated(Record(TENSOR, (_properties(torch_dtype), _size(shape), chunks)))


_tensor = lru_cache(1 << 12)(_tensor_of_many)


@lru_cache(1 << 14)
def _size(shape: tuple[int, ...]) -> Repeated:
    return Repeated(Size(shape))


@lru_cache(1 << 14)
def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Repeated:
    return Repeated(Record(CHUNK, (_size(offsets), _size(sizes))))


@lru_cache
def _properties(torch_dtype: str) -> Repeated:
    properties = _record("metadata.TensorProperties")
    properties.state = (
        Global(f"torch.{torch_dtype}"),
        Foreign(Global("torch.serialization._get_layout"), ("torch.strided",)),
        False,
        Foreign(Global("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return Repeated(properties)


def _record(name: str, **state: Any) -> Foreign:
    """An object of a dataclass of torch.distributed.checkpoint, with these attributes."""
    return Foreign.instance(f"{PACKAGE}.{name}", **state)


PACKAGE = "torch.distributed.checkpoint"
TENSOR, CHUNK, INDEX, LOCATION = (
    (Global(f"{PACKAGE}.{name}"), names)
    for name, names in (
        ("metadata.TensorStorageMetadata", ("properties", "size", "chunks")),
        ("metadata.ChunkStorageMetadata", ("offsets", "sizes")),
        ("metadata.MetadataIndex", ("fqn", "offset", "index")),
        ("filesystem._StorageInfo", ("relative_path", "offset", "length")),
    )
)
"""For the objects of which there are many in `.metadata`: the class, and its attributes' names."""
