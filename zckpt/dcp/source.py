"""Lists the keys of a checkpoint for torch's planners, and finds the meaning of each key.

A directory of torch.distributed.checkpoint (DCP) lists the keys that a program saved, with their
values unchanged. Any other checkpoint lists the keys that `zckpt convert --to dcp` would write. So
does a DCP directory with `rename` or `step_policy`, because these change the content.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from .. import formats
from ..core.checkpoint import agreement
from ..core.checkpoint.dtypes import TORCH_NAMES
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.inert import Scalar, TensorName
from ..core.checkpoint.manifest import Manifest
from ..core.storage import sources
from ..core.storage.byte_sources import Fingerprint
from ..core.storage.names_alone import refuse_names
from ..core.storage.unfinished import refuse_unfinished
from ..errors import (
    CorruptCheckpoint,
    FlatParameters,
    InconsistentCheckpoint,
    MissingData,
    Notice,
    ZckptError,
)
from ..files.dcptable import METADATA
from ..formats.dcp.files import has_items, locate
from ..formats.dcp.items import (
    OpenedItem,
    StoredBox,
    StoredItems,
    StoredTensor,
    StoredValue,
    stored_items,
)
from ..formats.reading import Reading
from ..formats.statedict.keys import in_folder, keys_of
from ..formats.statedict.tree import TreePath, dotted
from ..formats.statedict.write import BlankTensor, StateDicts
from ..judging.contents import check_to_load
from ..reading import read
from ..training import steps
from ..training.options import Options
from .keys import NUMBERED, KeyMeaning, KeyNames

CONTRADICTIONS = (CorruptCheckpoint, InconsistentCheckpoint)
"""Errors of files that contradict each other. Missing parts matter only if they are requested."""

Meaning = StoredTensor | StoredValue | KeyMeaning


class Listing(Struct):
    """The keys that a checkpoint lists, in the order in which a program would save them.

    paths      each key's path in the state dict
    weights    maps a weight's key to its name in the manifest
    assumed    warnings about defaults for hyper-parameters that the source lacks
    """

    items: dict[str, StoredTensor | StoredValue]
    paths: dict[str, TreePath]
    weights: dict[str, str] = field(default_factory=dict)
    assumed: list[Notice] = field(default_factory=list)


class Source(Struct, eq=False, dict=True):
    """The checkpoint from which a program loads.

    `groups` has the names of the parameters in each of the program's groups. `stored` has the items
    of a DCP directory that is loaded unchanged; it is None for other checkpoints. Raises a
    ZckptError if the path holds no checkpoint.
    """

    path: str
    reading: Reading
    groups: Sequence[Sequence[str]]
    why_nameless: str = ""
    """Why keys cannot be looked up by name."""

    def __post_init__(self) -> None:
        self.numbers = [name for group in self.groups for name in group]
        steps.check_policy(self.reading.step_policy)
        refuse_unfinished([self.path])
        refuse_names(self.path)
        self.stored = self._stored()
        files = self.manifest.files.paths if self.stored is None else self.stored.files
        self._fingerprints = {name: Fingerprint.of(os.stat(name)) for name in files}

    def _stored(self) -> StoredItems | None:
        reading = self.reading
        recognized = formats.find(self.path, self._format, reading.tag, reading.root)
        if recognized.format.name != "dcp":
            return None
        if reading.rename or reading.step_policy not in (None, agreement.KEEP):
            return None
        folders = locate(recognized.path, reading.tag)[1]
        if not folders or not all(map(has_items, folders)):  # Hugging Face's storage
            return None
        return stored_items(recognized.path, reading.tag)

    @property
    def _format(self) -> str | None:
        file = os.path.join(self.path, self.reading.tag or "", METADATA)
        return self.reading.format or ("dcp" if sources.is_file(file) else None)

    @property
    def is_current(self) -> bool:
        """Whether the files have not changed since they were read."""
        return all(
            (now := sources.status(name)) and Fingerprint.of(now) == fingerprint
            for name, fingerprint in self._fingerprints.items()
        )

    @cached_property
    def manifest(self) -> Manifest:
        return read(self.path, replace(self.reading, format=self._format))

    def check(self, accept_weights: bool, keys: Collection[str]) -> None:
        """Checks the source as `convert` does before it writes; raises the errors of `zckpt.load`.

        The stored items of a DCP directory are checked only if zckpt finds a model or an optimizer
        among them. `keys` are the keys to load.
        """
        try:
            manifest = self._readable
        except CONTRADICTIONS:
            raise
        except FlatParameters:
            if self._has_optimizers(keys):
                raise
            manifest = self._weights
        except ZckptError:
            if self.stored is None:
                raise
            return
        check_to_load(manifest, self.reading.replicas, accept_weights)

    @property
    def _readable(self) -> Manifest:
        """Reads the manifest; without the names of optimizer parameters, if no file states them."""
        try:
            return self.manifest
        except MissingData:
            nameless = replace(self.reading, format=self._format, nameless=True)
            return read(self.path, nameless)

    @cached_property
    def _weights(self) -> Manifest:
        return read(self.path, replace(self.reading, format=self._format, weights_only=True))

    def _has_optimizers(self, keys: Collection[str]) -> bool:
        place = keys_of(self._weights.run.engine).optimizer
        if self.stored is None or place is None:
            return True
        paths = (self.stored.paths.get(key, (key,)) for key in keys)
        return any(path[: len(place)] == place for path in paths)

    @cached_property
    def listing(self) -> Listing:
        if self.stored is not None:
            return Listing(self.stored.items, self.stored.paths)
        return listing_of(self.manifest)

    @cached_property
    def names(self) -> KeyNames | None:
        """The object that looks up keys by name; None for a DCP directory without a model."""
        if self.stored is None:
            return KeyNames(self.manifest, self.numbers, weights=self.listing.weights)
        words = {key.partition(".")[0] for key in self.stored.items}
        try:
            return KeyNames(self.manifest, self.numbers, words)
        except ZckptError as error:
            self.why_nameless = error.message
            return None

    def meaning(self, key: str) -> Meaning | None:
        """Finds out what a key of the program stands for; None if the checkpoint does not have it.

        The result is the item that the checkpoint lists under the same key, or a `KeyMeaning` if
        the key was found by the name of its parameter.
        """
        item = self.listing.items.get(key)
        if item is not None and self._is_loaded_unchanged(key, item):
            return item
        by_name = None if self.names is None else self.names.meaning(key)
        return by_name or item

    def _is_loaded_unchanged(self, key: str, item: StoredTensor | StoredValue) -> bool:
        """Whether the item that the checkpoint lists under `key` is loaded as it is.

        If not, the method `meaning` first looks for the parameter that the key names.
        """
        if self.stored is not None:
            return not (self.numbers and NUMBERED.search(key))
        if isinstance(item, StoredTensor):
            return bool(item.boxes)
        return self.names is not None and not key.startswith(self.names.optimizer)


def listing_of(manifest: Manifest) -> Listing:
    """Lists the keys and items that `zckpt convert --to dcp` would write."""
    listing = Listing({}, {})
    try:
        dicts = StateDicts(manifest, Options(), None)
        for path, value in dicts.items():
            inside = in_folder(path)
            key = dotted(inside)
            listing.paths[key] = inside
            listing.items[key] = _item(manifest, value)
            if isinstance(value, BlankTensor) and path[:-1] == dicts.model:
                name = path[-1]
                listing.weights[key] = dicts.aliases.get(name) or name
    except ZckptError as error:
        message = f"{manifest.root}: the list of keys is not available: {error.message}"
        warnings.warn(message, stacklevel=2)
        return Listing({}, {})
    listing.assumed.extend(dicts.warnings[len(manifest.notices.warnings) :])
    return listing


def _item(manifest: Manifest, value: Any) -> StoredTensor | StoredValue:
    def entry(name: TensorName) -> Entry:
        return manifest.entries[name.name, "state"]

    if isinstance(value, BlankTensor):
        return StoredTensor(TORCH_NAMES[value.dtype], value.shape, {})
    item = OpenedItem(value, entry, manifest.files.records)
    if isinstance(value, TensorName):
        tensor = entry(value)
        boxes = {(0,) * len(tensor.shape): StoredBox(tensor.shape, lambda: item)}
        return StoredTensor(TORCH_NAMES[tensor.dtype], tensor.shape, boxes)
    return StoredValue(lambda: item, isinstance(value, Scalar))
