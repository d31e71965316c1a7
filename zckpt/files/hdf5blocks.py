"""Checks an HDF5 file without checksums for contradictions between its parts.

Files of the old kind, which h5py writes by default, have addresses in superblock, headers, B-trees
and heaps (HDF5 file format specification 3.0, II.A, III.A to III.E, IV.A). A flipped bit in an
address can lead to other bytes, or empty a group, and the library reports nothing. Three rules
reveal such damage:

* A group has exactly the names in its heap. A deleted link leaves a free block in the heap; if its
  name has less than 16 bytes, it leaves the name, which looks like damage. Engines delete no links.
* No two blocks share bytes.
* Bytes beside a dataset that belong to no block are zero. They are not zero if a deleted dataset
  lay there, or a dataset whose address has changed.

Objects of the new kind have checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from msgspec import Struct

from ..core.storage import sources
from ..core.storage.fragments import Extent
from ..errors import CorruptCheckpoint

SUPERBLOCK = 96  # bytes, with 8 for an address and 8 for a length
CONTINUATION, SYMBOL_TABLE = 0x10, 0x11  # types of messages in a header
MAX_HEADER = 1 << 20  # bytes; a message has at most 65,535
MAX_HEAP = 64 << 20  # bytes; names of a million links
MAX_GAPS = 64 << 20  # the most bytes beside datasets that are read
END_OF_LIST = 1


class FileBlock(Struct, frozen=True):
    """Bytes [start, stop) of a file, and the object that owns them."""

    start: int
    stop: int
    owner: str
    is_data: bool = False


class Blocks(Struct, eq=False, dict=True):
    """Collects the blocks of an HDF5 file of the old kind, and checks that they share no bytes.

    A block is a byte range with one owner, such as a header or a dataset's data. The old kind has
    superblock version 0, h5py's default, and no checksums. In newer files, groups and datasets are
    ignored. Methods raise CorruptCheckpoint and OSError.
    """

    path: str
    file: int
    size: int

    def __post_init__(self) -> None:
        head = sources.pread(self.file, SUPERBLOCK, 0)
        self.is_old = len(head) == SUPERBLOCK and head[8] == 0 and head[13:15] == b"\x08\x08"
        leaf, internal = struct.unpack_from("<HH", head, 16) if self.is_old else (0, 0)
        self.leaf_size = 8 + 2 * leaf * 40
        self.node_size = 24 + (2 * internal + 1) * 8 + 2 * internal * 8
        self.blocks = {FileBlock(0, SUPERBLOCK, "the superblock")}

    def add_dataset(self, name: str, header: int, extent: Extent) -> None:
        """Adds a dataset, given the address of its object header and its data."""
        if self.is_old:
            for _ in self._messages(header, name):
                pass
            self._add(extent.offset, extent.length, name, is_data=True)

    def add_texts(self, start: int, stop: int) -> None:
        """Adds the block of a global heap, which contains texts."""
        self._add(start, stop - start, "texts")

    def add_group(self, name: str, header: int, names: set[bytes]) -> None:
        """Adds a group, and compares the names of its links with those in its heap."""
        if not self.is_old:
            return
        name = name or "/"
        for kind, message in self._messages(header, name):
            if kind == SYMBOL_TABLE:
                tree, heap = struct.unpack_from("<QQ", message)
                self._add_tree(tree, name)
                self._check_names(heap, name, names)

    def require_apart(self) -> None:
        """Raises CorruptCheckpoint if blocks share bytes."""
        for before, block in pairwise(self._in_order()):
            if block.start < before.stop:
                raise CorruptCheckpoint(
                    "file-damaged",
                    f"{self.path} is damaged: {before.owner} and {block.owner} share bytes",
                    file=self.path,
                )

    def orphans(self) -> list[Extent]:
        """The byte ranges next to datasets' data that are not zero, and that no block covers.

        Empty for a file of the new kind. At most `MAX_GAPS` bytes between blocks are read.
        """
        orphans, left = [], MAX_GAPS
        before = FileBlock(0, 0, "")
        last = FileBlock(self.size, self.size, "")
        for block in [*self._in_order(), last] if self.is_old else ():
            length = block.start - before.stop
            if length and (before.is_data or block.is_data) and left > 0:
                data = sources.pread(self.file, min(length, left), before.stop)
                left -= length
                if any(data):
                    orphans.append(Extent(self.path, before.stop, length))
            before = block
        return orphans

    def _in_order(self) -> list[FileBlock]:
        return sorted(self.blocks, key=attrgetter("start", "stop", "owner"))

    def _add(self, start: int, length: int, owner: str, *, is_data: bool = False) -> None:
        if length:
            self.blocks.add(FileBlock(start, start + length, owner, is_data))

    def _messages(self, address: int, name: str) -> Iterator[tuple[int, bytes]]:
        """Yields the messages of an object header: the type and the bytes of each."""
        head = self._read(16, address, name)
        if head[:1] != b"\1":
            self.is_old = False
            return
        size = struct.unpack_from("<I", head, 8)[0]
        self._add(address, 16 + size, name)
        waiting = [(address + 16, size)]
        left = MAX_HEADER
        while waiting:
            start, size = waiting.pop()
            left -= size
            data, at = self._read(size, start, name) if left >= 0 else b"", 0
            if left < 0:
                raise self._damaged(f"the header of {name} has more than {MAX_HEADER:,} bytes")
            while at + 8 <= size:
                kind, stop = struct.unpack_from("<HH", data, at)
                at, stop = at + 8, at + 8 + stop
                message = data[at:stop]
                if kind == CONTINUATION and len(message) >= 16:
                    start, length = struct.unpack_from("<QQ", message)
                    self._add(start, length, name)
                    waiting.append((start, length))
                elif kind != SYMBOL_TABLE or len(message) >= 16:
                    yield kind, message
                at = stop

    def _add_tree(self, root: int, name: str) -> None:
        """Adds the blocks that list the links of the HDF5 group `name`.

        They are the B-tree with its root at the address `root`, and its leaves (symbol nodes).
        """
        waiting, nodes = [root], {root}
        while waiting:
            node = waiting.pop()
            data = self._read(self.node_size, node, name)
            if data[:4] != b"TREE":
                raise self._damaged(f"{name} has no B-tree")
            self._add(node, self.node_size, name)
            level, count = struct.unpack_from("<BH", data, 5)
            for number in range(count):
                if 40 + 16 * number > len(data):
                    raise self._damaged(f"a B-tree of {name} has too many children: {count}")
                child = struct.unpack_from("<Q", data, 32 + 16 * number)[0]
                if child in nodes:
                    raise self._damaged(f"a B-tree of {name} lists a child twice")
                nodes.add(child)
                if level:
                    waiting.append(child)
                else:
                    self._add(child, self.leaf_size, name)

    def _check_names(self, heap: int, group: str, names: set[bytes]) -> None:
        head = self._read(32, heap, group)
        if head[:4] != b"HEAP":
            raise self._damaged(f"{group} has no heap")
        size, free, address = struct.unpack_from("<8xQQQ", head)
        self._add(heap, 32, group)
        self._add(address, size, group)
        if size > MAX_HEAP:
            raise self._damaged(
                f"the heap with the names of {group} has {size:,} bytes, which is too large"
            )
        listed = _names(self._read(size, address, group), free)
        if listed != names:
            name = min(listed ^ names).decode("utf-8", "backslashreplace")
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.path} is a damaged HDF5 file: the links of its group {group} do not match "
                f"the names in its heap: see {name!r}",
                hint="use another copy of this file; if links were deleted from it on purpose, "
                "rewrite it with `h5repack`",
                file=self.path,
            )

    def _read(self, length: int, address: int, name: str) -> bytes:
        if address + length > self.size:
            raise self._damaged(f"it ends inside {name}")
        return sources.pread(self.file, length, address)

    def _damaged(self, why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            "file-damaged", f"{self.path} is a damaged HDF5 file: {why}", file=self.path
        )


def _names(data: bytes, free: int) -> set[bytes]:
    """The names of an HDF5 group's links, which its heap stores in the bytes `data`.

    `free` is the offset of the heap's first free block.
    """
    blocks: dict[int, int] = {}
    while free != END_OF_LIST and free + 16 <= len(data) and free not in blocks:
        following, blocks[free] = struct.unpack_from("<QQ", data, free)
        free = following
    names, at = set(), 8  # after the empty name
    while at < len(data):
        if at in blocks and blocks[at] > 0:
            at += blocks[at]
            continue
        end = data.find(b"\0", at)
        names.add(data[at : end if end >= 0 else len(data)])
        at = -(-(end + 1) // 8) * 8 if end >= 0 else len(data)
    return names
