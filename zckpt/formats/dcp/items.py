"""Reads what is saved under single keys of a torch.distributed.checkpoint directory, on demand.

read.py reads every key and finds the state dicts of the model and the optimizer. torch's own
loading asks for single keys, and this module does the same. `.metadata` lists the keys. A file is
opened when one of its values is needed, and only the needed shards of a tensor are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

from msgspec import Struct

from ...core.checkpoint.entries import Entry
from ...core.checkpoint.inert import Foreign
from ...core.storage.fragments import Record, solid
from ...errors import MALFORMED, IncompleteCheckpoint, UnsupportedCheckpoint, not_understood
from ...files.dcpfile import attributes, read_table
from ...files.dcpitems import ItemFiles, require_same
from ...files.dcptable import METADATA, ItemBox, ItemTable, TensorItem
from ...files.torchfile import Tensor, TorchFile
from ..statedict.refusals import refuse_tree
from ..statedict.tree import TreePath
from .files import locate, refuse_several


class OpenedItem(Struct, frozen=True):
    """What a file stores under a key, or as one shard of a tensor.

    value      the unpickled content; no code is run, so objects and tensors are descriptions
    entry      a function that returns the byte ranges of a described tensor
    records    the byte ranges of all tensors, with their checksums
    """

    value: Any
    entry: Callable[[Any], Entry]
    records: Sequence[Record]


class StoredBox(Struct, frozen=True):
    """A shard of a tensor, in one file or a part of a file.

    `sizes` is the shard's shape. `open()` opens the file; the result's `value` has the shard's
    dtype, shape and place in the file, not its elements.
    """

    sizes: tuple[int, ...]
    open: Callable[[], OpenedItem]


class StoredTensor(Struct, frozen=True):
    """The tensor that is saved under a key; `boxes` maps the offsets of its shards to the shards.

    `dtype` is torch's name of the element type, which zckpt may not support.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], StoredBox]

    @property
    def stored(self) -> int:
        """The number of elements in all shards together."""
        return sum(prod(box.sizes) for box in self.boxes.values())


class StoredValue(Struct, frozen=True):
    """A value that is saved under a key; `open()` reads it.

    `is_number` is true for a tensor of no dimensions.
    """

    open: Callable[[], OpenedItem]
    is_number: bool = False


class StoredItems(Struct, frozen=True):
    """Everything that is saved in a checkpoint, by key, in the order of `.metadata`.

    files      the metadata files
    paths      each key's path in the program's state dict, if `.metadata` states it
    version    the version in `.metadata`
    saving     facts about the save: checkpoint_id, save_id, ...
    """

    root: str
    files: tuple[str, ...]
    items: dict[str, StoredTensor | StoredValue]
    paths: dict[str, TreePath]
    version: str | None
    saving: dict[str, Any]


def stored_items(path: str, tag: str | None) -> StoredItems:
    """Lists what is saved in the directory at `path`, by key; opens only the metadata.

    Raises CorruptCheckpoint, IncompleteCheckpoint (no `.metadata`), UnsupportedCheckpoint
    (Megatron-Core, compressed or encrypted files).
    """
    root, folders = locate(path, tag)
    refuse_several(root, folders)
    if not folders:
        raise IncompleteCheckpoint("unfinished-save", f"{root} has no {METADATA}", file=root)
    items: dict[str, StoredTensor | StoredValue] = {}
    paths: dict[str, TreePath] = {}
    files: list[str] = []
    try:
        for folder in folders:
            # a program may keep its reader open and delete the checkpoint
            table, opened = read_table(folder), ItemFiles(keeps_open=False)
            for key, item in table.items.items():
                items[key] = _stored(table, opened, key, item)
            paths.update(table.paths)
            files += table.files
        version, saving = table.others.get("version"), table.others.get("storage_meta")
        description = attributes(saving) if isinstance(saving, Foreign) else {}
    except MALFORMED as error:
        raise not_understood(root, error) from error
    refuse_tree(dict.fromkeys(items), root)
    version = version if isinstance(version, str) else None
    return StoredItems(root, tuple(files), items, paths, version, description)


def _stored(
    table: ItemTable, files: ItemFiles, key: str, item: TensorItem | None
) -> StoredTensor | StoredValue:
    if item is None:
        return StoredValue(cache(partial(_open_value, table, files, key)))
    boxes = {
        box.offsets: StoredBox(box.sizes, cache(partial(_open_box, table, files, key, item, box)))
        for box in item.boxes
        if not box.is_empty
    }
    return StoredTensor(item.torch_dtype, item.shape, boxes)


def _open_value(table: ItemTable, files: ItemFiles, key: str) -> OpenedItem:
    file = files.torch_file(table.location(key))
    return OpenedItem(file.value, partial(_entry, key, file), tuple(file.records.values()))


def _open_box(
    table: ItemTable, files: ItemFiles, key: str, item: TensorItem, box: ItemBox
) -> OpenedItem:
    location, dtype = table.location(key, box), item.dtype
    stored = files.stored(location, key)
    if stored is not None:
        require_same(location, key, (stored.dtype, stored.shape), (dtype, box.sizes))
        entry = Entry(key, "state", dtype, box.sizes, solid(prod(box.sizes), stored.extent))
        return OpenedItem(stored, lambda _: entry, ())
    file = files.torch_file(location)
    tensor = file.value
    if not isinstance(tensor, Tensor):
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"{key} is not a plain tensor, but an object of the class "
            f"{getattr(tensor, 'name', type(tensor).__name__)}",
        )
    require_same(location, key, (tensor.dtype, tensor.shape), (dtype, box.sizes))
    entry = _entry(key, file, tensor)
    return OpenedItem(tensor, lambda _: entry, tuple(file.records.values()))


def _entry(key: str, file: TorchFile, tensor: Tensor) -> Entry:
    return Entry(key, "state", tensor.dtype, tensor.shape, file.fragments(tensor))
