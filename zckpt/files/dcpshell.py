"""What does zckpt write as a directory of torch.distributed.checkpoint: item files, `.metadata`.

An item file is a sequence of aligned items. `.metadata` is the object that torch pickles.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from msgspec import Struct

from ..core.fileio import align
from ..core.folder import Folder
from ..core.fragments import Extent
from ..core.grouping import by_key, portions
from ..core.inert import Foreign, Global, Size
from ..core.layout import Shell
from ..core.streaming import carry_out_all
from .dcpfile import VERSION, ItemBox, ItemKey, ItemLocation, Items, TensorItem, read_table
from .torchshell import ALIGNMENT, Storages, shell, state_checksums


class ItemShell(Struct, frozen=True):
    """What is saved under a key: one box of a tensor, or a value without a box; and its shell."""

    key: str
    box: ItemBox | None
    shell: Shell


class SavedItem(Struct, frozen=True):
    """An item and where it lies; the file is relative to the folder of `.metadata`."""

    item: ItemShell
    location: ItemLocation

    @property
    def key(self) -> ItemKey:
        """What `.metadata` calls it."""
        box = self.item.box
        return self.item.key, None if box is None else box.offsets


@lru_cache(1 << 12)
def tensor_shell(dtype: str, sizes: tuple[int, ...]) -> Shell:
    """The shell of a tensor; equal tensors have the same one."""
    storages = Storages()
    return shell("archive", storages.tensor(dtype, sizes), storages)


def in_files(items: Iterable[ItemShell], limit: int) -> Iterator[list[ItemShell]]:
    """The items of every file; a file of several items has `limit` bytes at most."""
    return portions(items, lambda item: align(item.shell.size, ALIGNMENT), limit)


def item_file(name: str, items: Sequence[ItemShell]) -> tuple[Shell, list[SavedItem]]:
    """The file `name` with these items, and where each of them lies."""
    size, parts, saved = 0, [], []
    for item in items:
        start = align(size, ALIGNMENT)
        parts += [(start + offset, data) for offset, data in item.shell.parts]
        size = start + item.shell.size
        saved.append(SavedItem(item, ItemLocation(name, start, item.shell.size)))
    return Shell(name, size, tuple(parts)), saved


def seal_items(root: Folder, folder: str, crcs: Mapping[str, Mapping[int, int]]) -> None:
    """Writes the CRC-32 of every record into the zip directory of its item; `root` has `folder`.

    `crcs` go by the path of a file, then by the offset of the record's data.
    """
    locations = by_key((item.file, item) for item in read_table(folder).locations.values())
    for path, items in locations.items():
        with root.opened(path, os.O_RDWR) as file:
            extents = [Extent(path, item.offset, item.length) for item in items]
            # what was written past the page cache is read from the disk
            carry_out_all(extents, partial(state_checksums, file, crcs=crcs.get(path, {})))


def crcs_of(outcome: Any) -> dict[str, dict[int, int]]:
    """The CRC-32s of the records that a copy has filled, by file and offset."""
    crcs: dict[str, dict[int, int]] = {}
    for extent, crc in outcome.records.items():
        crcs.setdefault(extent.file, {})[extent.offset] = crc
    return crcs


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
    return Foreign.instance(f"torch.distributed.checkpoint.{name}", **state)
