"""One whole tensor of a checkpoint in memory, as torch's or as numpy's.

Each is filled from wherever its elements lie, without another copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ..errors import CorruptCheckpoint, MissingExtra, UnsupportedCheckpoint, WrongOption, listed
from .checksum import crc32
from .dtypes import TORCH_NAMES
from .fileio import Reader
from .fragments import Record
from .manifest import Entry, Manifest
from .pieces import Gatherer, Ledger, Wanted

if TYPE_CHECKING:
    import torch

SCRATCH = 8 << 20  # bytes, in which small pieces of many ranks are put together


def entry_of(manifest: Manifest, name: str) -> Entry:
    """The tensor `parameter/slot`; a tied weight has all its names.

    Raises WrongOption, which says what names are near.
    """
    parameter, _, slot = name.rpartition("/")
    owners = {
        alias: owner for owner, about in manifest.parameters.items() for alias in about.aliases
    }
    entries = manifest.entries
    entry = entries.get(name) or entries.get(f"{owners.get(parameter, parameter)}/{slot}")
    if entry is not None:
        return entry
    known = {owners.get(each, each) for each in (name, parameter)} - {""}
    near = [each.name for each in entries.values() if each.parameter in known]
    near = near or get_close_matches(name, entries, 5)
    raise WrongOption(
        f"{manifest.root} has no tensor {name!r}",
        hint=f"near names are {listed(near)}"
        if near
        else f"`zckpt inspect {manifest.root} --tensors '*'` lists the names",
    )


def fill(entry: Entry, view: memoryview, records: Sequence[Record]) -> None:
    """Reads all elements, row-major, into `view`.

    Raises CorruptCheckpoint where the bytes do not have the CRC-32 that a file states of them.
    """
    reader = Reader()
    try:
        gatherer = Gatherer(reader, Ledger(records), SCRATCH)
        gatherer.gather([Wanted(entry, 0, entry.numel, 0)], view)
    finally:
        reader.close()
    if entry.digest is not None and crc32(view) != entry.digest:
        raise CorruptCheckpoint(
            f"{entry.name} is damaged: its elements do not have the CRC-32 that the checkpoint "
            "states"
        )


def as_torch(entry: Entry, records: Sequence[Record]) -> torch.Tensor:
    """The tensor, on the CPU; raises UnsupportedCheckpoint for a type that this torch lacks."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[entry.dtype], None)
    if dtype is None:
        raise UnsupportedCheckpoint(
            f"{entry.name} is {TORCH_NAMES[entry.dtype]}, which torch {torch.__version__} lacks",
            hint="install a newer torch",
        )
    tensor = torch.empty(entry.shape, dtype=dtype)
    if entry.numel:
        fill(entry, tensor.reshape(-1).view(torch.uint8).numpy().data, records)
    return tensor


def as_numpy(entry: Entry, records: Sequence[Record]) -> Any:
    """The array; raises MissingExtra for a type that torch knows and numpy does not."""
    import numpy

    name = TORCH_NAMES[entry.dtype]
    if name == "bfloat16" or name.startswith("float8"):
        raise MissingExtra(
            f"{entry.name} is {name}, a type that numpy does not have",
            hint="pip install 'zckpt[torch]' to load it as a torch tensor",
        )
    array = numpy.empty(entry.shape, name)
    if entry.numel:
        fill(entry, array.reshape(-1).view(numpy.uint8).data, records)
    return array
