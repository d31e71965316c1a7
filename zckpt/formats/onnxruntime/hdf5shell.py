"""HDF5 files without their tensors: shells, whose holes are filled afterwards.

h5py builds the file with space reserved and nothing written there, so that it is sparse; what lies
outside the tensors (groups, headers, numbers) are the shell's parts. Nothing here takes memory or
disk in proportion to the tensors.

Turned down: writing the format by hand, as torchshell.py does for zips; HDF5's B-trees and heaps
are not worth a second implementation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.dtypes import SIZES
from ...core.staging import Shell
from .hdf5 import DTYPES, import_h5py

NUMPY = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes; a copy's chunks never cut an element


@dataclass(frozen=True, slots=True)
class Hole:
    """A tensor that is to be filled later."""

    dtype: str
    shape: tuple[int, ...]


def shell(name: str, tree: Mapping[str, Any]) -> Shell:
    """The file `name` with groups, holes and values as `tree` has them, as ONNX Runtime saves."""
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
    import numpy as np  # h5py has imported it

    for key, value in tree.items():
        if isinstance(value, Mapping):
            _fill(h5py, group.create_group(key), value, holes)
        elif isinstance(value, Hole):
            # space now, and neither zeros nor anything else written into it
            created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            kind = h5py.h5t.py_create(np.dtype(NUMPY[value.dtype]), logical=True)
            scalar = h5py.h5s.create(h5py.h5s.SCALAR)
            space = h5py.h5s.create_simple(value.shape) if value.shape else scalar
            made = h5py.h5d.create(group.id, key.encode(), kind, space, created)
            length = prod(value.shape) * SIZES[value.dtype]
            if length:
                holes.append((made.get_offset(), length))
        else:
            group[key] = value


def _around(path: str, size: int, holes: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """The bytes outside the holes."""
    parts = []
    with open(path, "rb") as file:
        here = 0
        for offset, length in [*holes, (size, 0)]:
            if offset > here:
                file.seek(here)
                parts.append((here, file.read(offset - here)))
            here = offset + length
    return parts
