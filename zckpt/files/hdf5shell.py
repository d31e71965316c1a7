"""Writes HDF5 files without their tensors' data, which is filled in afterwards.

h5py makes a file of groups, headers and numbers, in which no tensor has bytes yet. Each tensor then
gets a byte range at the end of this file, and its header gets the address of the range. So neither
memory nor disk space grows with the size of the tensors.

Turned down: writing the format by hand, as torchshell.py does for zips. HDF5's B-trees and heaps
are not worth a second implementation. Turned down too: h5py's alignment option, with which HDF5 2.0
examines every gap in the file for each new object.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from msgspec import Struct

from ..core.checkpoint.dtypes import SIZES
from ..core.passes.layout import Shell
from ..core.storage.fileio import align
from .hdf5file import DTYPES, import_h5py

NUMPY = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes; a copy's chunks never cut an element
# HDF5 file format specification 3.0, II.A and IV.A.2.i; files of libver "earliest" lack checksums
ADDRESS = struct.Struct("<Q")
END_OF_FILE = 40  # the offset of the end of file in the superblock of version 0
# the layout message, version 3, of a contiguous dataset; address and length follow
LAYOUT = b"\x03\x01"
NOWHERE = b"\xff" * ADDRESS.size


class EmptyDataset(Struct, frozen=True):
    """A tensor for an HDF5 file, whose elements are filled in later."""

    dtype: str
    shape: tuple[int, ...]


def shell(name: str, tree: Mapping[str, Any]) -> Shell:
    """Makes the file `name` without the data of its tensors.

    Dictionaries in `tree` become groups, other values become datasets.
    """
    h5py = import_h5py()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "shell")
        with h5py.File(path, "w", libver="earliest", locking=False) as file:
            headers = dict(_fill(h5py, file, tree))
        with open(path, "rb") as opened:
            data = bytearray(opened.read())
    end = len(data)
    for header, length in headers.items():
        start = align(end, ALIGNMENT)
        end = start + length
        _place(data, header, length, start)
    ADDRESS.pack_into(data, END_OF_FILE, end)
    return Shell(name, end, ((0, bytes(data)),))


def _fill(h5py: Any, group: Any, tree: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Writes `tree` into `group`; yields each tensor's header address and its size in bytes."""
    import numpy as np  # h5py has imported it

    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _fill(h5py, group.create_group(key), value)
        elif isinstance(value, EmptyDataset):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            element = h5py.h5t.py_create(np.dtype(NUMPY[value.dtype]), logical=True)
            scalar = h5py.h5s.create(h5py.h5s.SCALAR)
            space = h5py.h5s.create_simple(value.shape) if value.shape else scalar
            dataset = h5py.h5d.create(group.id, key.encode(), element, space, properties)
            if length := prod(value.shape) * SIZES[value.dtype]:
                yield h5py.h5o.get_info(dataset).addr, length
        else:
            group[key] = value


def _place(data: bytearray, header: int, length: int, start: int) -> None:
    """Writes the offset of a tensor's data, `start`, into the tensor's HDF5 header.

    `data` is the file without tensors' data, `header` the header's offset in the file, and `length`
    the size of the tensor's data in bytes.
    """
    size = int.from_bytes(data[header + 8 : header + 12], "little")
    message = LAYOUT + NOWHERE + ADDRESS.pack(length)
    at = data.find(message, header, header + 16 + size)
    assert at >= 0, "a dataset has no layout message"
    ADDRESS.pack_into(data, at + len(LAYOUT), start)
