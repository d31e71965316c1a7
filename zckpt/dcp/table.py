"""The metadata that torch's planners see: keys that a source lists, and answers for others.

    in, [key]     before a load: what is listed, or else would be found by its name
                  within it: every key, so that all that lack are named in one error
    items, ...    what is listed, always
    keys()        within a load: see `KeyTable.keys`

torch asks `[key]` how it is to ask for a value: a step and other numbers of an optimizer are asked
for as bytes, since those fit a target that keeps an int as well as one that keeps a tensor.
"""

from __future__ import annotations

import re
from collections.abc import KeysView
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from ..core.dtypes import TORCH_NAMES
from ..core.inert import Scalar
from ..errors import UnsupportedCheckpoint, ZckptError
from ..files.torchfile import Tensor
from ..formats.dcp.items import StoredTensor, StoredValue
from .keys import KeyMeaning
from .source import Source

STEP = re.compile(r"(?:^|\.)state\..+\.step$")


class KeyTable(dict[str, Any]):
    """`state_dict_metadata` of one load; `is_loading` while its planner makes a plan."""

    def __init__(self, source: Source) -> None:
        super().__init__((key, listed(source, item)) for key, item in source.listing.items.items())
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
        value: metadata.STORAGE_TYPES = super().__getitem__(key)  # or what __missing__ gives
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
        """What is listed; within a load, what torch before 2.4 alone would have saved.

        From listed keys that a program does not ask for DefaultLoadPlanner concludes that torch 2.3
        wrote the checkpoint, which did not enter dictionaries without tensors. It errs where a rank
        has no part of some of FSDP1's weights (torch 2.13). So it sees such dictionaries alone.
        """
        if not self.is_loading:
            return super().keys()
        return dict.fromkeys(key for key in self if self._is_container(key)).keys()

    def _is_container(self, key: str) -> bool:
        """Whether a program's dictionary, or list with such, is one value under this key."""
        stored, item = self.source.stored, self.source.listing.items[key]
        if stored is None or stored.version is not None or not isinstance(item, StoredValue):
            return False
        try:
            return _is_container(item.open().value)
        except ZckptError:
            return False

    def __reduce__(self) -> Any:  # a copy answers for what is listed
        return dict, (dict(self.items()),)


def _is_container(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, Tensor) or _is_container(each) for each in value)
    return isinstance(value, dict)


def listed(source: Source, item: StoredTensor | StoredValue) -> metadata.STORAGE_TYPES:
    if isinstance(item, StoredTensor):
        return tensor_metadata(item.dtype, item.shape, item)
    if item.is_number:
        value: Scalar = item.open().value
        return tensor_metadata(TORCH_NAMES[value.dtype], ())
    return metadata.BytesStorageMetadata()


def tensor_metadata(
    dtype: str, shape: tuple[int, ...], stored: StoredTensor | None = None
) -> metadata.TensorStorageMetadata:
    """In the boxes that are stored, else in one, which a manifest finds in any pieces."""
    size, kind = torch.Size(shape), getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedCheckpoint(f"torch {torch.__version__} has no type {dtype}")
    boxes = [(offsets, box.sizes) for offsets, box in stored.boxes.items()] if stored else []
    return metadata.TensorStorageMetadata(
        metadata.TensorProperties(kind),
        size,
        [
            metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in boxes or [((0,) * len(shape), shape)]
        ],
    )
