"""Reads a few numbers of a torch.distributed.checkpoint folder, such as the optimizer's steps.

zckpt may sort the checkpoints of a run by these steps, and then reads many folders:

    .metadata    [ frames | items, paths, locations | path and random id of the save, version ]
                            the same in all folders

Because the middle part is the same, `.metadata` is parsed only for the first folder. The middle
parts of the other folders are compared with it (torch 2.1 to 2.13). Items with equal numbers are
equal files, byte by byte, and each different file is parsed once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from ..core.checkpoint.inert import Scalar
from ..core.grouping import by_key
from ..core.storage import sources
from ..core.storage.fragments import Extent
from .dcpfile import most_metadata, read_table
from .dcptable import METADATA
from .torchfile import Parsed, TorchFile

BEHIND_ITEMS = b"storage_meta"  # the first field of `.metadata` that describes no item
FRAME = b"\x95"
LAYOUTS = 16  # remembered layouts; a folder has some for several runs and numbers of ranks

Choice = Callable[[Collection[str]], Sequence[str]]
"""A function that selects the wanted keys from all keys of a `.metadata`."""
Places = dict[str, list[tuple[int, int]]]
"""Maps the name of a file to the offsets and lengths of items."""


def numbers_in(folder: str, choice: Choice) -> list[float]:
    """Reads the numbers that some items of a folder hold, such as the steps of parameters.

    `choice` gets all keys in `.metadata`, and returns the keys of these items. Items of one file
    with equal bytes give one number. The result is empty without a `.metadata` that fits in memory,
    or if items share a safetensors file. Raises as `read_table` and `TorchFile`, and OSError.
    """
    path = os.path.join(folder, METADATA)
    if not sources.is_file(path) or sources.size(path) > most_metadata():
        return []
    places = _places(_Metadata(path), choice).items()
    return [n for name, own in places for n in _numbers(os.path.join(folder, name), own)]


class _Metadata:
    """A `.metadata` file; two such files compare as equal if they state the same about items."""

    def __init__(self, path: str) -> None:
        from hashlib import sha256

        self.folder = os.path.dirname(path)
        with sources.opened(path) as file:
            text = _without_frames(file.read())
        place = text.rfind(BEHIND_ITEMS)
        self.digest = sha256(text if place < 0 else text[:place]).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Metadata) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _without_frames(text: bytes) -> bytes:
    """Removes the lengths of a pickle's frames from its bytes.

    The last frame contains the path of the save, so its length depends on this path.
    """
    parts, start = [text[:2]], 2
    while text[start : start + 1] == FRAME and start + 9 <= len(text):
        stop = start + 9 + int(struct.unpack_from("<Q", text, start + 1)[0])
        parts.append(text[start + 9 : stop])
        start = stop
    return b"".join((*parts, text[start:]))


@lru_cache(LAYOUTS)
def _places(metadata: _Metadata, choice: Choice) -> Places:
    """The locations of the chosen items; empty if an item is a tensor of a safetensors file."""
    table = read_table(metadata.folder)
    locations = [
        table.location(key, box)
        for key in choice(table.items)
        for item in (table.items[key],)
        for box in ((None,) if item is None else item.boxes)
        if box is None or not box.is_empty
    ]
    if any(location.shared for location in locations):
        return {}
    return by_key(
        (os.path.relpath(each.file, table.folder), (each.offset, each.length))
        for each in sorted(locations, key=lambda each: each.offset)
    )


def _numbers(path: str, places: Sequence[tuple[int, int]]) -> list[float]:
    numbers_by_text: dict[bytes, float] = {}
    parsed = Parsed()
    with sources.opened(path) as opened:
        for offset, length in places:
            text = sources.pread(opened.fileno(), length, offset)
            if text not in numbers_by_text:
                file = TorchFile(path, parsed, Extent(path, offset, length), opened.fileno())
                value = file.number(file.value)
                number = value.value if isinstance(value, Scalar) else value
                if type(number) in (int, float):
                    numbers_by_text[text] = float(number)
    return [*numbers_by_text.values()]
