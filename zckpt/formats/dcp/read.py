"""The manifest of a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...core.inert import Foreign
from ...core.manifest import Manifest
from ...errors import CorruptCheckpoint, IncompleteCheckpoint, NotACheckpoint, not_understood
from ...files.dcpfile import (
    METADATA,
    ItemFiles,
    Place,
    agree,
    dtype_of,
    fields_of,
    metadata,
    places_of,
)
from ...files.torchfile import Tensor, TorchFile
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
from .files import detect, detect_weak, located, own_files

if TYPE_CHECKING:
    from ...core.staging import Layout
    from ...training.options import Options

__all__ = ["METADATA", "detect", "detect_weak", "lay_out", "located", "read", "seal"]

MAX_LIST = 1_000_000  # elements of all lists
MAX_DEPTH = 100


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
        siblings, left_out = beside(root, [*parts, *shards, *own_files(root, parts)])
        found.siblings += siblings
        found.left_out += left_out
        return manifest(found, step_policy, param_names, weights_only)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(root, error) from error


class _Folder:
    """One directory with a `.metadata`."""

    def __init__(self, folder: str, found: Found) -> None:
        self.folder = folder
        self.found = found
        self.files = ItemFiles(folder)
        self.names: Mapping[str, list[str]] = {}

    def read(self) -> None:
        """Puts every item into the tree, in the order of the saved state."""
        fields = metadata(self.folder)
        items: dict[str, Any] = fields["state_dict_metadata"]
        paths: Mapping[str, Any] = fields.get("planner_data") or {}
        places = places_of(self.folder, fields["storage_data"])
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
        self.found.files += sorted(self.files.sizes)

    def _item(self, key: str, item: Foreign, places: Mapping[Any, Place]) -> Any:
        fields, names = fields_of(item), iter(self.names.get(key, ()))
        if "chunks" not in fields:
            place = places.get((key, None))
            if place is None:
                raise IncompleteCheckpoint(f"{self.folder}: {METADATA} does not say where {key} is")
            file = self.files.file(place)
            self.found.records += file.records.values()
            return leaves(file, file.value, names)
        shape = tuple(fields["size"])
        dtype = dtype_of(fields["properties"])
        pieces: list[Piece] = []
        parts: list[tuple[tuple[int, ...], Tensor, TorchFile]] = []
        number = None
        for chunk in map(fields_of, fields["chunks"]):
            offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            if 0 in sizes:
                continue
            place = places.get((key, offsets))
            if place is None:
                raise IncompleteCheckpoint(
                    f"{self.folder}: {METADATA} does not say where {key} at {list(offsets)} is"
                )
            stored = self.files.stored(place, key)
            if stored is not None:
                agree(place, key, (stored.dtype, stored.shape), (dtype, sizes))
                pieces.append(solid_piece(stored, offsets))
                number = number_of(stored)
                continue
            file = self.files.file(place)
            tensor = file.value
            held = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
            agree(place, key, held, (dtype, sizes))
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


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a target; see dcp_writing.py, which reading has no need of."""
    from . import write as dcp_writing

    return dcp_writing.lay_out(source, options)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """What is known only when all tensors are there: the records' checksums."""
    from . import write as dcp_writing

    dcp_writing.seal(root, manifest, outcome)
