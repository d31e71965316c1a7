"""Write HDF5 files without their tensors: shells, whose tensors are filled in afterwards.

h5py makes the file and reserves space for each tensor without writing there, so the file is sparse.
The bytes outside the tensors (groups, headers, numbers) are the parts of the shell. Neither memory
nor disk space grows with the size of the tensors.

Turned down: writing the format by hand, as torchshell.py does for zips. HDF5's B-trees and heaps
are not worth a second implementation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from math import prod
from typing import Any

from msgspec import Struct

from ..core.dtypes import SIZES
from ..core.layout import Shell
from .hdf5file import DTYPES, import_h5py

NUMPY = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes; a copy's chunks never cut an element


class EmptyDataset(Struct, frozen=True):
    """A tensor whose elements are filled in later."""

    dtype: str
    shape: tuple[int, ...]


def shell(name: str, tree: Mapping[str, Any]) -> Shell:
    """The file `name`: dictionaries in `tree` become groups, other values become datasets."""
    h5py = import_h5py()
    holes: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "shell")
        options = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
        with h5py.File(path, "w", libver="earliest", locking=False, **options) as file:
            _fill(h5py, file, tree, holes)
        size = os.path.getsize(path)
        return Shell(name, size, tuple(_around(path, size, sorted(holes))))


def _fill(h5py: Any, group: Any, tree: Mapping[str, Any], holes: list[tuple[int, int]]) -> None:
    """Writes `tree` into `group`; appends the offset and length of every empty dataset."""
    import numpy as np  # h5py has imported it

    for key, value in tree.items():
        if isinstance(value, Mapping):
            _fill(h5py, group.create_group(key), value, holes)
        elif isinstance(value, EmptyDataset):
            # reserve the space now, and write nothing into it, not even zeros
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            element = h5py.h5t.py_create(np.dtype(NUMPY[value.dtype]), logical=True)
            scalar = h5py.h5s.create(h5py.h5s.SCALAR)
            space = h5py.h5s.create_simple(value.shape) if value.shape else scalar
            dataset = h5py.h5d.create(group.id, key.encode(), element, space, properties)
            length = prod(value.shape) * SIZES[value.dtype]
            if length:
                holes.append((dataset.get_offset(), length))
        else:
            group[key] = value


def _around(path: str, size: int, holes: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """The bytes outside the holes, each run with its offset."""
    parts = []
    with open(path, "rb") as file:
        position = 0
        for offset, length in [*holes, (size, 0)]:
            if offset > position:
                file.seek(position)
                parts.append((position, file.read(offset - position)))
            position = offset + length
    return parts
