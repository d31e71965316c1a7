"""The metadata for torch's planners: the keys that a program may load from a source.

A listed key is a key of the source itself. Other keys of the program are found by name: the source
has the same parameter under another key.

    in, [key]     before a load: listed keys, and keys that a look-up by name would find, unless the
                  source is a directory of torch.distributed.checkpoint
                  during a load: every key, so that one error names all missing ones
    items, ...    always the listed keys
    keys()        during a load: see `KeyTable.keys`

torch uses `[key]` to decide how to request a value. Steps and other numbers of an optimizer are
requested as bytes, which fit both an int and a tensor in the state dict.
"""

from __future__ import annotations

import re
from collections.abc import KeysView
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from ..core.checkpoint.dtypes import TORCH_NAMES
from ..core.checkpoint.inert import Scalar
from ..errors import UnsupportedCheckpoint, ZckptError
from ..files.torchfile import Tensor
from ..formats.dcp.items import StoredTensor, StoredValue
from .keys import KeyMeaning
from .source import Source

STEP = re.compile(r"(?:^|\.)state\..+\.step$")


class KeyTable(dict[str, Any]):
    """The `state_dict_metadata` that torch's planner sees during a load: the keys to choose from.

    `is_loading` is True while the planner makes a plan.
    """

    def __init__(self, source: Source) -> None:
        super().__init__((key, metadata_of(item)) for key, item in source.listing.items.items())
        self.source = source
        self.is_loading = False

    def __contains__(self, key: object) -> bool:
        if self.is_loading or super().__contains__(key):
            return True
        return self.source.stored is None and self.source.meaning(str(key)) is not None

    def __getitem__(self, key: str) -> metadata.STORAGE_TYPES:
        item = self.source.listing.items.get(key)
        if isinstance(item, StoredValue):
            return metadata.BytesStorageMetadata()
        if item is not None and not item.shape and STEP.search(key):
            return metadata.BytesStorageMetadata()
        value: metadata.STORAGE_TYPES = super().__getitem__(key)  # may call __missing__
        return value

    def __missing__(self, key: str) -> metadata.STORAGE_TYPES:
        if not self.is_loading and key not in self:
            raise KeyError(key)
        names, meaning = self.source.names, self.source.meaning(key)
        entries = names.entries(meaning) if names and isinstance(meaning, KeyMeaning) else []
        if not entries:
            return metadata.BytesStorageMetadata()
        return tensor_metadata(TORCH_NAMES[entries[0].dtype], entries[0].shape)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # of any dictionary
        """The listed keys; during a load (`is_loading`), only the keys of containers.

        A container is a dictionary, or a list with a dictionary or a tensor in it, that torch
        before 2.4 saved under one key.
        """
        if not self.is_loading:
            return super().keys()
        # DefaultLoadPlanner takes a checkpoint for one of torch 2.3, which saved a dictionary
        # without tensors under one key, if the program does not ask for every key that it sees
        # here. A rank without a shard of an FSDP1 weight does not ask for its key (torch 2.13).
        return dict.fromkeys(key for key in self if self._is_container(key)).keys()

    def _is_container(self, key: str) -> bool:
        """Whether a key's value is a dictionary, or a list with a dictionary or tensor in it."""
        stored, item = self.source.stored, self.source.listing.items[key]
        if stored is None or stored.version is not None or not isinstance(item, StoredValue):
            return False
        try:
            return _is_container(item.open().value)
        except ZckptError:
            return False

    def __reduce__(self) -> Any:  # a copy is a plain dictionary of the listed keys
        return dict, (dict(self.items()),)


def _is_container(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, Tensor) or _is_container(each) for each in value)
    return isinstance(value, dict)


def metadata_of(item: StoredTensor | StoredValue) -> metadata.STORAGE_TYPES:
    if isinstance(item, StoredTensor):
        return tensor_metadata(item.dtype, item.shape, item)
    if item.is_number:
        value: Scalar = item.open().value
        return tensor_metadata(TORCH_NAMES[value.dtype], ())
    return metadata.BytesStorageMetadata()


def tensor_metadata(
    dtype: str, shape: tuple[int, ...], stored: StoredTensor | None = None
) -> metadata.TensorStorageMetadata:
    """Makes torch's metadata of a tensor: its stored chunks, or one chunk for the full tensor."""
    size, kind = torch.Size(shape), getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedCheckpoint(
            "extra-missing", f"torch {torch.__version__} has no dtype {dtype}"
        )
    boxes = [(offsets, box.sizes) for offsets, box in stored.boxes.items()] if stored else []
    return metadata.TensorStorageMetadata(
        metadata.TensorProperties(kind),
        size,
        [
            metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in boxes or [((0,) * len(shape), shape)]
        ],
    )
