"""Writes files of torch.save without their data: shells, whose holes are filled later.

A shell has the form that torch.save writes: a zip of STORED members, 64-byte aligned, whose
`data.pkl` names storages. Small tensors (steps) are written at once. For the others the CRC-32
fields stay zero until `state_checksums` fills them in. torch is not imported.

Turned down: torch.serialization.skip_data with FakeTensorMode. It writes such files too, but needs
torch, is young, and leaves wrong checksums.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from math import prod
from typing import Any

from ..core.checksum import crc_of_zeros
from ..core.dtypes import SIZES, STORAGES, TORCH_NAMES, encode
from ..core.fileio import write_all
from ..core.folder import Folder
from ..core.fragments import Extent
from ..core.inert import Foreign, Global, Scalar, TensorName, map_values
from ..core.layout import Shell
from ..core.manifest import Entry, Manifest
from ..core.streaming import together
from .pickling import Persistent, dumps
from .torchfile import Storage, Tensor
from .zipdirectory import read_directory

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
ALIGNMENT = 64


class Storages:
    """The storages of one file that is being written."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.known: dict[str, bytes] = {}

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor in a new storage, to be filled later."""
        key = str(len(self.lengths))
        numel = prod(shape)
        self.lengths[key] = numel * SIZES[dtype]
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Tensor(Storage(key, dtype, self.lengths[key]), dtype, 0, tuple(shape), strides)

    def scalar(self, value: Scalar) -> Tensor:
        """A tensor of one element, whose value is known."""
        tensor = self.tensor(value.dtype, value.shape)
        self.known[tensor.storage.key] = encode(value.dtype, value.value)
        return tensor


def thawed(value: Any, entries: Mapping[str, Entry], storages: Storages) -> Any:
    """`value` of a manifest's state, with tensors instead of their names and values."""
    if isinstance(value, Scalar):
        return storages.scalar(value)
    if isinstance(value, TensorName):
        entry = entries[f"{value.name}/state"]
        return storages.tensor(entry.dtype, entry.shape)
    return map_values(value, lambda item, _: thawed(item, entries, storages))


def shell(name: str, value: Any, storages: Storages) -> Shell:
    """The file `name` with `value`, whose tensors are in `storages`."""
    folder = os.path.basename(name).removesuffix(".pt")
    members: list[tuple[str, int, bytes | None]] = []

    def known(inside: str, data: bytes) -> None:
        members.append((f"{folder}/{inside}", len(data), data))

    known("data.pkl", dumps(value, _special))
    known(".format_version", b"1")
    known(".storage_alignment", str(ALIGNMENT).encode())
    known("byteorder", b"little")
    for key, length in storages.lengths.items():
        members.append((f"{folder}/data/{key}", length, storages.known.get(key)))
    known("version", b"3\n")
    return _zip(name, members)


def _special(value: Any) -> Any:
    """A tensor in the form in which torch pickles it; None for other types."""
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


def _zip(name: str, members: list[tuple[str, int, bytes | None]]) -> Shell:
    """STORED members at aligned offsets, then the directory in zip64 form, as torch writes it."""
    parts: list[tuple[int, bytearray]] = []
    directory = bytearray()
    header = 0
    for member, length, data in members:
        crc = zlib.crc32(data) if data is not None else 0
        inside = member.encode()
        wide = struct.pack("<HHQQ", 1, 16, length, length) if length >= 0xFFFFFFFF else b""
        size = min(length, 0xFFFFFFFF)
        start = header + 30 + len(inside) + len(wide) + 4
        padding = -start % ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # "FB", as torch pads
        head = struct.pack(
            "<IHHHHHIIIHH",
            *(0x04034B50, 20, 0x800, 0, 0, 0x21, crc, size, size, len(inside), len(extra)),
        )
        _append(parts, header, head + inside + extra + (data or b""))
        directory += _entry(inside, crc, length, header)
        header = start + padding + length
    begin = header  # of the directory
    end = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *(2 * [len(members)]), len(directory), begin
    )
    locator = struct.pack("<IIQI", 0x07064B50, 0, begin + len(directory), 1)
    last = struct.pack(
        "<IHHHHIIH",
        *(0x06054B50, 0, 0, *(2 * [min(len(members), 0xFFFF)])),
        *(len(directory), min(begin, 0xFFFFFFFF), 0),
    )
    tail = directory + end + locator + last
    _append(parts, begin, tail)
    return Shell(name, begin + len(tail), tuple((start, bytes(part)) for start, part in parts))


def _append(parts: list[tuple[int, bytearray]], offset: int, data: bytes | bytearray) -> None:
    """Adds bytes to a shell; they are one write with those before them if there is no hole."""
    if parts and parts[-1][0] + len(parts[-1][1]) == offset:
        parts[-1][1].extend(data)
    else:
        parts.append((offset, bytearray(data)))


def _entry(name: bytes, crc: int, length: int, offset: int) -> bytes:
    """One entry of the directory; values beyond 32 bits go to its zip64 field."""
    wide = b"".join(
        struct.pack("<Q", value) for value in (length, length, offset) if value >= 0xFFFFFFFF
    )
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    size, start = min(length, 0xFFFFFFFF), min(offset, 0xFFFFFFFF)
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII",
            *(0x02014B50, 20, 20, 0x800, 0, 0, 0x21, crc, size, size, len(name), len(extra)),
            *(0, 0, 0, 0, start),
        )
        + name
        + extra
    )


def seal_records(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every record of filled files into their zip directories."""
    by_file: dict[str, dict[int, int]] = {}
    for record in manifest.records:
        extent = record.extent
        crc = outcome.records.get(extent)
        if crc is None:  # no tensor was written there: the record is known, or it is padding
            crc = record.crc or crc_of_zeros(extent.length)
        by_file.setdefault(extent.file, {})[extent.offset] = crc
    # the headers were written past the page cache: each is read from the disk
    together([*by_file.items()], lambda item: seal_whole(root, *item))


def seal_whole(root: Folder, path: str, crcs: Mapping[int, int]) -> None:
    """Writes the CRC-32s of members into a file that is one zip, as `state_checksums` does."""
    with root.opened(path, os.O_RDWR) as file:
        state_checksums(file, Extent(path, 0, os.fstat(file).st_size), crcs)


def state_checksums(file: int, within: Extent, crcs: Mapping[int, int]) -> None:
    """Writes the CRC-32 of a zip's members into a filled file; `crcs` go by the data's offset."""
    for member in read_directory(file, within).values():
        crc = crcs.get(member.offset)
        if crc is not None:
            stated = memoryview(struct.pack("<I", crc))
            write_all(file, stated, member.header + 14)
            write_all(file, stated, member.entry + 16)
