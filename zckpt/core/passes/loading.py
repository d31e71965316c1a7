"""Loads one complete tensor of a checkpoint into memory, for torch or numpy.

The elements are read directly into the new tensor, by one thread, without another copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ...errors import (
    RESTORABLE,
    CorruptCheckpoint,
    MissingExtra,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
)
from ..checkpoint.dtypes import SIZES, TORCH_NAMES
from ..checkpoint.entries import Entry, key_of, name_of
from ..checkpoint.manifest import Manifest
from ..storage.checksum import crc32
from ..storage.fragments import Record
from ..storage.records import RecordChecker
from .pieces import ReadRequest
from .streaming import reading

if TYPE_CHECKING:
    import torch

SCRATCH = 8 << 20  # bytes of working memory for small pieces of many ranks


def entry_of(manifest: Manifest, name: str) -> Entry:
    """Looks up the tensor named `parameter/slot`; a tied weight may have any of its names.

    Raises WrongOption, whose hint lists similar names.
    """
    key = parameter, slot = key_of(name)
    owners, entries = manifest.owners, manifest.entries
    entry = entries.get(key) or entries.get((owners.get(parameter, parameter), slot))
    if entry is not None:
        return entry
    names = {owners.get(each, each) for each in (name, parameter)} - {""}
    near = [each.name for each in entries.values() if each.parameter in names]
    near = near or get_close_matches(name, map(name_of, entries), 5)
    raise WrongOption(
        "option-names-nothing",
        f"{manifest.root} has no tensor {name!r}",
        hint=f"near names are {listed(near)}"
        if near
        else f"`zckpt inspect {manifest.root} --tensors '*'` lists the names",
    )


def fill(entry: Entry, view: memoryview, records: Sequence[Record]) -> None:
    """Reads a complete tensor, row-major, into `view`.

    `records` are the byte ranges of the checkpoint whose CRC-32 its files state, such as zip
    members. Raises CorruptCheckpoint if the bytes do not have this CRC-32.
    """
    with reading([RecordChecker(records)], SCRATCH) as (element_reader,):
        element_reader.read([ReadRequest(entry, 0, entry.numel, 0)], view)
    if entry.digest is not None and crc32(view) != entry.digest:
        raise CorruptCheckpoint(
            "record-damaged",
            f"{entry.name} is damaged: its elements do not have the CRC-32 that the checkpoint "
            "states",
            hint=RESTORABLE,
            subject=entry.name,
        )


def head(entry: Entry, count: int) -> bytes:
    """Reads the bytes of a tensor's first elements, at most `count` elements."""
    count = min(count, entry.numel)
    data = bytearray(count * SIZES[entry.dtype])
    with reading([RecordChecker(())], SCRATCH) as (element_reader,):
        element_reader.read([ReadRequest(entry, 0, count, 0)], memoryview(data))
    return bytes(data)


def as_torch(entry: Entry, records: Sequence[Record]) -> torch.Tensor:
    """Loads a tensor on the CPU; raises UnsupportedCheckpoint if this torch lacks its dtype.

    `records` are the byte ranges of the checkpoint whose CRC-32 its files state.
    """
    import torch

    dtype = getattr(torch, TORCH_NAMES[entry.dtype], None)
    if dtype is None:
        raise UnsupportedCheckpoint(
            "extra-missing",
            f"{entry.name} is {TORCH_NAMES[entry.dtype]}, which torch {torch.__version__} lacks",
            hint="install a newer torch",
            subject=entry.name,
        )
    tensor = torch.empty(entry.shape, dtype=dtype)
    if entry.numel:
        fill(entry, tensor.reshape(-1).view(torch.uint8).numpy().data, records)
    return tensor


def as_numpy(entry: Entry, records: Sequence[Record]) -> Any:
    """Loads a tensor as a numpy array; raises MissingExtra for a dtype that only torch has.

    `records` are the byte ranges of the checkpoint whose CRC-32 its files state.
    """
    import numpy

    name = TORCH_NAMES[entry.dtype]
    if name == "bfloat16" or name.startswith("float8"):
        raise MissingExtra(
            "extra-missing",
            f"{entry.name} is {name}, a type that numpy does not have",
            hint="pip install torch safetensors, to load it as a torch tensor",
        )
    array = numpy.empty(entry.shape, name)
    if entry.numel:
        fill(entry, array.reshape(-1).view(numpy.uint8).data, records)
    return array
