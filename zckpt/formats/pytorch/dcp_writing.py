"""torch.distributed.checkpoint's directories from any manifest, as shells.

torch.distributed.checkpoint.load demands every key of the state dict that a program gives it, and
reads whole items: so keys are complete for torch 2.13, and tensors are cut along their first axis
where the ranks of `--dp N` cut them. Any other number of ranks loads the same files.

Every rank's items are files of their own, `__R_K.distcp`, as if N ranks had saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ... import peft
from ...dtypes import SIZES, TORCH_NAMES
from ...errors import UnsupportedCheckpoint
from ...fileio import align
from ...inert import Foreign, Global, Scalar, Size, TensorName, map_values
from ...manifest import Manifest
from ...options import Options
from ...pickling import dumps
from ...staging import Layout, Shell
from ...torchshell import ALIGNMENT, Storages, shell, state_checksums, thawed
from ...trainers import TRANSFORMERS, program_of
from .state_dicts import Hole, StateDicts, left_out
from .tree import Path, dotted

VERSION = "1.0.0"  # of the metadata, torch 2.13
SMALL = 64 << 10  # bytes; smaller pieces would cost a rank more to find than to read
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along every axis."""


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises WrongOption and MissingData before anything is written.
    """
    understood = ("dp", "dtype", "dcp_layout", "max_file_size", "group_defaults")
    options.only("dcp", understood, dialects=("accelerate",))
    target = Target(source, options)
    siblings = [(item.name, item) for item in source.siblings]
    about = "a directory of torch.distributed.checkpoint, which any number of ranks loads"
    return Layout(target.shells, siblings, target.left_out, target.warnings, about=about)


@dataclass(frozen=True, slots=True)
class _Item:
    """One item of a `.distcp` file: a box of a tensor, or a value."""

    key: str
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where an item lies."""

    item: _Item
    file: str
    extent: tuple[int, int]  # offset and length in bytes


class Target:
    """What is decided before the first byte is written."""

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.world = options.dp or source.dp
        self.dicts = StateDicts(source, options)
        self.warnings = self.dicts.warnings
        self.left_out = self.dicts.left_out
        self.left_out += [*left_out(source, options), *self.dicts.collisions()]
        self.parts = self._parts()
        self._made: dict[tuple[str, tuple[int, ...]], Shell] = {}
        self._metadata: dict[str, bytes] = {}

    def _parts(self) -> dict[str, list[tuple[Path, Any]]]:
        """Items by folder: one for all, or Accelerate's for the model and for the optimizer."""
        dicts, engine = self.dicts, self.source.state.get("engine") or {}
        before = engine.get("folders")
        if self.options.dialect != "accelerate" and not before:
            return {"": list(dicts.items())}
        of_trainer = program_of(self.source.siblings) == TRANSFORMERS
        if of_trainer and (others := peft.other_adapters(self.source.parameters)):
            raise UnsupportedCheckpoint(
                f"the source has the adapter {', '.join(others)}: of accelerate's folders zckpt "
                f"writes those whose adapter is called {peft.ADAPTER}",
                hint="choose --to deepspeed, or --to gathered --dialect safetensors",
            )
        if engine.get("adapter") or (
            of_trainer and any(map(peft.is_adapters, self.source.parameters))
        ):
            dicts.save_adapter_alone()  # as the Trainer does with PEFT and FSDP
        if not before:  # Accelerate's own keys
            dicts.model, dicts.optimizer = ("model",), ("optimizer",)
        folders = {dicts.model: "pytorch_model_fsdp_0", dicts.optimizer: "optimizer_0"}
        parts: dict[str, list[tuple[Path, Any]]] = {}
        lost: dict[Any, None] = {}
        for path, value in dicts.items():
            root = next((folder for at, folder in folders.items() if path[: len(at)] == at), None)
            if root is None:
                lost[path[0]] = None
            else:
                parts.setdefault(root, []).append((path, value))
        self.left_out += [f"{key}: Accelerate keeps such things in other files" for key in lost]
        return parts

    def shells(self) -> Iterator[Shell]:
        """Every file, one at a time; a folder's `.metadata` last."""
        for folder, items in self.parts.items():
            for made in self._folder(folder, items):
                yield Shell(os.path.join(folder, made.name), made.size, made.parts)

    def _folder(self, folder: str, listed: Sequence[tuple[Path, Any]]) -> Iterator[Shell]:
        placed: list[_Placed] = []
        for rank in range(self.world):
            for place, items in enumerate(self._files(listed, rank)):
                name = f"__{rank}_{place}.distcp"
                size, parts = 0, []
                for item, made in items:
                    start = align(size, ALIGNMENT)
                    parts += [(start + offset, data) for offset, data in made.parts]
                    size = start + made.size
                    placed.append(_Placed(item, name, (start, made.size)))
                yield Shell(name, size, tuple(parts))
        if folder not in self._metadata:  # it is the same the second time
            self._metadata[folder] = dumps(self._describe(listed, placed), lambda _: None)
        text = self._metadata[folder]
        yield Shell(".metadata", len(text), ((0, text),))

    def _files(
        self, listed: Sequence[tuple[Path, Any]], rank: int
    ) -> Iterator[list[tuple[_Item, Shell]]]:
        """A rank's items with their shells, in files of at most `--max-file-size`."""
        held: list[tuple[_Item, Shell]] = []
        size = 0
        for path, value in listed:
            for item, made in self._of_rank(dotted(path), value, rank):
                if held and size + made.size > self.options.file_size:
                    yield held
                    held, size = [], 0
                held.append((item, made))
                size += align(made.size, ALIGNMENT)
        if held:
            yield held

    def _of_rank(self, key: str, value: Any, rank: int) -> Iterator[tuple[_Item, Shell]]:
        """What a rank holds of a value: its rows of a tensor; rank 0 all that is not cut."""
        hole = self._hole(value)
        if isinstance(value, Scalar):
            if not rank:
                storages = Storages()
                box = (0,) * len(value.shape), value.shape
                yield _Item(key, box), _item(storages.scalar(value), storages)
        elif hole is not None:
            shape, rows = hole.shape, self._rows(hole)
            count = shape[0] if shape else 1
            start = rank * -(-count // self.world)
            if start % rows or (start >= count and rank):
                return
            sizes = shape and (min(rows, count - start), *shape[1:])
            offsets = shape and (start, *(0 for _ in shape[1:]))
            yield _Item(key, (offsets, sizes)), self._tensor(hole.dtype, sizes)
        elif not rank:
            storages = Storages()
            frozen = thawed(value, self.source.entries, storages)
            yield _Item(key), _item(frozen, storages)

    def _hole(self, value: Any) -> Hole | None:
        """The tensor that a value is, or stands for."""
        if isinstance(value, TensorName):
            entry = self.source.entries[f"{value.name}/state"]
            return Hole(entry.dtype, entry.shape)
        if isinstance(value, Scalar):
            return Hole(value.dtype, value.shape)
        return value if isinstance(value, Hole) else None

    def _rows(self, hole: Hole) -> int:
        """Rows in a piece: those of one rank, or of several neighbours where these are small."""
        if not hole.shape or not prod(hole.shape):
            return hole.shape[0] or 1 if hole.shape else 1
        own = -(-hole.shape[0] // self.world)
        length = prod(hole.shape[1:]) * SIZES[hole.dtype]
        return own * max(1, -(-SMALL // (own * length)))

    def _tensor(self, dtype: str, sizes: tuple[int, ...]) -> Shell:
        """Equal tensors have equal shells."""
        if (dtype, sizes) not in self._made:
            storages = Storages()
            self._made[dtype, sizes] = _item(storages.tensor(dtype, sizes), storages)
        return self._made[dtype, sizes]

    # -- .metadata

    def _describe(self, items: Sequence[tuple[Path, Any]], placed: Sequence[_Placed]) -> Foreign:
        chunks: dict[str, list[Box]] = {}
        for each in placed:
            if each.item.box is not None:
                chunks.setdefault(each.item.key, []).append(each.item.box)
        listed: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        names: dict[str, list[str]] = {}
        for path, value in items:
            key = dotted(path)
            paths[key] = path
            if (hole := self._hole(value)) is not None:
                listed[key] = _tensor_metadata(hole, chunks[key])
            else:
                listed[key] = _record("metadata.BytesStorageMetadata")
            if held := list(_tensor_names(value)):
                names[key] = held
        storage = {
            _index(each.item): _record(
                "filesystem._StorageInfo",
                relative_path=each.file,
                offset=each.extent[0],
                length=each.extent[1],
            )
            for each in placed
        }
        known = {
            **self.dicts.unsaid(),
            "names": names,
            "numbers": list(self.dicts.numbers),  # the optimizer's parameters, in its order
        }
        return _record(
            "metadata.Metadata",
            state_dict_metadata=listed,
            planner_data=paths,
            storage_data=storage,
            storage_meta=None,
            version=VERSION,
            zckpt=known,  # what state dicts do not say; torch has no use for it
        )


def _tensor_names(value: Any) -> Iterator[str]:
    """The tensors in a value, by name, in the order in which they stand."""
    if isinstance(value, TensorName):
        yield value.name
    found: list[str] = []
    map_values(value, lambda held, _: found.extend(_tensor_names(held)))
    yield from found


def _item(value: Any, storages: Storages) -> Shell:
    return shell("archive", value, storages)


def _record(name: str, **state: Any) -> Foreign:
    """An object of one of torch.distributed.checkpoint's dataclasses."""
    return Foreign(Global(f"torch.distributed.checkpoint.{name}"), (), state or None, "new")


def _index(item: _Item) -> Foreign:
    offset = None if item.box is None else Size(item.box[0])
    return _record("metadata.MetadataIndex", fqn=item.key, offset=offset, index=None)


def _tensor_metadata(hole: Hole, chunks: Sequence[Box]) -> Foreign:
    properties = _record("metadata.TensorProperties")
    properties.state = (
        Global(f"torch.{TORCH_NAMES[hole.dtype]}"),
        Foreign(Global("torch.serialization._get_layout"), ("torch.strided",)),
        False,
        Foreign(Global("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return _record(
        "metadata.TensorStorageMetadata",
        properties=properties,
        size=Size(hole.shape),
        chunks=[
            _record("metadata.ChunkStorageMetadata", offsets=Size(offsets), sizes=Size(sizes))
            for offsets, sizes in chunks
        ],
    )


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every record into the zip directory of its item."""
    from .dcp import items

    crcs: dict[str, dict[int, int]] = {}
    for extent, crc in outcome.records.items():
        crcs.setdefault(extent.file, {})[extent.offset] = crc
    for item in items(root):
        state_checksums(item, crcs.get(item.file, {}))
