"""Do the parts of `.metadata` agree with each other?

It has no checksum, and it says most things twice: the keys of items and the paths that lead to
them, the boxes of tensors and their locations in files. One changed bit in a key would otherwise
turn a moment of the optimizer into a value that nobody asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CorruptCheckpoint, InconsistentCheckpoint, listed

if TYPE_CHECKING:
    from .dcpfile import ItemLocation, ItemTable, TensorItem


def need_agreement(table: ItemTable, name: str) -> None:
    """Raises an error about the file `name` if parts of its table contradict each other.

    CorruptCheckpoint: items without a path, locations of no item, boxes that overlap or lie outside
    of their tensor. IncompleteCheckpoint: an item without a location. InconsistentCheckpoint: items
    that share bytes of a file.
    """
    if table.paths:  # a path without an item is no error: torch before 2.4 wrote some
        pathless = [key for key in table.items if key not in table.paths]
        if pathless:
            raise CorruptCheckpoint(f"{name}: no path leads to {_shown(pathless)}")
    places: set[tuple[str, tuple[int, ...] | None]] = set()
    for key, item in table.items.items():
        if item is None:
            table.location(key)
            places.add((key, None))
        else:
            places |= {(key, offsets) for offsets in _boxes(table, key, item, name)}
    if len(places) < len(table.locations):
        strangers = [key for key, offsets in table.locations if (key, offsets) not in places]
        raise CorruptCheckpoint(
            f"{name}: it names files of {_shown(list(dict.fromkeys(strangers)))}, "
            "which no item describes"
        )
    _need_separate(table, name)


def _boxes(table: ItemTable, key: str, item: TensorItem, name: str) -> set[tuple[int, ...]]:
    """The offsets of the boxes of a tensor that have a location."""
    offsets = set()
    for box in item.boxes:
        if len(box.offsets) != len(item.shape) or len(box.sizes) != len(item.shape):
            raise CorruptCheckpoint(
                f"{name}: a piece of {_shown([key])} has another number of axes than its shape "
                f"{list(item.shape)}"
            )
        if box.is_empty:  # several ranks may have none of its rows
            if (key, box.offsets) in table.locations:
                offsets.add(box.offsets)
            continue
        table.location(key, box)
        ends = map(sum, zip(box.offsets, box.sizes, strict=True))
        if any(end > size for end, size in zip(ends, item.shape, strict=True)):
            raise InconsistentCheckpoint(
                f"{name}: a piece of {_shown([key])} of shape {list(box.sizes)} at "
                f"{list(box.offsets)} lies outside of its shape {list(item.shape)}"
            )
        offsets.add(box.offsets)
    return offsets


def _shown(keys: list[str]) -> str:
    """The first keys, in one line."""
    return listed([key if key.isprintable() else repr(key) for key in keys], 4)


def _need_separate(table: ItemTable, name: str) -> None:
    """Raises InconsistentCheckpoint if items share bytes, but for tensors of one safetensors file.

    All of these state where the file begins (torch 2.13, filesystem.py).
    """
    by_file: dict[str, list[ItemLocation]] = {}
    for location in table.every_location():
        by_file.setdefault(location.file, []).append(location)
    for file, locations in by_file.items():
        locations.sort(key=lambda location: location.offset)
        stop = begin = 0
        for location in locations:
            if location.offset < stop and location.offset != begin:
                raise InconsistentCheckpoint(
                    f"{name}: two items share byte {location.offset} of {file}"
                )
            begin = location.offset
            stop = max(stop, begin + location.length)
