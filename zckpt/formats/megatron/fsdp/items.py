"""The items of Megatron-FSDP's directories: their keys by what they are, their values and tensors.

A key is found by its path in the saved state, which `.metadata` keeps: names have dots of their
own. See directories.py for the keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.fragments import Record
from ....core.inert import TensorName, inside
from ....core.manifest import Entry
from ....errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from ....files.dcpfile import ItemTable, KeyPath, read_table, shown
from ....files.dcpitems import ItemFiles
from ....files.torchfile import Tensor, TorchFile
from ...statedict.tree import TensorPiece, assembled
from ..common import WEIGHTS_ONLY
from ..names import OF_MODULE, with_own_expert, with_plain_norms

MODEL = re.compile(r"model\d*")
WRAPPERS = re.compile(r"(?:module\.)+")
HALF = re.compile(r"(?P<name>.*\blinear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
STATES, GROUPS = "state", "param_to_group_meta"

Keys = dict[str, str]
"""Keys of items, by names in the saved state."""


class FsdpItems:
    """All keys of a directory, and what was read of them.

    `weights` and `modules` (their own states) are by the name in the model, `states` by slot and
    name, `metas` by name and by the name of a group's value, `others` by path.
    """

    def __init__(self, folder: str, weights_only: bool) -> None:
        self.folder = folder
        self.table: ItemTable = read_table(folder)
        self.files = ItemFiles()
        self.file: TorchFile | None = None  # the last one of a value
        self.records: list[Record] = []
        self.entries: dict[str, Entry] = {}
        self.chunks: set[str] = set()
        self.weights: Keys = {}
        self.modules: Keys = {}
        self.states: dict[str, Keys] = {}
        self.metas: dict[str, Keys] = {}
        self.others: dict[KeyPath, str] = {}
        for key in self.table.items:
            if key not in self.table.paths:
                raise UnsupportedCheckpoint(
                    f"{folder} does not say which value {shown(key)} was in the saved state",
                    hint="save it with torch's DefaultSavePlanner, as Megatron-LM does",
                )
        for key, path in self.table.paths.items():
            if key in self.table.items:
                self._sort(key, path, weights_only)

    def _sort(self, key: str, path: KeyPath, weights_only: bool) -> None:
        first, *names = map(str, path)
        if MODEL.fullmatch(first) and len(names) == 1:
            self.chunks.add(first)
            into = self.modules if names[0].endswith(OF_MODULE) else self.weights
            into[names[0]] = key
        elif first != "optimizer":
            self.others[path] = key
        elif weights_only:
            pass
        elif len(names) == 3 and names[0] == STATES:
            self.states.setdefault(names[2], {})[names[1]] = key
        elif len(names) == 3 and names[0] == GROUPS:
            self.metas.setdefault(names[1], {})[names[2]] = key
        else:
            raise UnsupportedCheckpoint(
                f"{self.folder} has {shown(key)}, which is no state of a weight that zckpt knows",
                hint=WEIGHTS_ONLY,
            )

    def paths(self) -> tuple[str, ...]:
        """The files of the directory that were opened."""
        return (*self.table.files, *sorted(self.files.sizes))

    def strangers(self) -> list[str]:
        """Names in the directory that are none of its own files."""
        own = {*self.table.files, *(each.file for each in self.table.locations.values())}
        with os.scandir(self.folder) as items:
            return sorted(item.name for item in items if item.path not in own)

    # -- values

    def tree(self, place: str, *begin: str) -> Any:
        """The values whose paths begin so, nested as they were saved; `place` is the tree's own."""
        tree: dict[Any, Any] = {}
        for path, key in self.others.items():
            if path[: len(begin)] != begin:
                continue
            inner, where = tree, place
            rest = ("", *path[len(begin) :])
            for step in rest[:-1]:
                where = inside(where, step) if step != "" else where
                inner = inner.setdefault(step, {})
                if not isinstance(inner, dict):
                    raise CorruptCheckpoint(f"{self.folder}: {shown(key)} is inside of a value")
            inner[rest[-1]] = self.value(key, inside(where, rest[-1]))
        return _with_lists(tree.get("", {}))

    def value(self, key: str, place: str) -> Any:
        """A value with its tensors as entries of slot `state`; 0-d ones by value."""
        item = self.table.items[key]
        if item is None:
            self.file = file = self.files.torch_file(self.table.location(key))
            self.records += file.records.values()
            return file.kept(file.value, place, self.entries)
        if not item.shape:
            return self.number(key)
        fragments = assembled(shown(key), item.dtype, item.shape, self._pieces(key))
        self.entries[f"{place}/state"] = Entry(f"{place}/state", item.dtype, item.shape, fragments)
        return TensorName(place)

    def number(self, key: str) -> Any:
        """A value that has no tensor but a 0-d one."""
        item, count = self.table.items[key], len(self.entries)
        if item is None:
            value = self.value(key, key)
        elif item.shape or len(item.boxes) != 1:
            raise UnsupportedCheckpoint(f"{self.folder}: {shown(key)} is not one number")
        else:
            file = self.files.torch_file(self.table.location(key, item.boxes[0]))
            self.records += file.records.values()
            value = file.scalar(file.value) if isinstance(file.value, Tensor) else file.value
        if len(self.entries) > count:
            raise UnsupportedCheckpoint(f"{self.folder}: {shown(key)} has tensors")
        return value

    def file_of(self, key: str) -> str:
        """The file of a value, or of a tensor in one box."""
        item = self.table.items[key]
        return self.table.location(key, item.boxes[0] if item else None).file

    # -- tensors

    def enter(self, name: str, slot: str, keys: Sequence[str]) -> Entry:
        """Enters a tensor; the rows of a second key come after those of the first."""
        pieces: list[TensorPiece] = []
        shapes, dtypes, rows = set(), set(), 0
        for key in keys:
            item = self.table.items[key]
            if item is None or (not item.shape and len(keys) > 1):
                raise UnsupportedCheckpoint(f"{self.folder}: {shown(key)} is not a tensor")
            pieces += self._pieces(key, rows)
            rows += item.shape[0] if item.shape else 0
            dtypes.add(item.dtype)
            shapes.add(item.shape)
        if len(shapes) > 1 or len(dtypes) > 1:
            raise InconsistentCheckpoint(f"{self.folder}: the halves of {name} are not alike")
        shape, dtype = shapes.pop(), dtypes.pop()
        shape = (rows, *shape[1:]) if shape else shape
        fragments = assembled(f"{name} in {self.folder}", dtype, shape, pieces)
        entry = Entry(f"{name}/{slot}", dtype, shape, fragments)
        self.entries[entry.name] = entry
        return entry

    def _pieces(self, key: str, rows: int = 0) -> list[TensorPiece]:
        """The boxes of a tensor, `rows` further down than they are under its key."""
        pieces = []
        for box, file in self.files.boxes(self.table, key):
            tensor: Tensor = file.value
            self.records += file.records.values()
            offsets = (box.offsets[0] + rows, *box.offsets[1:]) if rows else box.offsets
            extent = file.whole(tensor)
            pieces.append(TensorPiece(offsets, box.sizes, tensor.strides, tensor.offset, extent))
        return pieces


def plain_name(raw: str) -> str:
    """A name without the wrappers, with experts and norms as the local spec calls them."""
    match = WRAPPERS.match(raw)
    return with_plain_norms(with_own_expert(raw[match.end() :] if match else raw))


def joined(folder: str, keys: Mapping[str, str]) -> dict[str, list[str]]:
    """The keys of every parameter: one, or those of its gate and of the other half."""
    parts: dict[str, dict[str, str]] = {}
    for raw, key in keys.items():
        match = HALF.fullmatch(raw)
        name, half = (plain_name(match["name"]), match["half"]) if match else (plain_name(raw), "")
        halves = parts.setdefault(name, {})
        if half in halves:
            raise InconsistentCheckpoint(f"{folder}: two keys hold {name}")
        halves[half] = key
    for name, halves in parts.items():
        if halves.keys() not in ({""}, {"w", "v"}):
            raise IncompleteCheckpoint(f"{folder} has not both halves of {name}, and these alone")
    return {name: [parts[name][half] for half in sorted(parts[name])[::-1]] for name in parts}


def _with_lists(value: Any) -> Any:
    """The value with lists for dictionaries whose keys are the numbers of their items."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items) and max(items) == len(items) - 1:
        return [items[key] for key in sorted(items)]
    return items
