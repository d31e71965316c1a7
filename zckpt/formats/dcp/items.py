"""The saved items of a torch.distributed.checkpoint directory by key, read on demand.

read.py reads every item and finds the model's and the optimizer's state among them. torch's own
loading asks for single keys, and this module does the same. `.metadata` lists the keys. An item's
file is opened when its value is needed, and only the needed boxes of a tensor are read.
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
    """The content of an item's file.

    In `value`, the unpickled content, objects and tensors are replaced by records of what the file
    says about them; no code is run. `entry` maps the record of a tensor to the place of its bytes.
    `records` are the byte ranges of all tensors, with their checksums.
    """

    value: Any
    entry: Callable[[Any], Entry]
    records: Sequence[Record]


class StoredBox(Struct, frozen=True):
    """A box of a tensor, saved as an item of its own.

    `value` of the opened item is the box's tensor.
    """

    sizes: tuple[int, ...]
    open: Callable[[], OpenedItem]


class StoredTensor(Struct, frozen=True):
    """The tensor that is saved under a key; its boxes are keyed by their offsets along every axis.

    `dtype` is torch's name of the element type, which zckpt may not support.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], StoredBox]

    @property
    def stored(self) -> int:
        """The number of elements in all boxes."""
        return sum(prod(box.sizes) for box in self.boxes.values())


class StoredValue(Struct, frozen=True):
    """The value that is saved under a key; `is_number` is true for a 0-d tensor."""

    open: Callable[[], OpenedItem]
    is_number: bool = False


class StoredItems(Struct, frozen=True):
    """All items of a checkpoint by key, in the order of `.metadata`.

    `paths` maps a key to its path in the program's state dict, if `.metadata` has it. `version` and
    `saving` (checkpoint_id, save_id, ...) describe the save itself; they come from the metadata in
    `files`.
    """

    root: str
    files: tuple[str, ...]
    items: dict[str, StoredTensor | StoredValue]
    paths: dict[str, TreePath]
    version: str | None
    saving: dict[str, Any]


def stored_items(path: str, tag: str | None) -> StoredItems:
    """The items of the directory at `path`; opens none of their files.

    Raises CorruptCheckpoint, IncompleteCheckpoint (no `.metadata`), UnsupportedCheckpoint
    (Megatron-Core, compressed or encrypted items).
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
            f"it is stored as an object of {getattr(tensor, 'name', type(tensor).__name__)}",
        )
    require_same(location, key, (tensor.dtype, tensor.shape), (dtype, box.sizes))
    entry = _entry(key, file, tensor)
    return OpenedItem(tensor, lambda _: entry, tuple(file.records.values()))


def _entry(key: str, file: TorchFile, tensor: Tensor) -> Entry:
    return Entry(key, "state", tensor.dtype, tensor.shape, file.fragments(tensor))
