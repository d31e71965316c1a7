"""Writes files of torch.save without the data of tensors: gaps are left, and filled later.

Such a file is called a shell. It has the form that torch.save writes: a zip of STORED members,
64-byte aligned, whose `data.pkl` names storages. Small tensors (steps) are written immediately. The
CRC-32 fields of all other tensors stay zero until `state_checksums` fills them in. torch is not
imported.

Turned down: torch.serialization.skip_data with FakeTensorMode. It writes such files too, but needs
torch, is young, and leaves wrong checksums.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.dtypes import SIZES, STORAGES, TORCH_NAMES, encode
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.inert import Foreign, Global, Scalar, TensorName, map_values
from ..core.checkpoint.manifest import Manifest
from ..core.passes.layout import Shell
from ..core.passes.streaming import carry_out_all
from ..core.storage.checksum import crc32, crc_of_zeros
from ..core.storage.fileio import write_all
from ..core.storage.folder import Folder
from ..core.storage.fragments import Extent, row_major
from .pickling import Persistent, dumps
from .torchfile import Storage, Tensor
from .zipdirectory import Directories, ZipMember, read_directory

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
ALIGNMENT = 64


class Storages(Struct, eq=False):
    """The storages of the tensors in one file that is being written.

    `lengths` maps the key of a storage to its size in bytes. `values_by_key` has the contents of
    storages that are written immediately.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    values_by_key: dict[str, bytes] = field(default_factory=dict)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Makes a contiguous tensor with a new storage, whose bytes are filled in later."""
        key = str(len(self.lengths))
        numel = prod(shape)
        self.lengths[key] = numel * SIZES[dtype]
        storage = Storage(key, dtype, self.lengths[key])
        return Tensor(storage, dtype, 0, tuple(shape), row_major(shape))

    def scalar(self, value: Scalar) -> Tensor:
        """Makes a tensor of one element with a new storage, whose bytes are written immediately."""
        tensor = self.tensor(value.dtype, value.shape)
        self.values_by_key[tensor.storage.key] = encode(value.dtype, value.value)
        return tensor


def thawed(value: Any, entries: Mapping[Key, Entry], storages: Storages) -> Any:
    """Copies a value of a manifest's state, with new tensors in place of the names of tensors.

    Each tensor gets a new storage in `storages`. Numbers of the class `Scalar` become tensors too.
    """
    if isinstance(value, Scalar):
        return storages.scalar(value)
    if isinstance(value, TensorName):
        entry = entries[value.name, "state"]
        return storages.tensor(entry.dtype, entry.shape)
    return map_values(value, lambda item, _: thawed(item, entries, storages))


def shell(name: str, value: Any, storages: Storages) -> Shell:
    """The file `name` of torch.save with `value`, without the data of the tensors in `storages`."""
    return Contents(value, storages).shell(name)


class Contents:
    """The contents of a file, or of several files that differ only in their names and tensors.

    Files whose names have the same length are laid out once.
    """

    def __init__(self, value: Any, storages: Storages) -> None:
        self._members: list[Member] = [
            _known("data.pkl", dumps(value, _special)),
            _known(".format_version", b"1"),
            _known(".storage_alignment", str(ALIGNMENT).encode()),
            _known("byteorder", b"little"),
            *(
                (f"data/{key}", length, storages.values_by_key.get(key))
                for key, length in storages.lengths.items()
            ),
            _known("version", b"3\n"),
        ]
        # by the length of the folder's name in the zip: torch.save names it after the file
        self._zips: dict[int, _Zip] = {}

    def shell(self, name: str) -> Shell:
        """The file `name` with these contents, without the data of its tensors."""
        folder = os.path.basename(name).removesuffix(".pt").encode()
        if len(folder) not in self._zips:
            self._zips[len(folder)] = _zip(len(folder), self._members)
        laid_out = self._zips[len(folder)]
        parts = ((start, folder.join(pieces)) for start, pieces in laid_out.parts)
        return Shell(name, laid_out.size, tuple(parts))


Member = tuple[str, int, bytes | None]
"""A member's name in the folder, its length, and its bytes if they are known."""


def _known(inside: str, data: bytes) -> Member:
    return inside, len(data), data


def _special(value: Any) -> Any:
    """Converts a `Tensor` to the call by which torch rebuilds it; None for other types."""
    if isinstance(value, Scalar):
        raise TypeError("a 0-d tensor needs a storage: see Storages.scalar")
    if isinstance(value, Tensor):
        ordered = Foreign(Global("collections.OrderedDict"))
        layout = (value.offset, value.shape, value.strides, False, ordered)
        storage = _storage(value)
        if value.dtype in STORAGE_CLASSES:
            return Foreign(Global("torch._utils._rebuild_tensor_v2"), (storage, *layout))
        dtype = Global(f"torch.{TORCH_NAMES[value.dtype]}")
        return Foreign(Global("torch._utils._rebuild_tensor_v3"), (storage, *layout, dtype))
    return None


def _storage(tensor: Tensor) -> Persistent:
    storage = tensor.storage
    typed = STORAGE_CLASSES.get(tensor.dtype)
    cls = Global(f"torch.{typed}" if typed else "torch.storage.UntypedStorage")
    numel = storage.length // SIZES[tensor.dtype] if typed else storage.length
    return Persistent(("storage", cls, storage.key, "cpu", numel))


# -- the zip


class _Zip(Struct, frozen=True):
    """A template for zips of `size` bytes: only the name of their folder differs, not its length.

    Each of the `parts` is an offset and the pieces of bytes that begin there; joined by the name of
    the folder, the pieces are the file's bytes. Between parts are gaps for tensor data.
    """

    size: int
    parts: list[tuple[int, list[bytes]]]


def _zip(folder: int, members: Sequence[Member]) -> _Zip:
    """Lays out STORED members at aligned offsets, then the directory in zip64 form, as torch does.

    `folder` is the length of the folder's name.
    """
    parts: list[tuple[int, list[bytearray]]] = [(0, [bytearray()])]
    directory = [bytearray()]
    header = stop = 0
    for member, length, data in members:
        crc = crc32(data) if data is not None else 0
        inside = f"/{member}".encode()
        wide = struct.pack("<HHQQ", 1, 16, length, length) if length >= 0xFFFFFFFF else b""
        size, name = min(length, 0xFFFFFFFF), folder + len(inside)
        start = header + 30 + name + len(wide) + 4
        padding = -start % ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # "FB": torch's padding
        head = struct.pack(
            "<IHHHHHIIIHH",
            *(0x04034B50, 20, 0x800, 0, 0, 0x21, crc, size, size, name, len(extra)),
        )
        _add(_part(parts, header, stop), head, inside + extra + (data or b""))
        _add(directory, *_entry(inside, name, crc, length, header))
        header, stop = start + padding + length, start + padding + len(data or b"")
    begin, count = header, len(members)
    entries = sum(map(len, directory)) + count * folder
    end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *(2 * [count]), entries, begin)
    locator = struct.pack("<IIQI", 0x07064B50, 0, begin + entries, 1)
    last = struct.pack(
        "<IHHHHIIH",
        *(0x06054B50, 0, 0, *(2 * [min(count, 0xFFFF)]), entries, min(begin, 0xFFFFFFFF), 0),
    )
    tail = end + locator + last
    _add(_part(parts, begin, stop), *directory)
    parts[-1][1][-1] += tail
    parts_as_bytes = [(start, [*map(bytes, pieces)]) for start, pieces in parts]
    return _Zip(begin + entries + len(tail), parts_as_bytes)


def _part(parts: list[tuple[int, list[bytearray]]], offset: int, stop: int) -> list[bytearray]:
    """Returns the pieces of the part (see `_Zip`) to which bytes at `offset` are to be appended.

    This is the last part, which ends at `stop`, or a new one if there is a gap before `offset`.
    """
    if stop < offset:
        parts.append((offset, [bytearray()]))
    return parts[-1][1]


def _add(pieces: list[bytearray], *added: bytes | bytearray) -> None:
    """Appends `added`; the name of the zip's folder will be inserted between its items."""
    pieces[-1] += added[0]
    pieces += map(bytearray, added[1:])


def _entry(inside: bytes, name: int, crc: int, length: int, offset: int) -> tuple[bytes, bytes]:
    """Builds one entry of the directory: the bytes before and after the name of the folder.

    `inside` is the member's name without the folder, and `name` the length of its full name. Values
    beyond 32 bits go to the zip64 field.
    """
    wide = b"".join(
        struct.pack("<Q", value) for value in (length, length, offset) if value >= 0xFFFFFFFF
    )
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    size, start = min(length, 0xFFFFFFFF), min(offset, 0xFFFFFFFF)
    head = struct.pack(
        "<IHHHHHHIIIHHHHHII",
        *(0x02014B50, 20, 20, 0x800, 0, 0, 0x21, crc, size, size, name, len(extra)),
        *(0, 0, 0, 0, start),
    )
    return head, inside + extra


def seal_records(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32s of filled records (zip members) into their files' zip directories.

    `manifest` is that of the target, whose files lie in `root`; `outcome` is the `CopyOutcome` of
    the copy, which has computed the CRC-32s.
    """
    by_file: dict[str, dict[int, int]] = {}
    for record in manifest.files.records:
        extent = record.extent
        crc = outcome.records.get(extent)
        # no tensor was written there: the record's bytes are known, or it is padding
        if crc is None:
            crc = record.crc or crc_of_zeros(extent.length)
        by_file.setdefault(extent.file, {})[extent.offset] = crc
    # the headers were written past the page cache, so each is read from the disk
    directories: Directories = {}
    carry_out_all([*by_file.items()], lambda item: seal_whole(root, *item, directories))


def seal_whole(
    root: Folder, path: str, crcs: Mapping[int, int], directories: Directories | None = None
) -> None:
    """Writes the CRC-32s of members into a file that is one zip from its first byte to its last.

    `path` is a file in the folder `root`. `crcs` maps the offset of a member's data to its CRC-32.
    `directories` is a cache for files of several ranks (see `read_directory`).
    """
    with root.opened(path, os.O_RDWR) as file:
        state_checksums(file, Extent(path, 0, os.fstat(file).st_size), crcs, directories)


def checksums_of(member: ZipMember) -> tuple[int, int]:
    """The offsets of a member's CRC-32 in the file: in its local header, and in the directory."""
    return member.header + 14, member.entry + 16


def state_checksums(
    file: int, within: Extent, crcs: Mapping[int, int], directories: Directories | None = None
) -> None:
    """Writes the CRC-32s of a zip's members into a filled file.

    `crcs` maps the offset of a member's data to its CRC-32. `directories` keeps parsed zip
    directories, because other ranks' files often have equal ones (see `read_directory`).
    """
    for member in read_directory(file, within, directories).values():
        crc = crcs.get(member.offset)
        if crc is not None:
            for place in checksums_of(member):
                write_all(file, memoryview(struct.pack("<I", crc)), place)
