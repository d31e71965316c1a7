"""Does a group of an HDF5 file have every name that its heap lists?

A group of the old kind has a B-tree of links and a local heap with their names (HDF5 file format
specification 3.0, III.A, III.D and IV.A.2.r). None of it has a checksum: a flipped bit in the
B-tree's count empties the group, and the library reports nothing. A link that was deleted leaves a
free block in the heap, or its name if that has less than 16 bytes: which looks like damage. Engines
delete no links. Groups of the new kind have checksums.
"""

from __future__ import annotations

import struct

from ..core import sources
from ..errors import CorruptCheckpoint

SYMBOL_TABLE = 0x11  # the type of the message that has the addresses of B-tree and heap
MAX_HEAP = 64 << 20  # bytes; names of a million links
END_OF_LIST = 1


def check_names(path: str, file: int, address: int, group: str, names: set[bytes]) -> None:
    """Compares the names of a group's links with those of its heap; `address` is its header's.

    Raises CorruptCheckpoint, OSError.
    """
    try:
        heap = _heap_of(file, address)
        listed = None if heap is None else _names(file, heap)
    except struct.error:
        raise CorruptCheckpoint(
            f"{path} is a damaged HDF5 file: it ends inside a group of names"
        ) from None
    if listed is not None and listed != names:
        name = min(listed ^ names).decode("utf-8", "backslashreplace")
        raise CorruptCheckpoint(
            f"{path} is a damaged HDF5 file: the links of its group {group or '/'} are not those "
            f"that its heap names: see {name!r}",
            hint="use another copy of this file; if links were deleted from it on purpose, rewrite "
            "it with `h5repack`",
        )


def _heap_of(file: int, address: int) -> int | None:
    """The address of a group's local heap; None if the group is of the new kind."""
    head = sources.pread(file, 16, address)
    if head[:1] != b"\1":
        return None
    _, _, count, _, size = struct.unpack_from("<BBHII", head)
    messages, at = sources.pread(file, size, address + 16), 0
    for _ in range(count):
        if at + 8 > len(messages):  # the rest is in a continuation block
            return None
        kind, length = struct.unpack_from("<HH", messages, at)
        if kind == SYMBOL_TABLE:
            heap: int = struct.unpack_from("<8xQ", messages, at + 8)[0]
            return heap
        at += 8 + length
    return None


def _names(file: int, heap: int) -> set[bytes] | None:
    """The names in a local heap; None if it is none."""
    head = sources.pread(file, 32, heap) if heap < 1 << 62 else b""
    if head[:4] != b"HEAP":
        return None
    size, free, address = struct.unpack_from("<8xQQQ", head)
    if size > MAX_HEAP or address >= 1 << 62:
        return None
    data = sources.pread(file, size, address)
    blocks: dict[int, int] = {}
    while free != END_OF_LIST and free < size and free not in blocks:
        following, blocks[free] = struct.unpack_from("<QQ", data, free)
        free = following
    names, at = set(), 8  # behind the empty name
    while at < len(data):
        if at in blocks and blocks[at] > 0:
            at += blocks[at]
            continue
        end = data.find(b"\0", at)
        names.add(data[at : end if end >= 0 else len(data)])
        at = -(-(end + 1) // 8) * 8 if end >= 0 else len(data)
    return names
