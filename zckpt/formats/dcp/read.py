"""torch.distributed.checkpoint's directories: `.metadata`, and items in `.distcp` files.

    <dir>/.metadata             one pickle, written last: which item is where, and the state's keys
    <dir>/__R.metadata          instead of it one of each rank, of its own items, where ranks saved
                                without asking each other (use_collectives=False)
    <dir>/__R_K.distcp          items one behind the other, each a whole file of torch.save; or
                                values so, and behind them all tensors as one safetensors file

Hugging Face's storage has no `.metadata`: `shard-R-model-F-of-N.safetensors`, whose headers say at
which offsets of the whole tensors theirs begin (`DCP_SHARDING_INFO`).

`.metadata` names every tensor's shape and the boxes that ranks hold of it (torch 2.1 to 2.13; it
moves its classes, not its fields). torch reads it with plain pickle, here no class is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...core.fragments import Extent
from ...core.inert import Foreign, Global
from ...core.manifest import Manifest
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
    not_understood,
)
from ...files.safefile import Stored, read_with_metadata
from ...files.torchfile import TORCH_DTYPES, Parsed, Tensor, TorchFile
from ...files.unpickle import Unpickler
from ...training.trainers import beside
from ..statedict.read import manifest
from ..statedict.tree import (
    Found,
    Leaf,
    Piece,
    assembled,
    identities,
    leaves,
    number_of,
    solid_piece,
)
from . import hf

if TYPE_CHECKING:
    pass

METADATA = ".metadata"
ITEMS = ".distcp"
OWN = re.compile(r"__(\d+)\.metadata")
STEP = re.compile(r"step-(\d+)")  # torchtitan's folders
MAX_LIST = 1_000_000  # elements of all lists
MAX_DEPTH = 100
PARTS = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")  # Accelerate's, Hugging Face Trainer's


def detect(path: str) -> list[str]:
    """One empty tag for a checkpoint; torchtitan's `step-N` of a folder of several."""
    if not os.path.isdir(path):
        return []
    if folders(path):
        return [""]
    with os.scandir(path) as items:
        steps = [item.name for item in items if STEP.fullmatch(item.name)]
    found = [name for name in steps if is_dcp(os.path.join(path, name))]
    return sorted(found, key=lambda name: int(name.removeprefix("step-")))


def detect_weak(path: str) -> list[str]:
    """Hugging Face's storage: weights alone, which are looked for where nothing else is found."""
    return [""] if os.path.isdir(path) and hf.files(path) else []


def is_dcp(path: str) -> bool:
    """Whether a folder holds such files, though the save be unfinished."""
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as items:
        return any(item.name == METADATA or item.name.endswith(ITEMS) for item in items)


def folders(path: str) -> list[str]:
    """The folders that are one checkpoint: itself, or Accelerate's for model and optimizer."""
    if is_dcp(path):
        return [path]
    with os.scandir(path) as items:
        named = sorted(item.path for item in items if PARTS.fullmatch(item.name))
    return [folder for folder in named if is_dcp(folder)]


def read(
    path: str,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: tuple[str, ...] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of a directory, or of a trainer's directory around one.

    Raises NotACheckpoint, IncompleteCheckpoint (no `.metadata`, a missing file or element),
    InconsistentCheckpoint, CorruptCheckpoint, UnsupportedCheckpoint (Megatron-Core, compressed or
    encrypted items).
    """
    root, parts = located(path, tag)
    shards = hf.files(root) if os.path.isdir(root) and not parts else []
    if not parts and not shards:
        raise NotACheckpoint(f"{root} holds no {METADATA}")
    found = Found(root, {"format": "dcp", "version": None, "dp": None, "tag": None}, {})
    try:
        if parts and parts != [root]:
            found.folders = [os.path.basename(folder) for folder in parts]
        for folder in parts:
            _Folder(folder, found).read()
        hf.read(shards, found)
        siblings, left_out = beside(root, [*parts, *shards, *_own(root, parts)])
        found.siblings += siblings
        found.left_out += left_out
        return manifest(found, step_policy, param_names, weights_only)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(root, error) from error


def located(path: str, tag: str | None = None) -> tuple[str, list[str]]:
    """The checkpoint's directory, and its folders with a `.metadata`.

    Raises UnsupportedCheckpoint for several models, and for Megatron-Core.
    """
    root = os.path.join(path, tag) if tag else path
    parts = folders(root) if os.path.isdir(root) else []
    steps = detect(path) if os.path.isdir(path) and not tag else []
    if not parts and len(steps) == 1 and steps[0]:
        root = os.path.join(path, steps[0])
        parts = folders(root)
    _refuse_several(root, parts)
    for folder in parts:
        _refuse_megatron(folder)
    return root, parts


def _refuse_several(root: str, parts: list[str]) -> None:
    """Accelerate numbers the models and optimizers of one program; names may be the same in all."""
    names = [os.path.basename(folder) for folder in parts if folder != root]
    if any(not name.endswith("_0") for name in names):
        raise UnsupportedCheckpoint(
            f"{root} holds several models or optimizers: {', '.join(names)}",
            hint="give the folder of one model: its weights are read without the optimizer",
        )


def _refuse_megatron(folder: str) -> None:
    if os.path.exists(os.path.join(folder, "metadata.json")):
        raise UnsupportedCheckpoint(f"{folder} is of Megatron-Core, which zckpt does not read yet")


def _own(root: str, parts: list[str]) -> Iterator[str]:
    """The checkpoint's own files in its directory, finished or not."""
    if root in parts:
        with os.scandir(root) as items:
            for item in items:
                if item.name.startswith(METADATA) or item.name.endswith((ITEMS, ".tmp", METADATA)):
                    yield item.path


@dataclass(frozen=True, slots=True)
class _Place:
    """Where `.metadata` says that an item is."""

    file: str
    offset: int
    length: int


class _Folder:
    """One directory with a `.metadata`."""

    def __init__(self, folder: str, found: Found) -> None:
        self.folder = folder
        self.found = found
        self.parsed: Parsed = {}
        self.sizes: dict[str, int] = {}
        self.names: Mapping[str, list[str]] = {}
        self.safe: dict[tuple[str, int], dict[str, Stored]] = {}

    def read(self) -> None:
        """Puts every item into the tree, in the order of the saved state."""
        fields = _metadata(self.folder)
        items: dict[str, Any] = fields["state_dict_metadata"]
        paths: Mapping[str, Any] = fields.get("planner_data") or {}
        places = _places(self.folder, fields["storage_data"])
        if not self.found.source["version"]:
            self.found.source["version"] = fields.get("version")
        with os.scandir(self.folder) as listed:
            self.found.files += sorted(x.path for x in listed if x.name.endswith(METADATA))
        known = fields.get("zckpt")
        if isinstance(known, dict):
            self.found.known = known
            self.found.inferred = list(known.get("inferred", ()))
            self.names = known["names"]
        room = MAX_LIST
        for key in [*(key for key in paths if key in items), *(k for k in items if k not in paths)]:
            value = self._item(key, items[key], places)
            room = _put(self.found.tree, paths.get(key) or (key,), value, room)
        self.found.files += sorted(self.sizes)

    def _item(self, key: str, item: Foreign, places: Mapping[Any, _Place]) -> Any:
        fields, names = _fields(item), iter(self.names.get(key, ()))
        if "chunks" not in fields:
            place = places.get((key, None))
            if place is None:
                raise IncompleteCheckpoint(f"{self.folder}: {METADATA} does not say where {key} is")
            file = self._file(place)
            self.found.records += file.records.values()
            return leaves(file, file.value, names)
        shape = tuple(fields["size"])
        dtype = _dtype(fields["properties"])
        pieces: list[Piece] = []
        parts: list[tuple[tuple[int, ...], Tensor, TorchFile]] = []
        number = None
        for chunk in map(_fields, fields["chunks"]):
            offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            if 0 in sizes:
                continue
            place = places.get((key, offsets))
            if place is None:
                raise IncompleteCheckpoint(
                    f"{self.folder}: {METADATA} does not say where {key} at {list(offsets)} is"
                )
            stored = self._stored(place, key)
            if stored is not None:
                _agree(place, key, (stored.dtype, stored.shape), (dtype, sizes))
                pieces.append(solid_piece(stored, offsets))
                number = number_of(stored)
                continue
            file = self._file(place)
            tensor = file.value
            held = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
            _agree(place, key, held, (dtype, sizes))
            self.found.records += file.records.values()
            extent = file.whole(tensor)
            pieces.append(Piece(offsets, sizes, tensor.strides, tensor.offset, extent))
            parts.append((offsets, tensor, file))
            number = partial(file.scalar, tensor)
        fragments = assembled(key, dtype, shape, pieces)
        # every item has memory of its own; safetensors have no checksums
        twin = identities(dtype, shape, parts)[1] if len(parts) == len(pieces) else None
        sharded = len(fields["chunks"]) > 1
        return Leaf(
            dtype,
            shape,
            fragments,
            number or _no_number,
            twin=twin,
            sharded=sharded,
            name=next(names, None),
        )

    def _stored(self, place: _Place, key: str) -> Stored | None:
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

    def _file(self, place: _Place) -> TorchFile:
        """An item as the file of torch.save that it is."""
        self._need(place, place.length)
        return TorchFile(place.file, self.parsed, Extent(place.file, place.offset, place.length))

    def _need(self, place: _Place, length: int) -> None:
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


def _metadata(folder: str) -> dict[str, Any]:
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
            for chunk, at in zip(_fields(item).get("chunks", ()), _offsets(item), strict=True):
                if first is not item and (key, at) not in known:
                    _fields(first)["chunks"].append(chunk)
                known.add((key, at))
        made["planner_data"] = {**(other.get("planner_data") or {}), **made["planner_data"]}
    return made


def _offsets(item: Any) -> list[tuple[int, ...]]:
    return [tuple(_fields(chunk)["offsets"]) for chunk in _fields(item).get("chunks", ())]


def _pickled(name: str) -> dict[str, Any]:
    with open(name, "rb") as file:
        text = file.read()
    try:
        fields = _fields(Unpickler(text).load())
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{name}: {error.message}", error.hint) from error
    if not {"state_dict_metadata", "storage_data"} <= fields.keys():
        raise CorruptCheckpoint(f"{name} is no metadata of torch.distributed.checkpoint")
    return fields


def _places(folder: str, storage: Mapping[Any, Any]) -> dict[tuple[str, Any], _Place]:
    """Where items are, by key and offsets (None of what is no tensor)."""
    places = {}
    for index, info in storage.items():
        of, at = _fields(index), _fields(info)
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
        places[of["fqn"], where] = _Place(os.path.join(folder, name), at["offset"], at["length"])
    return places


def items(root: str) -> list[Extent]:
    """Every item of a checkpoint."""
    return [
        Extent(place.file, place.offset, place.length)
        for folder in folders(root)
        for place in _places(folder, _metadata(folder)["storage_data"]).values()
    ]


def _fields(made: Any) -> dict[str, Any]:
    """The attributes of a dataclass, as it was pickled."""
    state = made.state if isinstance(made, Foreign) else made
    if state is None:  # BytesStorageMetadata has none
        return {}
    if not isinstance(made, Foreign) or not isinstance(state, dict):
        raise CorruptCheckpoint(f"{METADATA} is malformed")
    return state


def _dtype(properties: Any) -> str:
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


def _agree(place: _Place, key: str, held: Any, stated: tuple[str, tuple[int, ...]]) -> None:
    if held != stated:
        raise InconsistentCheckpoint(
            f"{place.file} holds something else at {place.offset} than the {stated[0]} "
            f"{list(stated[1])} of {key} that {METADATA} says"
        )


def _no_number() -> Any:
    raise CorruptCheckpoint("a tensor where a number should be")


def _put(tree: Any, path: tuple[Any, ...], value: Any, room: int) -> int:
    """Sets the value at a path; a number in it is a place in a list.

    Lists may grow by `room` elements altogether; what is left of that is returned.
    """
    if len(path) > MAX_DEPTH:
        raise CorruptCheckpoint(f"{METADATA} names a path of {len(path)} keys")
    here = tree
    for key, following in pairwise((*path, None)):
        if isinstance(here, list):
            room -= max(0, key + 1 - len(here))
            if key < 0 or room < 0:
                raise CorruptCheckpoint(f"{METADATA} names place {key} of a list")
            here.extend([None] * (key + 1 - len(here)))
        known = here[key] if isinstance(here, list) else here.get(key)
        if following is None and known is not None:
            raise CorruptCheckpoint(f"{METADATA} names two values {'.'.join(map(str, path))}")
        if following is None:
            here[key] = value
        elif known is None:
            here[key] = [] if type(following) is int else {}
        here = here[key]
    return room
