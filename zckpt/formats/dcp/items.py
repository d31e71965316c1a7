"""What directories of torch.distributed.checkpoint hold under each key, read when it is asked for.

`dcp.py` reads every item and asks which are the model's and the optimizer's. torch's own loading
asks for keys alone, and so does this module: `.metadata` lists them, an item's file is opened when
its value is wanted, and of a tensor only the boxes that are wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from ...core.inert import Foreign, Global
from ...core.manifest import Entry, Record, solid
from ...errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint, not_understood
from ...files.dcpfile import (
    METADATA,
    ItemFiles,
    Place,
    agree,
    dtype_of,
    fields_of,
    metadata,
    places_of,
)
from ...files.torchfile import Tensor, TorchFile
from ..statedict.tree import Path
from .files import located


@dataclass(frozen=True, slots=True)
class OpenedItem:
    """What an item's file says.

    `value` has inert records in the place of objects and tensors, `entry` gives the place of the
    bytes of such a tensor, `records` are those of all its tensors.
    """

    value: Any
    entry: Callable[[Any], Entry]
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Part of a tensor, cut along any axes, that is an item of its own: `value` is that tensor."""

    sizes: tuple[int, ...]
    open: Callable[[], OpenedItem]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor under a key, in boxes by their offsets along every axis.

    `dtype` is torch's name of its type, which zckpt may not know.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], StoredBox]

    @property
    def stored(self) -> int:
        """The number of elements that the boxes hold."""
        return sum(prod(box.sizes) for box in self.boxes.values())


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value under a key; `is_number` where it is a 0-d tensor."""

    open: Callable[[], OpenedItem]
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class StoredItems:
    """All items of a checkpoint by key, in the order of `.metadata`.

    `paths` are the keys that lead to each in the program's state dict, where they were saved.
    `version` and `saving` (checkpoint_id, save_id, ...) are what `.metadata` says of the save
    itself, in `files`.
    """

    root: str
    files: tuple[str, ...]
    items: dict[str, StoredTensor | StoredValue]
    paths: dict[str, Path]
    version: str | None
    saving: dict[str, Any]


def stored_items(path: str, tag: str | None = None) -> StoredItems:
    """The items of the directory at `path`; none of their files is opened.

    Raises CorruptCheckpoint, IncompleteCheckpoint (no `.metadata`), UnsupportedCheckpoint
    (Megatron-Core, compressed or encrypted items).
    """
    root, folders = located(path, tag)
    if not folders:
        raise IncompleteCheckpoint(f"{root} holds no {METADATA}")
    items: dict[str, StoredTensor | StoredValue] = {}
    paths: dict[str, Path] = {}
    files: list[str] = []
    try:
        for name in folders:
            fields = metadata(name)
            places = places_of(name, fields["storage_data"])
            folder = ItemFiles(name)
            for key, item in fields["state_dict_metadata"].items():
                items[key] = _item(folder, key, item, places)
            paths.update(_paths(fields))
            with os.scandir(name) as listed:
                files += sorted(each.path for each in listed if each.name.endswith(METADATA))
        version, saving = fields.get("version"), fields.get("storage_meta")
        about = fields_of(saving) if isinstance(saving, Foreign) else {}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(root, error) from error
    version = version if isinstance(version, str) else None
    return StoredItems(root, tuple(files), items, paths, version, about)


def _paths(fields: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """What `planner_data` says of keys; planners other than torch's may keep anything there."""
    data = fields.get("planner_data")
    for key, path in data.items() if isinstance(data, dict) else ():
        if isinstance(path, (tuple, list)) and all(type(step) in (str, int) for step in path):
            yield key, tuple(path)


def _item(
    folder: ItemFiles, key: str, item: Foreign, places: Mapping[Any, Place]
) -> StoredTensor | StoredValue:
    fields = fields_of(item)
    if "chunks" not in fields:
        return StoredValue(cache(partial(_open_value, folder, key, places.get((key, None)))))
    properties, shape = fields["properties"], tuple(fields["size"])
    boxes: dict[tuple[int, ...], StoredBox] = {}
    for chunk in map(fields_of, fields["chunks"]):
        offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        if 0 not in sizes:
            place = places.get((key, offsets))
            opened = cache(partial(_open_box, folder, key, place, properties, sizes))
            boxes[offsets] = StoredBox(sizes, opened)
    return StoredTensor(_torch_name(properties), shape, boxes)


def _torch_name(properties: Any) -> str:
    """TensorProperties pickles a tuple whose first is the dtype."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, Global):
        raise CorruptCheckpoint(f"{METADATA} is malformed: {dtype!r} is no dtype")
    return dtype.name.removeprefix("torch.")


def _open_value(folder: ItemFiles, key: str, place: Place | None) -> OpenedItem:
    file = folder.file(_known(folder, key, place))
    return OpenedItem(file.value, partial(_entry, key, file), tuple(file.records.values()))


def _open_box(
    folder: ItemFiles, key: str, place: Place | None, properties: Any, sizes: tuple[int, ...]
) -> OpenedItem:
    place, dtype = _known(folder, key, place), dtype_of(properties)
    stored = folder.stored(place, key)
    if stored is not None:
        agree(place, key, (stored.dtype, stored.shape), (dtype, sizes))
        entry = Entry(key, dtype, sizes, solid(prod(sizes), stored.extent))
        return OpenedItem(stored, lambda _: entry, ())
    file = folder.file(place)
    tensor = file.value
    if not isinstance(tensor, Tensor):
        raise UnsupportedCheckpoint(
            f"it is stored as an object of {getattr(tensor, 'name', type(tensor).__name__)}"
        )
    agree(place, key, (tensor.dtype, tensor.shape), (dtype, sizes))
    entry = _entry(key, file, tensor)
    return OpenedItem(tensor, lambda _: entry, tuple(file.records.values()))


def _entry(key: str, file: TorchFile, tensor: Tensor) -> Entry:
    return Entry(key, tensor.dtype, tensor.shape, file.fragments(tensor))


def _known(folder: ItemFiles, key: str, place: Place | None) -> Place:
    if place is None:
        raise IncompleteCheckpoint(f"{folder.folder}: {METADATA} does not say where {key} is")
    return place
