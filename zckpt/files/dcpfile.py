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
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core import sources
from ..core.expected import missing_file, missing_ranks, path_inside
from ..core.fragments import Extent
from ..core.inert import Foreign, Global, Size
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from .safefile import Stored, read_with_metadata
from .torchfile import TORCH_DTYPES, Parsed, TorchFile
from .unpickle import Unpickler

METADATA = ".metadata"
ITEMS = ".distcp"
OF_RANK = re.compile(r"__(\d+)\.metadata")
VERSION = "1.0.0"  # of the metadata, torch 2.13


@dataclass(frozen=True, slots=True)
class ItemBox:
    """Elements [offset, offset + size) of a tensor along every axis; torch calls it a chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor under a key; `torch_dtype` is torch's name of its type, which zckpt may not know."""

    torch_dtype: str
    shape: tuple[int, ...]
    boxes: tuple[ItemBox, ...]

    @property
    def dtype(self) -> str:
        """The type's name in a manifest; raises UnsupportedCheckpoint."""
        dtype = TORCH_DTYPES.get(f"torch.{self.torch_dtype}")
        if dtype is None:
            raise UnsupportedCheckpoint(
                f"zckpt does not read tensors of type torch.{self.torch_dtype}",
                hint="cast them before saving, or leave them out of the checkpoint",
            )
        return dtype


Items = dict[str, TensorItem | None]
"""Items by key, in the order of `.metadata`; None for a value that is not a tensor."""

ItemKey = tuple[str, tuple[int, ...] | None]
"""A key with the offsets of one of its boxes; without offsets for a value."""


@dataclass(frozen=True, slots=True)
class ItemLocation:
    """The file and the bytes in which an item was saved."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ItemTable:
    """What the metadata of one folder says; `files` are the metadata files themselves.

    `others` are the fields that describe no item: `planner_data`, `version`, `storage_meta`, and
    what a writer has added.
    """

    folder: str
    files: tuple[str, ...]
    items: Items
    locations: dict[ItemKey, ItemLocation]
    others: dict[str, Any]

    def location(self, key: str, box: ItemBox | None = None) -> ItemLocation:
        """Where a value or one box of a tensor lies; raises IncompleteCheckpoint."""
        location = self.locations.get((key, None if box is None else box.offsets))
        if location is None:
            where = key if box is None else f"{key} at {list(box.offsets)}"
            raise IncompleteCheckpoint(
                f"{self.folder}: {METADATA} does not say in which file {where} is"
            )
        return location


# -- reading


def read_table(folder: str) -> ItemTable:
    """The metadata of a folder: one `.metadata`, or those of all ranks combined.

    Raises CorruptCheckpoint, IncompleteCheckpoint (no metadata, or none of some rank),
    UnsupportedCheckpoint (items that are compressed or encrypted).
    """
    with os.scandir(folder) as entries:
        files = sorted(entry.path for entry in entries if entry.name.endswith(METADATA))
    name = os.path.join(folder, METADATA)
    if sources.is_file(name):
        return _read_one(folder, tuple(files), name)
    ranks = {
        int(match[1]): path
        for path in files
        if (match := OF_RANK.fullmatch(os.path.basename(path)))
    }
    if not ranks:
        raise IncompleteCheckpoint(
            f"{folder} has items but no {METADATA}, which is written last",
            hint="the save did not finish; take an earlier checkpoint",
        )
    missing = sorted(set(range(max(ranks))) - set(ranks))
    if missing:
        raise missing_ranks(folder, missing, hint=f"expected __{missing[0]}{METADATA}")
    return _combined([_read_one(folder, tuple(files), ranks[rank]) for rank in sorted(ranks)])


def _read_one(folder: str, files: tuple[str, ...], name: str) -> ItemTable:
    with sources.opened(name) as file:
        text = file.read()
    try:
        fields = dict(attributes(Unpickler(text).load()))
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{name}: {error.message}", error.hint) from error
    if not {"state_dict_metadata", "storage_data"} <= fields.keys():
        raise CorruptCheckpoint(f"{name} is not metadata of torch.distributed.checkpoint")
    items = {key: _item(value) for key, value in fields.pop("state_dict_metadata").items()}
    return ItemTable(folder, files, items, _locations(folder, fields.pop("storage_data")), fields)


def _combined(tables: list[ItemTable]) -> ItemTable:
    """The tables of all ranks as one. Ranks may repeat whole tensors: each box counts once."""
    first = tables[0]
    items, locations = dict(first.items), dict(first.locations)
    paths = first.others.get("planner_data") or {}
    known = {(key, box.offsets) for key, item in items.items() for box in _boxes(item)}
    for table in tables[1:]:
        for place, location in table.locations.items():
            locations.setdefault(place, location)
        for key, item in table.items.items():
            if key not in items:
                items[key] = item
                known |= {(key, box.offsets) for box in _boxes(item)}
                continue
            for box in _boxes(item):
                if (key, box.offsets) not in known:
                    items[key] = _with_box(items[key], box)
                    known.add((key, box.offsets))
        paths = {**(table.others.get("planner_data") or {}), **paths}
    others = {**first.others, "planner_data": paths}
    return replace(first, items=items, locations=locations, others=others)


def _boxes(item: TensorItem | None) -> tuple[ItemBox, ...]:
    return () if item is None else item.boxes


def _with_box(item: TensorItem | None, box: ItemBox) -> TensorItem:
    if item is None:
        raise CorruptCheckpoint(f"{METADATA} is malformed: ranks disagree on what is a tensor")
    return replace(item, boxes=(*item.boxes, box))


def _item(record: Any) -> TensorItem | None:
    fields = attributes(record)
    if "chunks" not in fields:
        return None
    # TensorProperties pickles a tuple; the dtype is its first element
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, Global):
        raise CorruptCheckpoint(f"{METADATA} is malformed: {dtype!r} is not a dtype")
    boxes = (
        ItemBox(tuple(box["offsets"]), tuple(box["sizes"]))
        for box in map(attributes, fields["chunks"])
    )
    return TensorItem(dtype.name.removeprefix("torch."), tuple(fields["size"]), tuple(boxes))


def _locations(folder: str, storage: Mapping[Any, Any]) -> dict[ItemKey, ItemLocation]:
    locations: dict[ItemKey, ItemLocation] = {}
    for index, info in storage.items():
        item, stored = attributes(index), attributes(info)
        if stored.get("transform_descriptors"):
            raise UnsupportedCheckpoint(
                f"{folder}: {item['fqn']} is stored compressed or encrypted "
                f"({stored['transform_descriptors']})"
            )
        name = stored["relative_path"]
        offsets = item.get("offset")
        key = item["fqn"], None if offsets is None else tuple(offsets)
        path = path_inside(folder, name, METADATA)
        locations[key] = ItemLocation(path, stored["offset"], stored["length"])
    return locations


def attributes(record: Any) -> dict[str, Any]:
    """The attributes of a pickled dataclass; raises CorruptCheckpoint for anything else."""
    state = record.state if isinstance(record, Foreign) else record
    if state is None:  # BytesStorageMetadata has none
        return {}
    if not isinstance(record, Foreign) or not isinstance(state, dict):
        raise CorruptCheckpoint(f"{METADATA} is malformed")
    return state


class ItemFiles:
    """The item files of a folder, each opened when one of its items is needed.

    `sizes` are the bytes of every file that was opened, by path.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._parsed: Parsed = {}
        self._tensors: dict[tuple[str, int], dict[str, Stored]] = {}

    def stored(self, location: ItemLocation, key: str) -> Stored | None:
        """The tensor `key`, if a safetensors file begins at the location; None if it does not."""
        begin = location.file, location.offset
        if begin not in self._tensors:
            self._require(location, 1)
            with sources.opened(location.file) as file:
                file.seek(location.offset)
                is_torch = file.read(2) == b"PK"
            if is_torch:
                return None
            tensors, _ = read_with_metadata(location.file, location.offset)
            self._tensors[begin] = {stored.name: stored for stored in tensors}
        if key not in self._tensors[begin]:
            raise IncompleteCheckpoint(
                f"{location.file} lacks {key}, which should be there according to {METADATA}"
            )
        return self._tensors[begin][key]

    def torch_file(self, location: ItemLocation) -> TorchFile:
        """The item as a file of torch.save, which it is in full."""
        self._require(location, location.length)
        extent = Extent(location.file, location.offset, location.length)
        return TorchFile(location.file, self._parsed, extent)

    def _require(self, location: ItemLocation, length: int) -> None:
        """Raises IncompleteCheckpoint unless the file exists and has these bytes."""
        path, stop = location.file, location.offset + length
        if path not in self.sizes:
            if not sources.is_file(path):
                hint = "copy the whole directory; every rank writes files of its own"
                raise missing_file(path, METADATA, hint)
            self.sizes[path] = sources.size(path)
        if min(location.offset, length) < 0 or stop > self.sizes[path]:
            raise IncompleteCheckpoint(
                f"{path} has {self.sizes[path]} bytes, but {METADATA} needs at least {stop}",
                hint="it was cut short; take another copy of it",
            )


def require_same(
    location: ItemLocation,
    key: str,
    stored: tuple[str, tuple[int, ...]] | None,
    stated: tuple[str, tuple[int, ...]],
) -> None:
    """Raises InconsistentCheckpoint unless a stored dtype and shape are those of the metadata.

    `stored` is None for an item that is not a tensor.
    """
    if stored != stated:
        raise InconsistentCheckpoint(
            f"{location.file} should have {stated[0]} {list(stated[1])} of {key} at byte "
            f"{location.offset} according to {METADATA}, but something else is there"
        )


# -- writing


def metadata(
    items: Items,
    paths: Mapping[str, tuple[Any, ...]],
    locations: Iterable[tuple[ItemKey, ItemLocation]],
    **others: Any,
) -> Foreign:
    """The object to pickle as `.metadata`; files of locations are relative to its folder.

    `paths` are the keys that lead to each item in the program's state dict. torch ignores `others`.
    """
    return _record(
        "metadata.Metadata",
        state_dict_metadata={key: _item_record(item) for key, item in items.items()},
        planner_data=paths,
        storage_data={
            _record(
                "metadata.MetadataIndex",
                fqn=key,
                offset=None if offsets is None else Size(offsets),
                index=None,
            ): _record(
                "filesystem._StorageInfo",
                relative_path=location.file,
                offset=location.offset,
                length=location.length,
            )
            for (key, offsets), location in locations
        },
        storage_meta=None,
        version=VERSION,
        **others,
    )


def _item_record(item: TensorItem | None) -> Foreign:
    if item is None:
        return _record("metadata.BytesStorageMetadata")
    properties = _record("metadata.TensorProperties")
    properties.state = (
        Global(f"torch.{item.torch_dtype}"),
        Foreign(Global("torch.serialization._get_layout"), ("torch.strided",)),
        False,
        Foreign(Global("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return _record(
        "metadata.TensorStorageMetadata",
        properties=properties,
        size=Size(item.shape),
        chunks=[
            _record(
                "metadata.ChunkStorageMetadata", offsets=Size(box.offsets), sizes=Size(box.sizes)
            )
            for box in item.boxes
        ],
    )


def _record(name: str, **state: Any) -> Foreign:
    """An object of one of torch.distributed.checkpoint's dataclasses."""
    return Foreign(Global(f"torch.distributed.checkpoint.{name}"), (), state or None, "new")
