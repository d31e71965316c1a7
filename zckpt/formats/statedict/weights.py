"""Reads weights from safetensors files: a single file, or several files with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from ...core.checkpoint.dtypes import FLOATS
from ...core.storage import sources
from ...core.storage.filenames import path_inside
from ...core.storage.fragments import Record, solid
from ...core.storage.inventory import missing_file
from ...errors import InconsistentCheckpoint, Notice, listed, warning
from ...files import safefile
from ...training.faults import ZERO_SCALARS
from .tree import Leaf, number_of


def weights_of(path: str) -> tuple[dict[str, Leaf], list[Record]]:
    """The tensors of a safetensors file by name, and their byte ranges.

    The byte ranges come without checksums, because safetensors files state none.
    """
    tensors = safefile.read(path)
    leaves = {
        stored.name: Leaf(
            stored.dtype,
            stored.shape,
            solid(prod(stored.shape), stored.extent),
            number_of(stored),
        )
        for stored in tensors
    }
    return leaves, [Record(stored.extent, None) for stored in tensors]


def zero_scalars(path: str, tensors: Mapping[str, Leaf]) -> list[Notice]:
    """Warns about 0-d weights whose value is 0, because a bug of torch may have lost their values.

    The list is empty without such weights. A safetensors file with `__metadata__` in its header was
    not written by torch, and gets no warning.
    """
    numbers = {
        name: leaf.number
        for name, leaf in tensors.items()
        if not leaf.shape and leaf.dtype in FLOATS
    }
    if not numbers or sources.is_stand_in(path) or safefile.read_with_metadata(path)[1]:
        return []
    zeros = [name for name, number in numbers.items() if number().value == 0]
    if not zeros:
        return []
    message = f"{listed(zeros, 4)} is 0: {ZERO_SCALARS.message}; {ZERO_SCALARS.hint}"
    return [warning("engine-fault", message, subject=zeros[0], file=path)]


def tensors_of_index(path: str, tensors_of: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors by name in all files that a Hugging Face index lists.

    `tensors_of` reads one of these files. Raises InconsistentCheckpoint if two files have the same
    tensor, and the errors of `files_of_index`.
    """
    tensors: dict[str, Any] = {}
    file_of: dict[str, str] = {}
    for file in files_of_index(path):
        for name, tensor in tensors_of(file).items():
            if name in file_of:
                raise InconsistentCheckpoint(
                    "file-copied-over",
                    f"{file} and {file_of[name]} both have {name}",
                    hint="one file was copied over another: copy all files again",
                    file=file,
                    subject=name,
                )
            tensors[name], file_of[name] = tensor, file
    return tensors


def files_of_index(path: str) -> list[str]:
    """The paths of the files that a Hugging Face index lists, such as model.safetensors.index.json.

    Raises CorruptCheckpoint for a file outside of the index's folder, and IncompleteCheckpoint for
    a missing file.
    """
    with sources.opened(path) as file:
        names = sorted(set(json.load(file)["weight_map"].values()))
    folder, index = os.path.split(path)
    files = [path_inside(folder, name, index) for name in names]
    for name in files:
        if not sources.is_file(name):
            raise missing_file(name, path)
    return files
