"""How many updates has the optimizer of a directory made? Only the items of its steps are read.

The checkpoints of one run say the same of their items: `.metadata` differs in the path and the
random id of the save alone, which stand behind the items (torch 2.1 to 2.13). So it is parsed once
for all of them, and only compared after that. Files of a step are equal, byte by byte, where the
number is: each is parsed once.
"""

from __future__ import annotations

import os
import struct
from functools import lru_cache
from hashlib import sha256

from ...core import sources
from ...core.fragments import Extent
from ...core.grouping import by_key
from ...core.inert import Scalar
from ...files.dcpfile import METADATA, ItemTable, read_table
from ...files.torchfile import Parsed, TorchFile
from .files import locate

GROUPS, STATE, STEP = "param_groups", "state.", ".step"
BEHIND_ITEMS = b"storage_meta"  # the first field of `.metadata` that describes no item
FRAME = b"\x95"
LAYOUTS = 16  # of runs and numbers of ranks, as a folder has them

Steps = dict[str, list[tuple[int, int]]]
"""By the name of a file, the offsets and lengths of the items that are steps of parameters."""


def updates(path: str) -> float | None:
    """The largest step of a parameter; None if no item alone states one.

    Raises as `read`, but for what other items have.
    """
    stated: list[float] = []
    for folder in locate(path)[1]:
        file = os.path.join(folder, METADATA)
        for name, places in _steps(_Metadata(file)).items() if sources.is_file(file) else ():
            stated += _numbers(os.path.join(folder, name), places)
    return max(stated, default=None)


class _Metadata:
    """What one `.metadata` says of items; equal to any other that says the same."""

    def __init__(self, path: str) -> None:
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
    """A pickle without the lengths of its frames, of which the last changes with the path's."""
    parts, start = [text[:2]], 2
    while text[start : start + 1] == FRAME and start + 9 <= len(text):
        stop = start + 9 + int(struct.unpack_from("<Q", text, start + 1)[0])
        parts.append(text[start + 9 : stop])
        start = stop
    return b"".join((*parts, text[start:]))


@lru_cache(LAYOUTS)
def _steps(metadata: _Metadata) -> Steps:
    table = read_table(metadata.folder)
    optimizers = {key.partition(GROUPS)[0] for key in table.items if GROUPS in key}
    states = tuple(optimizer + STATE for optimizer in optimizers)
    keys = [key for key in table.items if key.startswith(states) and key.endswith(STEP)]
    return _by_file(table, keys)


def _by_file(table: ItemTable, keys: list[str]) -> Steps:
    """Where these items lie; of a tensor in boxes, the boxes."""
    locations = [
        table.location(key, box)
        for key in keys
        for box in (getattr(table.items[key], "boxes", (None,)))
    ]
    if any(location.shared for location in locations):  # tensors of a safetensors file
        return {}
    return by_key(
        (os.path.relpath(each.file, table.folder), (each.offset, each.length))
        for each in sorted(locations, key=lambda each: each.offset)
    )


def _numbers(path: str, places: list[tuple[int, int]]) -> list[float]:
    """The numbers that items of a file have, each of which is a file of torch.save."""
    known: dict[bytes, float] = {}
    parsed = Parsed()
    with sources.opened(path) as opened:
        for offset, length in places:
            text = sources.pread(opened.fileno(), length, offset)
            if text not in known:
                file = TorchFile(path, parsed, Extent(path, offset, length), opened.fileno())
                value = file.number(file.value)
                number = value.value if isinstance(value, Scalar) else value
                if type(number) in (int, float):
                    known[text] = float(number)
    return [*known.values()]
