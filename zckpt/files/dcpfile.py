"""Where torch.distributed.checkpoint keeps the items of a directory, by what `.metadata` says.

    <dir>/.metadata      one pickle, written last: the shape, boxes and location of every item
    <dir>/__R.metadata   instead of it, one per rank with that rank's items, if ranks saved without
                         collectives (use_collectives=False)
    <dir>/__R_K.distcp   items in sequence, each a complete file of torch.save; or values stored
                         that way, followed by all tensors as one safetensors file

An item is a tensor or any other value under a key. A tensor is saved in boxes: a rank's local part
is one box. The fields are those of torch 2.1 to 2.13; only their classes moved. torch reads
`.metadata` with plain pickle. This module imports no class that a pickle names, and it does not
know what keys mean.

`.metadata` has no checksum, and it says most things twice: the keys of items and the paths that
lead to them, the boxes of tensors and their locations in files. One changed bit in a key would
otherwise turn a moment of the optimizer into a value that nobody asks for: so its parts are
compared. zckpt writes a CRC-32 behind the pickle. torch (2.13) reads no further than the end of the
pickle, so it loads such a file as any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..core import sources
from ..core.checksum import crc32
from ..core.dtypes import FROM_TORCH
from ..core.filenames import path_inside
from ..core.grouping import by_key
from ..core.inert import Foreign, Global
from ..core.inventory import gaps, known, refuse_gaps, role
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
    safe,
)
from .unpickle import Unpickler

METADATA = ".metadata"
ITEMS = ".distcp"
MAX_METADATA = 2 << 30  # bytes; a box takes 140 to 210, and 4 KB of memory once it is read
AT_ONCE = 1 << 20  # bytes
SEAL = re.compile(rb"\nzckpt-crc32 ([0-9a-f]{8})\n\Z")
OF_RANK = role("metadata", r"__(\d+)\.metadata", "dp")
VERSION = "1.0.0"  # of the metadata, torch 2.13
FIELDS = {"state_dict_metadata", "planner_data", "storage_data"}  # of every version of torch
MAX_AXES = 64  # of a torch.Tensor
MAX_NUMBER = 1 << 60  # elements or bytes
MAX_PATH = 100  # keys that lead to one item
MAX_TEXT = 4096  # characters of a key or a file's name

KeyPath = tuple[str | int, ...]
"""Keys that lead to an item in the program's state dict."""


class ItemBox(Struct, frozen=True):
    """Elements [offset, offset + size) of a tensor along every axis; torch calls it a chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes


class TensorItem(Struct, frozen=True):
    """A tensor under a key; `torch_dtype` is torch's name of its type, which zckpt may not know."""

    torch_dtype: str
    shape: tuple[int, ...]
    boxes: tuple[ItemBox, ...]

    @property
    def dtype(self) -> str:
        """The type's name in a manifest; raises UnsupportedCheckpoint."""
        dtype = FROM_TORCH.get(self.torch_dtype)
        if dtype is None:
            raise UnsupportedCheckpoint(
                "type-unsupported",
                f"zckpt does not read tensors of type torch.{self.torch_dtype}",
                hint="cast them before saving, or leave them out of the checkpoint",
            )
        return dtype


Items = dict[str, TensorItem | None]
"""Items by key, in the order of `.metadata`; None for a value that is not a tensor."""

ItemKey = tuple[str, tuple[int, ...] | None]
"""A key with the offsets of one of its boxes; without offsets for a value."""


class ItemLocation(Struct, frozen=True):
    """The file and the bytes in which an item was saved."""

    file: str
    offset: int
    length: int
    shared: bool = False  # other tensors begin there too: it is one safetensors file


class ItemTable(Struct, frozen=True):
    """What the metadata of one folder says; `files` are the metadata files themselves.

    `paths` are the keys that lead to each item, in the order of the saved state; it is empty if the
    writer did not keep them. `copies` are further locations of items that several ranks saved.
    `unsaved` are keys with a path of which no rank saved an item. `others` are the fields that
    describe no item: `planner_data`, `version`, `storage_meta`, and what a writer has added.
    """

    folder: str
    files: tuple[str, ...]
    items: Items
    locations: dict[ItemKey, ItemLocation]
    others: dict[str, Any]
    paths: dict[str, KeyPath]
    copies: dict[ItemKey, list[ItemLocation]] = field(default_factory=dict)

    @property
    def unsaved(self) -> list[str]:
        return [key for key in self.paths if key not in self.items]

    def every_location(self) -> Iterator[ItemLocation]:
        return chain(self.locations.values(), *self.copies.values())

    def location(self, key: str, box: ItemBox | None = None) -> ItemLocation:
        """Where a value or one box of a tensor lies; raises IncompleteCheckpoint."""
        location = self.locations.get((key, None if box is None else box.offsets))
        if location is None:
            what = _called(key, None if box is None else box.offsets)
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{self.folder}: {METADATA} does not say in which file {what} is",
                file=self.folder,
            )
        return location


# -- the pickle


def names_any(folder: str, texts: Sequence[bytes]) -> bool:
    """Whether the `.metadata` of a folder has one of the texts, which are parts of keys.

    It is not unpickled: keys stand in it as they are. One that is too large to be read has none.
    """
    path = os.path.join(folder, METADATA)
    if not sources.is_file(path) or sources.size(path) > MAX_METADATA:
        return False
    rest, longest = b"", max(map(len, texts))
    with sources.opened(path) as file:
        while block := file.read(AT_ONCE):
            rest += block
            if any(text in rest for text in texts):
                return True
            rest = rest[-longest:]
    return False


def sealed(text: bytes) -> bytes:
    """A pickle with its CRC-32 behind it."""
    return text + b"\nzckpt-crc32 %08x\n" % crc32(text)


def check_seal(text: bytes) -> None:
    """Raises CorruptCheckpoint if the bytes before the CRC-32 are others; torch writes none."""
    match = SEAL.search(text, max(0, len(text) - 32))
    if match and crc32(text[: match.start()]) != int(match[1], 16):
        raise CorruptCheckpoint("record-damaged", "its bytes do not have the CRC-32 behind them")


def read_table(folder: str) -> ItemTable:
    """The metadata of a folder: one `.metadata`, or those of all ranks combined.

    Raises CorruptCheckpoint (values of wrong types, parts that contradict each other),
    IncompleteCheckpoint (no metadata, or none of some rank; an item without a location),
    UnsupportedCheckpoint (items that are compressed or encrypted; more than 2 GiB).
    """
    with os.scandir(folder) as entries:
        files = sorted(entry.path for entry in entries if entry.name.endswith(METADATA))
    name = os.path.join(folder, METADATA)
    if sources.is_file(name):
        table = _read_one(folder, tuple(files), name)
        need_agreement(table, name)
        return table
    ranks = {own.numbers: path for path in files if (own := known((OF_RANK,), path)) is not None}
    if not ranks:
        raise IncompleteCheckpoint(
            "unfinished-save",
            f"{folder} has items but no {METADATA}, which is written last",
            hint="the save did not finish; take an earlier checkpoint",
            file=folder,
        )
    refuse_gaps(folder, gaps(OF_RANK, ranks, zip(range(max(ranks)[0]))))
    table = _combined([_read_one(folder, tuple(files), ranks[rank]) for rank in sorted(ranks)])
    need_agreement(table, os.path.join(folder, f"__*{METADATA}"))
    return table


def _read_one(folder: str, files: tuple[str, ...], name: str) -> ItemTable:
    with sources.opened(name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_METADATA:
            raise UnsupportedCheckpoint(
                "file-too-large",
                f"{name} has {size} bytes; zckpt reads metadata of up to {MAX_METADATA}",
                hint="save with fewer ranks, or with fewer tensors",
            )
        text = file.read()
    try:
        check_seal(text)
        return _table(folder, files, Unpickler(text).load())
    except (CorruptCheckpoint, UnsupportedCheckpoint) as error:
        if error.file is not None:
            raise
        raise error.again(message=f"{name}: {error.message}", file=name) from error
    except RecursionError as error:
        raise CorruptCheckpoint(
            "file-damaged", f"{name}: its values are nested too deeply"
        ) from error


def _table(folder: str, files: tuple[str, ...], content: Any) -> ItemTable:
    fields = dict(attributes(content))
    if missing := FIELDS - fields.keys():
        raise CorruptCheckpoint(
            "file-damaged",
            f"it is not metadata of torch.distributed.checkpoint: no {listed(sorted(missing))}",
        )
    described, stored = fields.pop("state_dict_metadata"), fields.pop("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CorruptCheckpoint("file-damaged", "its items or their locations are not a dictionary")
    locations = _locations(folder, stored)
    # every box is stored, so a list that many tensors share cannot be long
    room = len(locations) + MAX_AXES
    items: Items = {}
    for key, record in described.items():
        items[_text(key, "a key")] = item = _item(key, record, room)
        room -= len(_boxes(item))
    return ItemTable(folder, files, items, locations, fields, _paths(fields["planner_data"], items))


def _combined(tables: list[ItemTable]) -> ItemTable:
    """The tables of all ranks as one. Ranks may repeat whole tensors: each box counts once."""
    first = tables[0]
    items, locations = dict(first.items), dict(first.locations)
    copies: dict[ItemKey, list[ItemLocation]] = {}
    paths = {**first.paths}
    known = {(key, box.offsets) for key, item in items.items() for box in _boxes(item)}
    for table in tables[1:]:
        for place, location in table.locations.items():
            if locations.setdefault(place, location) is not location:
                copies.setdefault(place, []).append(location)
        for key, item in table.items.items():
            if key not in items:
                items[key] = item
                known |= {(key, box.offsets) for box in _boxes(item)}
                continue
            for box in _boxes(item):
                if (key, box.offsets) not in known:
                    items[key] = _with_box(items[key], box)
                    known.add((key, box.offsets))
        paths = {**table.paths, **paths}
    return replace(first, items=items, locations=locations, paths=paths, copies=copies)


def _boxes(item: TensorItem | None) -> tuple[ItemBox, ...]:
    return () if item is None else item.boxes


def _with_box(item: TensorItem | None, box: ItemBox) -> TensorItem:
    if item is None:
        raise CorruptCheckpoint(
            "file-damaged", f"{METADATA} is malformed: ranks disagree on what is a tensor"
        )
    return replace(item, boxes=(*item.boxes, box))


def _item(key: str, record: Any, most: int) -> TensorItem | None:
    """What is described under a key; `most` is the number of boxes that it may have."""
    fields = attributes(record)
    if not fields:  # BytesStorageMetadata
        return None
    if not {"properties", "size", "chunks"} <= fields.keys():
        raise CorruptCheckpoint("file-damaged", f"{safe(key)} is neither a tensor nor a value")
    # TensorProperties pickles a tuple; the dtype is its first element
    properties = fields["properties"]
    properties = properties.state if isinstance(properties, Foreign) else None
    if isinstance(properties, dict):
        properties = (properties.get("dtype"),)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Global):
        raise CorruptCheckpoint(
            "file-damaged", f"{safe(key)} has a {type(dtype).__name__} instead of a dtype"
        )
    chunks = fields["chunks"]
    if not isinstance(chunks, (list, tuple)) or len(chunks) > most:
        raise CorruptCheckpoint(
            "file-damaged", f"the pieces of {safe(key)} are not a list, or more than the files have"
        )
    boxes = (
        ItemBox(_numbers(box.get("offsets"), key), _numbers(box.get("sizes"), key))
        for box in map(attributes, chunks)
    )
    size = _numbers(fields["size"], key)
    if prod(size) >= MAX_NUMBER:
        raise CorruptCheckpoint(
            "file-damaged", f"the sizes of {safe(key)} are those of {prod(size)} elements"
        )
    return TensorItem(dtype.name.removeprefix("torch."), size, tuple(boxes))


def _locations(folder: str, storage: Mapping[Any, Any]) -> dict[ItemKey, ItemLocation]:
    locations: dict[ItemKey, ItemLocation] = {}
    paths: dict[str, str] = {}  # of files, by the names that the metadata has
    begins: dict[tuple[str, int], int] = {}
    for index, info in storage.items():
        item, stored = attributes(index), attributes(info)
        key, offsets = _text(item.get("fqn"), "a key"), item.get("offset")
        if stored.get("transform_descriptors"):
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{safe(key)} is stored compressed or encrypted: "
                f"{_texts(stored['transform_descriptors'])}",
            )
        name = _text(stored.get("relative_path"), "the name of a file")
        if not name.isprintable():
            raise CorruptCheckpoint("file-damaged", f"no file is called {name!r}")
        if name not in paths:
            paths[name] = path_inside(folder, name, METADATA)
        offset, length = _numbers((stored.get("offset"), stored.get("length")), key)
        place = key, None if offsets is None else _numbers(offsets, key)
        if place in locations:
            raise CorruptCheckpoint("file-damaged", f"two files are stated for {_called(*place)}")
        begin = paths[name], offset
        begins[begin] = begins.get(begin, 0) + 1
        locations[place] = ItemLocation(*begin, length)
    if len(begins) < len(locations):
        for place, location in locations.items():
            if begins[location.file, location.offset] > 1:
                locations[place] = replace(location, shared=True)
    return locations


def _paths(planner_data: Any, items: Items) -> dict[str, KeyPath]:
    """The path of every key; empty if the writer kept none, or something of its own instead."""
    if not isinstance(planner_data, dict) or planner_data.keys().isdisjoint(items):
        return {}
    return {_text(key, "a key"): _path(key, path) for key, path in planner_data.items()}


def _path(key: str, path: Any) -> KeyPath:
    if (
        not isinstance(path, (tuple, list))
        or not 0 < len(path) <= MAX_PATH
        or not all(
            type(step) is str or (type(step) is int and 0 <= step < MAX_NUMBER) for step in path
        )
    ):
        raise CorruptCheckpoint(
            "file-damaged", f"the path of {safe(key)} is not a list of up to {MAX_PATH} keys"
        )
    # the lengths first, since many paths may refer to one long text
    length = len(path) - 1 + sum(len(step) for step in path if isinstance(step, str))
    if length > len(key) or ".".join(map(str, path)) != key:
        raise CorruptCheckpoint("file-damaged", f"the path of {safe(key)} leads to another item")
    return tuple(path)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise CorruptCheckpoint(
            "file-damaged", f"{what} is not a text of up to {MAX_TEXT} characters"
        )
    return value


def _numbers(values: Any, key: str) -> tuple[int, ...]:
    """Sizes, offsets or lengths."""
    if isinstance(values, (tuple, list)) and len(values) <= MAX_AXES:
        for value in values:
            if type(value) is not int or not 0 <= value < MAX_NUMBER:
                break
        else:
            return tuple(values)
    raise CorruptCheckpoint(
        "file-damaged",
        f"the sizes or offsets of {safe(key)} are not numbers that a tensor can have",
    )


def _texts(values: Any) -> str:
    """A list of texts for a message; the type of anything else."""
    if isinstance(values, (list, tuple)):
        return listed([str(value)[:80] for value in values[:9] if isinstance(value, str)])
    return type(values).__name__


def _called(key: str, offsets: tuple[int, ...] | None) -> str:
    """An item's name in a message."""
    return safe(key) if offsets is None else f"{safe(key)} at {list(offsets)}"


def attributes(record: Any) -> dict[str, Any]:
    """The attributes of a pickled dataclass; raises CorruptCheckpoint for anything else."""
    state = record.state if isinstance(record, Foreign) else record
    if state is None:  # BytesStorageMetadata has none
        return {}
    if not isinstance(record, Foreign) or not isinstance(state, dict):
        raise CorruptCheckpoint("file-damaged", "a description of an item is malformed")
    return state


# -- what it says twice


def need_agreement(table: ItemTable, name: str) -> None:
    """Raises an error about the file `name` if parts of its table contradict each other.

    CorruptCheckpoint: items without a path, locations of no item, boxes that overlap or lie outside
    of their tensor. IncompleteCheckpoint: an item without a location. InconsistentCheckpoint: items
    that share bytes of a file.
    """
    if table.paths:  # a path without an item is no error: torch before 2.4 wrote some
        pathless = [key for key in table.items if key not in table.paths]
        if pathless:
            raise CorruptCheckpoint(
                "file-damaged", f"{name}: no path leads to {_all_shown(pathless)}"
            )
    places: set[tuple[str, tuple[int, ...] | None]] = set()
    for key, item in table.items.items():
        if item is None:
            table.location(key)
            places.add((key, None))
        else:
            places |= {(key, offsets) for offsets in _places_of(table, key, item, name)}
    if len(places) < len(table.locations):
        strangers = [key for key, offsets in table.locations if (key, offsets) not in places]
        raise CorruptCheckpoint(
            "file-damaged",
            f"{name}: it names files of {_all_shown(list(dict.fromkeys(strangers)))}, "
            "which no item describes",
        )
    _need_separate(table, name)


def _places_of(table: ItemTable, key: str, item: TensorItem, name: str) -> set[tuple[int, ...]]:
    """The offsets of the boxes of a tensor that have a location."""
    offsets = set()
    for box in item.boxes:
        if len(box.offsets) != len(item.shape) or len(box.sizes) != len(item.shape):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{name}: a piece of {_all_shown([key])} has another number of axes than its shape "
                f"{list(item.shape)}",
            )
        if box.is_empty:  # several ranks may have none of its rows
            if (key, box.offsets) in table.locations:
                offsets.add(box.offsets)
            continue
        table.location(key, box)
        ends = map(sum, zip(box.offsets, box.sizes, strict=True))
        if any(end > size for end, size in zip(ends, item.shape, strict=True)):
            raise InconsistentCheckpoint(
                "file-damaged",
                f"{name}: a piece of {_all_shown([key])} of shape {list(box.sizes)} at "
                f"{list(box.offsets)} lies outside of its shape {list(item.shape)}",
            )
        offsets.add(box.offsets)
    return offsets


def _all_shown(keys: list[str]) -> str:
    """The first keys, in one line."""
    return listed([*map(safe, keys)], 4)


def _need_separate(table: ItemTable, name: str) -> None:
    """Raises InconsistentCheckpoint if items share bytes, but for tensors of one safetensors file.

    All of these state where the file begins (torch 2.13, filesystem.py).
    """
    by_file = by_key((location.file, location) for location in table.every_location())
    for file, locations in by_file.items():
        locations.sort(key=lambda location: location.offset)
        stop = begin = 0
        for location in locations:
            if location.offset < stop and location.offset != begin:
                raise InconsistentCheckpoint(
                    "elements-overlap",
                    f"{name}: two items share byte {location.offset} of {file}",
                    file=file,
                )
            begin = location.offset
            stop = max(stop, begin + location.length)
