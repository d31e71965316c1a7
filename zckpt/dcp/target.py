"""Fills the part of a state dict that one process loads.

All keys are looked up first. If keys are missing, one error names them all, and nothing has been
changed. Then values are set and tensors are read.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner

from ..core.checkpoint.dtypes import FROM_TORCH
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.inert import Scalar, TensorName
from ..core.checkpoint.weights import WEIGHTS, WIDE, Weight, is_widened
from ..core.passes.loading import as_torch
from ..core.storage.fragments import Record
from ..errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint, listed
from ..formats.dcp.items import OpenedItem, StoredTensor, StoredValue
from ..training.steps import WRITTEN
from . import lacking, regions
from .groups import Groups
from .keys import KeyMeaning
from .regions import BoxRegion
from .source import Source
from .values import NotLoaded, rebuilt, scalar

BYTES = planner.LoadItemType.BYTE_IO
DTYPES = {getattr(torch, name): dtype for name, dtype in FROM_TORCH.items() if hasattr(torch, name)}
GROUP = re.compile(r"((?:^|.*?\.)param_groups\.\d+\.)[^.]+")


class LoadTarget:
    """What one process loads: the items of its plan, and the planner's state dict to fill."""

    def __init__(
        self, source: Source, filler: planner.LoadPlanner, items: Sequence[planner.ReadItem]
    ) -> None:
        self.source = source
        self.planner = filler
        # a planner that is not torch's may lack `state_dict`; then the target's values are unknown
        self.state: Mapping[str, Any] = getattr(filler, "state_dict", {})
        self.values = [item for item in items if item.type == BYTES]
        self.tensors = [item for item in items if item.type != BYTES]
        keys = dict.fromkeys(item.storage_index.fqn for item in items)
        self.lookup = lacking.Lookup(source, {key: source.meaning(key) for key in keys})
        self.meanings = self.lookup.meanings
        self.records: dict[Record, None] = {}  # that the tensors are read from
        self.kept: dict[str, None] = {}  # hyper-parameters that the source lacks
        self.assumes = False  # whether defaults replace hyper-parameters that the source lacks
        self._regrouped: dict[str, bool] = {}

    def fill(self) -> None:
        """Fills the items of the plan.

        Raises MissingData if the checkpoint lacks a key. Raises other ZckptErrors too.
        """
        values = [(item, value) for item in self.values for value in self._values(item)]
        self._refuse_gaps()
        entries = [(item, entry) for item in self.tensors for entry in self._entries(item)]
        self.lookup.report(bool(getattr(self.planner, "allow_partial_load", False)))
        self._warn()
        with torch.no_grad():
            for item, value in values:
                self._put(item, value)
            self._fill_tensors(entries)

    def _warn(self) -> None:
        if self.kept:
            warnings.warn(
                f"{self.source.path} lacks the hyper-parameters {listed(list(self.kept))}: they "
                "keep the program's values",
                stacklevel=2,
            )
        for notice in self.source.listing.assumed if self.assumes else ():
            warnings.warn(f"{self.source.path}: {notice.message}", stacklevel=2)

    # -- values that are not tensors in the source

    def _values(self, item: planner.ReadItem) -> list[Any]:
        """The value of an item of the load plan, in a list of one.

        The list is empty if the value cannot be loaded, or if the program keeps its own.
        """
        key = item.storage_index.fqn
        if key in self.lookup.missing:
            return []
        try:
            return self._looked_up(key, item.dest_index.fqn)
        except (NotLoaded, UnsupportedCheckpoint) as error:
            self.lookup.not_loaded[key] = error
        return []

    def _looked_up(self, key: str, name: str) -> list[Any]:
        """The checkpoint's value under `key`, in a list; empty if nothing is set.

        `name` is the key in the program's state dict.
        """
        meaning, stored = self.meanings[key], self.source.listing.items.get(key)
        if isinstance(meaning, StoredTensor):  # a step, which may be an int in the target
            number = self._box(key, meaning, ())
            return [as_torch(number.entry(number.value), number.records)]
        if isinstance(meaning, StoredValue):
            if self._is_regrouped(key):
                return self._hyper_parameter(key, name)
            return [_rebuilt(meaning)]
        if isinstance(meaning, KeyMeaning) and meaning.kind == "group":
            return self._hyper_parameter(key, name)
        if isinstance(meaning, KeyMeaning) and meaning.kind == "extra":
            assert self.source.names is not None
            return [rebuilt(self.source.names.extra[meaning.name], self._tensor)]
        if isinstance(meaning, KeyMeaning) and meaning.kind == "state":
            step_or_number = self._number(meaning)
            if step_or_number is not None:
                return [scalar(step_or_number)]
            if name in self.state and self.state[name] is None:  # SGD without momentum
                return []
        if isinstance(stored, StoredValue):
            return [_rebuilt(stored)]
        self.lookup.missing[key] = None
        return []

    def _tensor(self, name: TensorName) -> torch.Tensor:
        manifest = self.source.manifest
        return as_torch(manifest.entries[name.name, "state"], manifest.files.records)

    def _number(self, meaning: KeyMeaning) -> Scalar | None:
        """The number in a 0-dimensional optimizer state; None if the state is not one number."""
        manifest = self.source.manifest
        parameter = manifest.parameters[meaning.name]
        if meaning.slot == "step":
            place = WRITTEN["torch"]
            return None if parameter.step is None else place.number(parameter.step)
        return manifest.states.scalars.get(meaning.name, {}).get(meaning.slot)

    # -- hyper-parameters

    @cached_property
    def _groups(self) -> Groups | None:
        names = self.source.names
        if names is None:
            return None
        keys = {key: each for key, each in self.lookup.by_name.items() if each.kind == "group"}
        return Groups(names, self.source.groups, self.state, keys)

    def _is_regrouped(self, key: str) -> bool:
        """Whether a parameter group of the program has other parameters than the source's.

        `key` contains the group's number; the source's group of the same number is compared.
        """
        match = GROUP.fullmatch(key)
        if match is None:
            return False
        front = match[1]
        if front not in self._regrouped:
            self._regrouped[front] = self._has_other_members(key, f"{front}params")
        return self._regrouped[front]

    def _has_other_members(self, key: str, members: str) -> bool:
        wanted, stored = self.state.get(members), self.source.listing.items.get(members)
        if not isinstance(wanted, (list, tuple)) or not isinstance(stored, StoredValue):
            return False
        if list(wanted) == stored.open().value or self._groups is None:
            return False
        meaning = self._groups.names.meaning(key)
        if meaning is None or meaning.kind != "group":
            return False
        return bool(self._groups.sources(meaning))

    def _hyper_parameter(self, key: str, name: str) -> list[Any]:
        """The value for a hyper-parameter's key, in a list; empty to leave the program's value.

        The value is that of the parameters' group in the source. If the source has none, the value
        stored under `key` replaces only a placeholder (see `_is_blank`).
        """
        groups, stored = self._groups, self.source.listing.items.get(key)
        assert groups is not None
        meaning = groups.names.meaning(key)
        assert meaning is not None
        # the target decides which parameters a group has
        values = groups.values(meaning) if meaning.slot != "params" else []
        if values:
            return [rebuilt(value, self._tensor) for value in values]
        if isinstance(stored, StoredValue) and self._is_blank(meaning, name):
            value = _rebuilt(stored)
            self.assumes |= value is not None
            return [value]
        if meaning.slot != "params" and (
            groups.sources(meaning) or not groups.names.manifest.groups
        ):
            self.kept[meaning.slot] = None
        return []

    def _is_blank(self, meaning: KeyMeaning, name: str) -> bool:
        """Whether the program has only torch's placeholder for a hyper-parameter, and no value.

        If the key contains a group's number, this is so unless the group's `params` are a list.
        """
        if not meaning.name:
            members = self.state.get(f"{meaning.front}params")
            return not isinstance(members, (list, tuple))
        value = self.state.get(name)
        is_mark = isinstance(value, metadata.BytesStorageMetadata) or value == "<bytes_io>"
        return is_mark or value is None

    def _put(self, item: planner.ReadItem, value: Any) -> None:
        """Stores a value in the state dict, in the type of the value there.

        Fills a tensor in place.
        """
        current = self.state.get(item.dest_index.fqn)
        is_number = isinstance(value, (int, float))
        is_tensor = isinstance(value, torch.Tensor) and not value.shape
        if isinstance(current, torch.Tensor) and (is_number or is_tensor):
            local = getattr(current, "_local_tensor", current)
            local.copy_(value) if is_tensor else local.fill_(value)
            return
        if is_tensor and isinstance(current, (int, float)):
            value = type(current)(value.item())
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        self.planner.load_bytes(item, buffer)

    # -- tensors

    def _entries(self, item: planner.ReadItem) -> list[list[Entry]]:
        """Finds the stored tensors that can fill an item of the load plan.

        Returns a list of one list: of a stored chunk, or of the tensors with the parameter's name,
        such as a weight's value and its fp32 master. Empty if the item cannot be filled.
        """
        key, meaning = item.storage_index.fqn, self.meanings[item.storage_index.fqn]
        if key in self.lookup.missing:
            return []
        if isinstance(meaning, KeyMeaning):
            assert self.source.names is not None
            return [self.source.names.entries(meaning)]
        assert isinstance(meaning, StoredTensor)
        try:
            opened = self._box(key, meaning, _offsets(item))
        except UnsupportedCheckpoint as error:
            self.lookup.not_loaded[key] = error
            return []
        self.records.update(dict.fromkeys(opened.records))
        return [[opened.entry(opened.value)]]

    def _box(self, key: str, tensor: StoredTensor, offsets: tuple[int, ...]) -> OpenedItem:
        box = tensor.boxes.get(offsets)
        if box is None:
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{self.source.path} has no chunk of {key} at offsets {list(offsets)}",
                file=self.source.path,
            )
        return box.open()

    def _refuse_gaps(self) -> None:
        """Raises IncompleteCheckpoint if a part of a wanted tensor is in no stored chunk.

        torch's own reader would leave that part unchanged, without an error.
        """
        for name, tensor in self.state.items():
            stored = self.source.listing.items.get(name)
            if self.source.stored is None or not isinstance(stored, StoredTensor):
                continue
            if stored.stored >= prod(stored.shape) or not isinstance(tensor, torch.Tensor):
                continue
            wanted = sum(part.numel() for part in _local(tensor))
            planned = sum(
                prod(item.lengths)
                for item in self.tensors
                if item.dest_index.fqn == name and _offsets(item) in stored.boxes
            )
            if planned < wanted:
                raise IncompleteCheckpoint(
                    "elements-missing",
                    f"{self.source.path} has {stored.stored} of the {prod(stored.shape)} elements "
                    f"of {name}: the save did not finish, or not all ranks took part in it",
                    file=self.source.path,
                    subject=name,
                )

    def _fill_tensors(self, wanted: Sequence[tuple[planner.ReadItem, Sequence[Entry]]]) -> None:
        targets = [
            (item, self.planner.resolve_tensor(item).detach(), entries) for item, entries in wanted
        ]
        if any(item.storage_index.fqn in self.lookup.by_name for item in self.tensors):
            self.records.update(dict.fromkeys(self.source.manifest.files.records))
        regions.fill(self._regions(targets), list(self.records))
        for item, tensor, _ in targets:
            self.planner.commit_tensor(item, tensor)

    def _regions(
        self, targets: Sequence[tuple[planner.ReadItem, torch.Tensor, Sequence[Entry]]]
    ) -> Iterator[BoxRegion]:
        rounded: dict[str, None] = {}
        for item, tensor, entries in targets:
            entry = _fitting(entries, tensor)
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            if tuple(tensor.shape) != sizes:
                raise InconsistentCheckpoint(
                    "program-does-not-fit",
                    f"{item.storage_index.fqn}: the load plan reads a shard of shape "
                    f"{list(sizes)} into a tensor of shape {list(tensor.shape)}",
                )
            widened = is_widened(entry.dtype, DTYPES.get(tensor.dtype))
            if widened and self._is_trained(item.storage_index.fqn):
                rounded[entry.dtype] = None
            yield BoxRegion(entry, offsets, sizes, tensor)
        if rounded:
            warnings.warn(
                f"{self.source.path} holds no fp32 masters: float32 tensors are filled from "
                f"{listed(list(rounded))}",
                stacklevel=2,
            )

    def _is_trained(self, key: str) -> bool:
        """Whether a key is a weight that an optimizer updates.

        Also True for a key that is loaded unchanged, without a look-up of its parameter.
        """
        meaning = self.meanings[key]
        if not isinstance(meaning, KeyMeaning):
            return True
        parameter = self.source.manifest.parameters.get(meaning.name)
        return meaning.kind == "weight" and parameter is not None and parameter.trainable


def _rebuilt(stored: StoredValue) -> Any:
    """Reads the value that is stored under a key; raises NotLoaded if zckpt cannot restore it."""
    item = stored.open()
    return rebuilt(item.value, lambda tensor: as_torch(item.entry(tensor), item.records))


def _offsets(item: planner.ReadItem) -> tuple[int, ...]:
    return tuple(item.storage_index.offset or ())


def _local(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The shards of a tensor in this process; a plain tensor is its only shard."""
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [getattr(tensor, "_local_tensor", tensor)]


def _fitting(entries: Sequence[Entry], tensor: torch.Tensor) -> Entry:
    """Chooses the stored tensor that fills a tensor.

    For a weight in fp32 or fp64, it is the master if there is one.
    """
    slots = {entry.slot: entry for entry in entries}
    if not WEIGHTS & slots.keys():
        return entries[0]
    dtype = DTYPES.get(tensor.dtype, "")
    weight = Weight(entries[0].parameter, slots.get("param"), slots.get("master"))
    return weight.supply("master" if dtype in WIDE else "param", dtype)
