"""Reads Megatron-Core checkpoints: a key stacks all layers, the manifest has a tensor per layer.

    decoder.layers.mlp.linear_fc2.weight              the weight, as the module stores it
    optimizer.state.param.<key>                       the fp32 master (fully_reshardable)
    optimizer.state.fp32_param.<key>                  the same without the distributed optimizer
    optimizer.state.exp_avg.<key>, exp_avg_sq         moments

If only the optimizer was saved, zckpt uses its masters as weights.

All tensors have the global shape of the key, so no size of tp, pp or ep matters. The rows of a
gated `linear_fc1` are [gate; up] for any tp.

States in flat buffers (buffers/flats.py) become full tensors of single layers, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from ...core.checkpoint.entries import Entry
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.placement import Boxes, Sliced
from ...core.storage import sources
from ...errors import (
    MALFORMED,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    not_understood,
    warning,
)
from ...files.dcpfile import read_table
from ...files.dcpitems import ItemFiles
from ...files.dcptable import ItemTable, TensorItem
from ...files.torchfile import Tensor
from ..reading import USUAL, Reading
from ..statedict.tree import TensorPiece, assembled
from .buffers import flats
from .buffers.order import expert_of
from .buffers.placing import Local
from .buffers.stages import ModelRank, placed
from .common_state import (
    FLAT,
    ITEM,
    MODEL_SPACE,
    OPTIMIZER,
    WEIGHTS_ONLY,
    arguments,
    read_common,
    sharding_of,
    with_groups,
)
from .files import MARKER, OF_FSDP, OF_RANKS, kind_of, locate
from .fsdp import FsdpReader
from .fsdp2 import in_order
from .legacy.directories import LegacyReader
from .manifest import (
    BUFFERS,
    WITH_MODEL,
    Content,
    extra_states,
    manifest_of,
    require_groups,
    require_states_by_parameter,
    size_of,
    without_weights,
)
from .masters import copies as copies
from .masters import rebuilt as rebuilt
from .masters import way_out as way_out
from .names import axes_of, named, places, without_prefix
from .saving_program import arguments_of, beside

OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<key>.+)")
VALUE = re.compile(r"(?P<key>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<grid>\d+(?:\.\d+)*)")


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads an iteration's directory, or the directory of the run that contains it.

    `reading.tp_rules` are used for `mp_rank_*` directories only. With `reading.weights_only`, the
    optimizer's state may be of any type. Raises NotACheckpoint, IncompleteCheckpoint,
    InconsistentCheckpoint, CorruptCheckpoint, MissingData (modules that no rule covers) and
    UnsupportedCheckpoint (zarr, or an optimizer's state that zckpt does not read).
    """
    step_policy, weights_only = reading.step_policy, reading.weights_only
    folder = locate(path, reading.tag)
    kind, why_unused = kind_of(folder), "states how tensor ranks cut parameters"
    try:
        if kind == OF_RANKS:
            legacy = LegacyReader(folder, reading.tp_rules)
            why_unused = "" if legacy.tp > 1 else "has no tensor ranks"
            manifest = legacy.manifest(step_policy, weights_only)
        elif kind == OF_FSDP:
            manifest = FsdpReader(folder, reading).manifest(step_policy)
        else:
            manifest = _Reader(folder, reading).manifest(step_policy)
    except MALFORMED as error:
        raise not_understood(folder, error) from error
    if reading.tp_rules is None or not why_unused:
        return manifest
    message = f"--tp-rules {reading.tp_rules} is not used: {folder} {why_unused}"
    unused = warning("option-without-effect", message, subject="--tp-rules")
    return manifest.replace(warnings=(*manifest.notices.warnings, unused))


class _Reader:
    """Reads the keys of one torch_dist directory, and collects the results in a `Content`."""

    def __init__(self, folder: str, reading: Reading) -> None:
        self.folder = folder
        self.weights_only, self.is_laid = reading.weights_only, reading.laid
        self.table: ItemTable = read_table(folder, reading.laid)
        self.files = ItemFiles(plans=not reading.opens_items, is_laid=reading.laid)
        file, common = read_common(self.table, self.files)
        self.args = arguments(common) or arguments_of(folder)
        self.content = Content(folder, file, common, self.args)
        self.entries, self.shapes = self.content.entries, self.content.shapes
        self.keys: dict[str, int] = {}
        self.key_of: dict[str, str] = {}
        self.pieces: dict[str, list[TensorPiece]] = {}  # of weights
        self.states = [
            (match, key, item)
            for key, item in self.table.items.items()
            if item is not None and (match := OF_OPTIMIZER.fullmatch(key))
        ]
        saved = common.get("content_metadata")
        if isinstance(saved, dict) and saved.get("singleton_local_shards"):
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{folder} was saved with singleton_local_shards, which zckpt does not read: every "
                "expert and each half of a gated layer has a separate key",
                hint="load the checkpoint in Megatron-Core, and save it again without "
                "singleton_local_shards",
                file=folder,
            )

    def manifest(self, step_policy: str | None) -> Manifest:
        content, sharding = self.content, None
        if not self.weights_only:
            require_states_by_parameter(self.folder, self.args)
            content.sharding = sharding = sharding_of(self.table, content.common)
        tensor_ranks = size_of(self.args, "tensor_model_parallel_size") or 1
        require_groups(self.folder, self.args, tensor_ranks)
        self._weights()
        trained = {match["key"] for match, _, _ in self.states}
        content.frozen = {key for key in self.shapes if trained and self.key_of[key] not in trained}
        if sharding in FLAT:
            self._flat_states()
        elif sharding is not None:
            self._states(sharding == MODEL_SPACE)
        if self.pieces:  # a save of the optimizer alone has no keys of modules' own states
            content.keys = self.keys
        content.objects = self._objects(not self.weights_only and sharding not in FLAT)
        own_paths, siblings = (
            [content.file.path, os.path.join(self.folder, MARKER)],
            beside(self.folder),
        )
        content.files = [*self.table.files, *sorted(self.files.sizes), *own_paths]
        content.siblings = siblings.files
        own_paths += (os.path.join(self.folder, each.name.split("/")[0]) for each in siblings.files)
        content.omitted = [*extra_states(self.table, own_paths), *siblings.omitted]
        content.records = self.files.records
        manifest = manifest_of(content, step_policy)
        return manifest.replace(laid={self.folder: self.table}) if self.is_laid else manifest

    # -- tensors

    def _weights(self) -> None:
        """Adds entries for all weights of the model, or for the masters if there are no weights."""
        slot, stacked = "param", {}
        for key, item in self.table.items.items():
            if item is None or OPTIMIZER.fullmatch(key):
                continue
            if without_prefix(key).startswith("module."):
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{self.folder} has {key}: zckpt does not read weights of Megatron-FSDP from a "
                    "torch_dist directory",
                    file=self.folder,
                )
            stacked[key] = key, item
        if not stacked:
            slot, stacked = "master", self._masters()
        for weight, (key, item) in stacked.items():
            self.keys[weight] = axes_of(weight)
            for name, entry in self._parts(key, item, weight, slot):
                self.shapes[name] = entry.shape
                self.key_of[name] = weight

    def _masters(self) -> dict[str, tuple[str, TensorItem]]:
        """Finds fp32 masters to use as weights: {key of the weight: (the master's key, its item)}.

        For directories without weights. Raises UnsupportedCheckpoint for flat buffers, and
        MissingData if there are no masters.
        """
        sharding = sharding_of(self.table, self.content.common)
        # without weights, zckpt cannot find parameters in flat buffers (buffers/placing.py)
        if sharding in (*FLAT, MODEL_SPACE):
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{self.folder} lacks the model's weights, and zckpt needs them to read the "
                f"optimizer's flat buffers ({sharding})",
                hint=WITH_MODEL,
                file=self.folder,
            )
        kept = [each for each in self.states if flats.slot_of(each[0]["slot"]) == "master"]
        if not kept:
            matches = map(OF_OPTIMIZER.fullmatch, self.table.items)
            firsts = (re.split(r"[./]", key)[0] for key in self.table.items)
            other_words = (first for first in firsts if first != "optimizer")
            raise without_weights(
                self.folder, {each["slot"] for each in matches if each}, other_words
            )
        return {match["key"]: (key, item) for match, key, item in kept}

    def _states(self, is_flat: bool) -> None:
        """Adds entries for masters and moments that are stored under the keys of weights.

        `is_flat` states whether these states are flattened slices (buffers/flats.py).
        """
        for key, item in self.table.items.items():
            if not OPTIMIZER.fullmatch(key) or item is None:
                continue
            match = OF_OPTIMIZER.fullmatch(key)
            if match is None or match["key"] not in self.keys:
                raise UnsupportedCheckpoint(
                    "state-unsupported",
                    f"{self.folder}: zckpt does not know the optimizer key {key}, or its weight is "
                    "missing",
                    hint=WEIGHTS_ONLY,
                    file=self.folder,
                )
            slot = flats.slot_of(match["slot"])
            if slot == "master" and not self.pieces:  # entered already
                continue
            parts = self._flat_parts if is_flat else self._parts
            for name, entry in parts(key, item, match["key"], slot):
                if entry.shape != self.shapes.get(name):
                    raise InconsistentCheckpoint(
                        "ranks-disagree",
                        f"{self.folder}: {key} has the shape {list(entry.shape)} for {name}, whose "
                        f"weight has the shape {list(self.shapes.get(name, ()))}",
                        file=self.folder,
                        subject=name,
                    )
        if {"momentum_buffer", "exp_avg"} <= {entry.slot for entry in self.entries.values()}:
            require_states_by_parameter(self.folder, {"optimizer": "muon"})

    def _flat_states(self) -> None:
        """Adds entries for the masters and moments in flat buffers.

        The groups that are saved beside the buffers are added to the common state.
        """
        items = flats.FlatItems(self.table, self.files)
        content, scalers = self.content, items.scalers(self.entries)
        content.steps = items.steps
        content.common = with_groups(content.common, items.groups, scalers)
        are_spread = any(optimizer.has_experts for optimizer in items.optimizers.values())
        numbers = ((name, expert_of(name)) for name in self.shapes if are_spread)
        experts = {name: number for name, number in numbers if number is not None}
        dense_names = [
            name for name in self.shapes if name not in experts and not BUFFERS.fullmatch(name)
        ]
        tp = self._tensor_ranks(dense_names, "tensor_model_parallel_size")
        ranks = items.ranks(tp)
        self._find_in_flat_buffers(dense_names, ranks, tp)
        if experts:
            stages, ep = len(ranks) // tp, size_of(self.args, "expert_model_parallel_size")
            tp = self._tensor_ranks(list(experts), "expert_tensor_parallel_size")
            ranks = items.ranks(tp, stages, ep, max(experts.values()) + 1)
            self._find_in_flat_buffers(list(experts), ranks, tp)

    def _find_in_flat_buffers(
        self, names: Sequence[str], ranks: Sequence[ModelRank], tp: int
    ) -> None:
        """Finds the parameters `names` in flat buffers of `ranks`; adds entries for their states.

        Each of the `tp` tensor ranks has a slice of a parameter, or the full parameter.
        """
        cuts: dict[str, Sliced] = {}
        parts: list[dict[str, Local]] = [{} for _ in range(tp)]
        for name in names:
            entry, pieces = self.entries[name, "param"], self.pieces[name]
            slicing = flats.slicing_of(name, entry.shape, pieces, tp)
            cuts[name] = Sliced(entry.shape, slicing, Boxes("saved so"))
            ordered = sorted(pieces, key=lambda piece: piece.offsets)
            for rank, part in enumerate(parts):
                piece = ordered[rank if len(ordered) >= tp else 0]
                numel = prod(slicing.slices[rank])
                part[name] = flats.local_part(name, numel, entry.dtype, piece)
        places_by_rank = placed(ranks, parts, flats.read_bytes, self.folder)
        states = (
            (rank, entry)
            for rank, places_of_rank in enumerate(places_by_rank)
            for name, homes in places_of_rank.items()
            for flat, place in homes
            for entry in flat.entries(name, place, cuts[name].slicing.slices[rank])
        )
        self.content.join(states, cuts)

    def _tensor_ranks(self, names: Sequence[str], argument: str) -> int:
        """The number of tensor ranks that share the parameters `names`.

        `argument` is the name of the run's argument that states the number. If the arguments lack
        it, the result is the largest number of shards of a weight.
        """
        seen = [len(self.pieces[name]) for name in names if "linear_fc1" not in name]
        return size_of(self.args, argument) or max(seen, default=1)

    def _parts(
        self, key: str, item: TensorItem, stacked: str, slot: str
    ) -> Iterator[tuple[str, Entry]]:
        """Adds one entry for each layer and expert in a key's stacked tensor; yields (name, entry).

        `stacked` is the key of the weights. Raises InconsistentCheckpoint if the tensor has too few
        axes, or if layers or experts are missing.
        """
        axes, dtype = axes_of(stacked), item.dtype
        if len(item.shape) <= axes:
            raise InconsistentCheckpoint(
                "file-damaged",
                f"{self.folder}: {key} has too few axes: zckpt expected one that counts layers or "
                "experts",
                file=self.folder,
            )
        pieces: dict[tuple[int, ...], list[TensorPiece]] = {}
        for box, file in self.files.boxes(self.table, key):
            tensor: Tensor = file.value
            extent = file.whole(tensor)
            layout_of_box = box.offsets[axes:], box.sizes[axes:], tensor.strides[axes:]
            for inner in places(box.sizes, axes):
                place = tuple(a + b for a, b in zip(box.offsets, inner, strict=False))
                first = sum(a * b for a, b in zip(inner, tensor.strides, strict=False))
                piece = TensorPiece(*layout_of_box, tensor.offset + first, extent)
                pieces.setdefault(place, []).append(piece)
        if prod(item.shape[:axes]) > len(pieces):
            raise InconsistentCheckpoint(
                "elements-missing",
                f"{self.folder}: {key} has {prod(item.shape[:axes])} layers or experts, but the "
                f"files contain only {len(pieces)} of them",
                file=self.folder,
            )
        for place in places(item.shape, axes):
            name, shape = named(stacked, place), item.shape[axes:]
            of_name = in_order(self.folder, name, pieces[place], self.args)
            fragments = assembled(f"{name} in {self.folder}", dtype, shape, of_name)
            if slot == "param":
                self.pieces[name] = of_name
            yield name, self._enter(Entry(name, slot, dtype, shape, fragments))

    def _flat_parts(
        self, key: str, item: TensorItem, stacked: str, slot: str
    ) -> Iterator[tuple[str, Entry]]:
        """Adds one entry for each layer and expert of a state that is stored as flattened slices.

        Yields (name, entry). `stacked` is the key of the weights.
        """
        fragments = flats.FlatFragments(self.table, self.files, key)
        for place in places(item.shape, axes_of(stacked)):
            name = named(stacked, place)
            if name not in self.shapes:
                raise InconsistentCheckpoint(
                    "mixed-saves",
                    f"{self.folder}: {key} has an optimizer state of {name}, whose weight is "
                    "missing",
                    file=self.folder,
                )
            shape = self.shapes[name]
            whole = fragments.whole(place, shape)
            yield name, self._enter(Entry(name, slot, item.dtype, shape, whole))

    def _enter(self, entry: Entry) -> Entry:
        if entry.key in self.entries:
            raise InconsistentCheckpoint(
                "elements-overlap",
                f"{self.folder}: two keys hold {entry.name}",
                file=self.folder,
                subject=entry.name,
            )
        self.entries[entry.key] = entry
        return entry

    def _objects(self, takes_optimizers: bool) -> dict[str, Any]:
        """Reads the pickled objects of modules and ranks (`_extra_state`, `rng_state`), by key.

        With `takes_optimizers`, the objects of optimizers are included. zckpt parses the pickles,
        but runs no code from them.
        """
        values: dict[str, Any] = {}
        for key, item in self.table.items.items():
            if item is not None or key == ITEM:
                continue
            if not VALUE.fullmatch(key):
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{self.folder}: zckpt does not know the key {key}: it is neither a tensor nor "
                    "a sharded object",
                    file=self.folder,
                )
            if OPTIMIZER.fullmatch(key) and not takes_optimizers:
                continue
            location = self.table.location(key)
            if sources.is_stand_in(location.file):
                continue  # a lost value is left out
            file = self.files.torch_file(location)
            values[key] = file.kept(file.value, f"megatron.objects.{key}", self.entries)
        return values
