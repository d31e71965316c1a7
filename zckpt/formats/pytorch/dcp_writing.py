"""torch.distributed.checkpoint's directories from any manifest, as shells.

torch.distributed.checkpoint.load demands every key of the state dict that a program gives it, and
reads whole items: so keys are complete for torch 2.13, and tensors are cut along their first axis
where the ranks of `--dp N` cut them. Any other number of ranks loads the same files.

Every rank's items are files of their own, `__R_K.distcp`, as if N ranks had saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...dtypes import SIZES, TORCH_NAMES
from ...errors import MissingData
from ...fileio import align
from ...hyper import torch_groups
from ...inert import Foreign, Global, Scalar, Size, TensorName, map_values
from ...manifest import Manifest, slot_key
from ...options import Options
from ...pickling import dumps
from ...staging import Layout, Shell
from ...torchshell import ALIGNMENT, Storages, shell, state_checksums, thawed

VERSION = "1.0.0"  # of the metadata, torch 2.13
SMALL = 64 << 10  # bytes; smaller pieces would cost a rank more to find than to read
OF_TORCH = (
    "engine", "module", "module_extra", "module_metadata",
    "lr_scheduler", "client_state", "optimizer",
)  # fmt: skip
Path = tuple[Any, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along every axis."""


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises WrongOption and MissingData before anything is written.
    """
    options.refuse("torch.distributed.checkpoint", "stage", "config", "dialect")
    target = Target(source, options)
    siblings = [(item.name, item) for item in source.siblings]
    return Layout(target.shells, siblings, target.left_out, target.warnings)


@dataclass(frozen=True, slots=True)
class Hole:
    """A tensor that is to be filled later."""

    dtype: str
    shape: tuple[int, ...]


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


class StateDicts:
    """A manifest as the state dicts that torch's programs save: values and holes by path."""

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.engine = source.state.get("engine") or {}
        own = self.engine if self.engine.get("name") == "torch" else {}
        self.model: Path = tuple(own.get("model", ("model",)))
        self.optimizer: Path = tuple(own.get("optimizer") or ("optim",))
        self.scheduler = own.get("scheduler") or "lr_scheduler"
        kept = own.get("layout")
        self.layout = options.dcp_layout or ("flat" if kept == "flat" else "nested")
        self.warnings = list(source.warnings)
        self.left_out = list(source.left_out)
        self.aliases = {
            alias: name for name, held in source.parameters.items() for alias in held.aliases
        }
        self.groups: list[dict[str, Any]] = []
        states = set(source.slots) - {"param", "master", "state"}
        self.optimizes = not options.weights_only and bool(source.groups is not None or states)
        if self.optimizes:
            self.groups, assumed = torch_groups(source, options)
            self.warnings += assumed

    def items(self) -> Iterator[tuple[Path, Any]]:
        """Every value with its path, in the order in which a program would save them."""
        for name, held in self._weights():
            yield (*self.model, name), held
        if self.options.weights_only:
            return
        if self.optimizes:
            yield from self._optimizer()
        state = self.source.state
        if state.get("lr_scheduler") is not None:
            yield from flattened((self.scheduler,), state["lr_scheduler"])
        for key, held in (state.get("client_state") or {}).items():
            yield from flattened((str(key),), held)

    # -- the model

    def _weights(self) -> Iterator[tuple[str, Any]]:
        source = self.source
        extra = source.state.get("module_extra") or {}
        names = source.state.get("module") or [
            *source.parameters, *source.buffers, *self.aliases
        ]  # fmt: skip
        for name in names:
            owner = self.aliases.get(name, name)
            if name in extra:
                yield name, extra[name]
            elif owner in source.parameters:
                yield name, Hole(self._dtype(owner), source.parameters[owner].shape)
            elif f"{owner}/param" in source.entries:
                entry = source.entries[f"{owner}/param"]
                yield name, Hole(entry.dtype, entry.shape)

    def _dtype(self, name: str) -> str:
        """What the module holds: what its optimizer updates, which are masters where there are."""
        entries = self.source.entries
        held = entries.get(f"{name}/master") or entries.get(f"{name}/param")
        if held is None:
            raise MissingData(f"the source holds no weights of {name}")
        return self.options.module_dtype or held.dtype

    # -- the optimizer

    def _optimizer(self) -> Iterator[tuple[Path, Any]]:
        for name, held in self._states():
            for key, value in held.items():
                yield from flattened(self._state_path(name, key), value)
        for place, group in enumerate(self.groups):
            members = self.members(place)
            if self.layout == "nested":
                for key, value in group.items():
                    yield from flattened((*self.optimizer, "param_groups", place, key), value)
                yield (*self.optimizer, "param_groups", place, "params"), members
                continue
            for name in members:
                for key, value in group.items():
                    yield from flattened((*self.optimizer, f"param_groups.{name}.{key}"), value)

    def members(self, group: int) -> list[str]:
        """The names of a group's parameters, in the optimizer's order."""
        return [
            name
            for name, held in self.source.parameters.items()
            if held.trainable and (held.group or 0) == group
        ]

    def _state_path(self, name: str, key: str) -> Path:
        if self.layout == "flat":
            return (*self.optimizer, f"state.{name}.{key}")
        return (*self.optimizer, "state", name, key)

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every trainable parameter's state, as torch's optimizers keep it."""
        source = self.source
        slots = [slot for slot in source.slots if slot not in ("param", "master", "state")]
        kept = source.state.get("optimizer") or {}
        own = self.engine.get("name") == "torch"
        kind = (kept.get("step") or {}).get("type", "F32") if own else "F32"
        other = kept.get("other") or {}
        for name, held in source.parameters.items():
            state: dict[str, Any] = {}
            if held.step is not None:
                number = Scalar(held.step, kind) if kind in SIZES else int(held.step)
                state["step"] = number
            state |= held.scalars
            for slot in slots:
                entry = source.entries.get(f"{name}/{slot}")
                if entry is not None:
                    state[slot_key(slot)] = Hole(entry.dtype, entry.shape)
            state |= other.get(name) or {}
            if state:
                yield name, state


def flattened(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Values by path, as torch.distributed.checkpoint flattens state dicts (torch 2.4 to 2.13).

    Dictionaries are entered, and lists that hold dictionaries or tensors.
    """
    if isinstance(value, dict):
        for key, held in value.items():
            yield from flattened((*path, str(key)), held)
    elif isinstance(value, list) and any(map(_is_entered, value)):
        for place, held in enumerate(value):
            yield from flattened((*path, place), held)
    else:
        yield path, value


def _is_entered(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_entered, value))
    return isinstance(value, (dict, Hole, Scalar, TensorName))


class Target:
    """What is decided before the first byte is written."""

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.world = options.dp or source.dp
        self.dicts = StateDicts(source, options)
        self.warnings = self.dicts.warnings
        self.left_out = [*self.dicts.left_out, *left_out(source, options)]
        self.items = list(self.dicts.items())
        self._made: dict[tuple[str, tuple[int, ...]], Shell] = {}

    def shells(self) -> Iterator[Shell]:
        """Every file, one at a time; `.metadata` last."""
        placed: list[_Placed] = []
        for rank in range(self.world):
            for place, items in enumerate(self._files(rank)):
                name = f"__{rank}_{place}.distcp"
                size, parts = 0, []
                for item, made in items:
                    start = align(size, ALIGNMENT)
                    parts += [(start + offset, data) for offset, data in made.parts]
                    size = start + made.size
                    placed.append(_Placed(item, name, (start, made.size)))
                yield Shell(name, size, tuple(parts))
        text = dumps(self._metadata(placed), lambda _: None)
        yield Shell(".metadata", len(text), ((0, text),))

    def _files(self, rank: int) -> Iterator[list[tuple[_Item, Shell]]]:
        """A rank's items with their shells, in files of at most `--max-file-size`."""
        held: list[tuple[_Item, Shell]] = []
        size = 0
        for path, value in self.items:
            for item, made in self._of_rank(".".join(map(str, path)), value, rank):
                if held and size + made.size > self.options.max_file_size:
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
                yield _Item(key, ((), ())), _item(storages.scalar(value), storages)
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
            return Hole(value.dtype, ())
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

    def _metadata(self, placed: Sequence[_Placed]) -> Foreign:
        chunks: dict[str, list[Box]] = {}
        for each in placed:
            if each.item.box is not None:
                chunks.setdefault(each.item.key, []).append(each.item.box)
        listed: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        names: dict[str, list[str]] = {}
        for path, value in self.items:
            key = ".".join(map(str, path))
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
        source = self.source
        frozen = [name for name, held in source.parameters.items() if not held.trainable]
        known = {
            "aliases": self.dicts.aliases,
            "buffers": list(source.buffers),
            "frozen": frozen,
            "names": names,
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


def left_out(source: Manifest, options: Options) -> list[str]:
    """What of the source's state torch's programs have no place for."""
    if options.weights_only:
        return []
    kept = dict(source.state.get("optimizer") or {})
    for key in ("other", "step", "group_step"):
        kept.pop(key, None)
    lost = [f"optimizer.{key}" for key, held in kept.items() if held is not None]
    lost += [key for key, held in source.state.items() if held and key not in OF_TORCH]
    engine = (source.state.get("engine") or {}).get("name")
    return [f"{', '.join(lost)}: {engine}'s own"] if lost else []


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
