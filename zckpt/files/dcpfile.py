"""The files of torch.distributed.checkpoint: `.metadata`, and items in `.distcp` files.

    <dir>/.metadata             one pickle, written last: which item is where, and the state's keys
    <dir>/__R.metadata          instead of it one of each rank, of its own items, where ranks saved
                                without asking each other (use_collectives=False)
    <dir>/__R_K.distcp          items one behind the other, each a whole file of torch.save; or
                                values so, and behind them all tensors as one safetensors file

Hugging Face's storage has no `.metadata`: `shard-R-model-F-of-N.safetensors`, whose headers say at
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.inert import Foreign, Global
from ..core.manifest import Extent
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from .safefile import Stored, read_with_metadata
from .torchfile import TORCH_DTYPES, Parsed, TorchFile
from .unpickle import Unpickler

METADATA = ".metadata"
ITEMS = ".distcp"
OWN = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True, slots=True)
class Place:
    """Where `.metadata` says that an item is."""

    file: str
    offset: int
    length: int


class ItemFiles:
    """The files of one folder, each opened when an item of it is wanted."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.parsed: Parsed = {}
        self.sizes: dict[str, int] = {}
        self.safe: dict[tuple[str, int], dict[str, Stored]] = {}

    def stored(self, place: Place, key: str) -> Stored | None:
        """A tensor of the safetensors file that begins at the place, where one does."""
        where = place.file, place.offset
        if where not in self.safe:
            self._need(place, 1)
            with open(place.file, "rb") as file:
                file.seek(place.offset)
                is_torch = file.read(2) == b"PK"
            if is_torch:
                return None
            listed, _ = read_with_metadata(place.file, place.offset)
            self.safe[where] = {stored.name: stored for stored in listed}
        if key not in self.safe[where]:
            raise IncompleteCheckpoint(f"{place.file} lacks {key}, which {METADATA} says it holds")
        return self.safe[where][key]

    def file(self, place: Place) -> TorchFile:
        """An item as the file of torch.save that it is."""
        self._need(place, place.length)
        return TorchFile(place.file, self.parsed, Extent(place.file, place.offset, place.length))

    def _need(self, place: Place, length: int) -> None:
        """Raises unless the file is there and has these bytes."""
        if place.file not in self.sizes:
            if not os.path.isfile(place.file):
                raise IncompleteCheckpoint(
                    f"{place.file} is missing, which {METADATA} names",
                    hint="copy the whole directory; every rank writes files of its own",
                )
            self.sizes[place.file] = os.path.getsize(place.file)
        if min(place.offset, length) < 0 or place.offset + length > self.sizes[place.file]:
            raise IncompleteCheckpoint(
                f"{place.file} has {self.sizes[place.file]} bytes, {METADATA} says at least "
                f"{place.offset + length}",
                hint="it was cut short; take another copy of it",
            )


def metadata(folder: str) -> dict[str, Any]:
    """The fields of `.metadata`, or of all ranks' together."""
    name = os.path.join(folder, METADATA)
    if os.path.isfile(name):
        return _pickled(name)
    with os.scandir(folder) as items:
        ranks = {int(found[1]): item.path for item in items if (found := OWN.fullmatch(item.name))}
    if not ranks:
        raise IncompleteCheckpoint(
            f"{folder} holds items, but no {METADATA}, which is written last",
            hint="the save did not finish; take an earlier checkpoint",
        )
    lost = set(range(max(ranks))) - set(ranks)
    if lost:
        raise IncompleteCheckpoint(f"{folder} lacks __{min(lost)}{METADATA}")
    made = _pickled(ranks[0])
    held: dict[str, Any] = made["state_dict_metadata"]
    known = {(key, at) for key, item in held.items() for at in _offsets(item)}
    for rank in sorted(set(ranks) - {0}):
        other = _pickled(ranks[rank])
        for index, info in other["storage_data"].items():
            made["storage_data"].setdefault(index, info)
        for key, item in other["state_dict_metadata"].items():
            first = held.setdefault(key, item)
            for chunk, at in zip(fields_of(item).get("chunks", ()), _offsets(item), strict=True):
                if first is not item and (key, at) not in known:
                    fields_of(first)["chunks"].append(chunk)
                known.add((key, at))
        made["planner_data"] = {**(other.get("planner_data") or {}), **made["planner_data"]}
    return made


def _offsets(item: Any) -> list[tuple[int, ...]]:
    return [tuple(fields_of(chunk)["offsets"]) for chunk in fields_of(item).get("chunks", ())]


def _pickled(name: str) -> dict[str, Any]:
    with open(name, "rb") as file:
        text = file.read()
    try:
        fields = fields_of(Unpickler(text).load())
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{name}: {error.message}", error.hint) from error
    if not {"state_dict_metadata", "storage_data"} <= fields.keys():
        raise CorruptCheckpoint(f"{name} is no metadata of torch.distributed.checkpoint")
    return fields


def places_of(folder: str, storage: Mapping[Any, Any]) -> dict[tuple[str, Any], Place]:
    """Where items are, by key and offsets (None of what is no tensor)."""
    places = {}
    for index, info in storage.items():
        of, at = fields_of(index), fields_of(info)
        if at.get("transform_descriptors"):
            raise UnsupportedCheckpoint(
                f"{folder}: {of['fqn']} is stored compressed or encrypted "
                f"({at['transform_descriptors']})"
            )
        name = at["relative_path"]
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise CorruptCheckpoint(f"{folder}: {METADATA} names a file outside: {name!r}")
        offset = of.get("offset")
        where = None if offset is None else tuple(offset)
        places[of["fqn"], where] = Place(os.path.join(folder, name), at["offset"], at["length"])
    return places


def fields_of(made: Any) -> dict[str, Any]:
    """The attributes of a dataclass, as it was pickled."""
    state = made.state if isinstance(made, Foreign) else made
    if state is None:  # BytesStorageMetadata has none
        return {}
    if not isinstance(made, Foreign) or not isinstance(state, dict):
        raise CorruptCheckpoint(f"{METADATA} is malformed")
    return state


def dtype_of(properties: Any) -> str:
    """TensorProperties pickles a tuple whose first is the dtype."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    name = TORCH_DTYPES.get(dtype.name) if isinstance(dtype, Global) else None
    if name is None:
        raise UnsupportedCheckpoint(
            f"zckpt does not read tensors of type {getattr(dtype, 'name', dtype)}",
            hint="cast them before saving, or leave them out of the checkpoint",
        )
    return name


def agree(place: Place, key: str, held: Any, stated: tuple[str, tuple[int, ...]]) -> None:
    if held != stated:
        raise InconsistentCheckpoint(
            f"{place.file} holds something else at {place.offset} than the {stated[0]} "
            f"{list(stated[1])} of {key} that {METADATA} says"
        )
