"""The manifest of a checkpoint of Megatron-Core: the layers of every stacked key, one by one.

    decoder.layers.mlp.linear_fc2.weight              the weight, as the module stores it
    optimizer.state.param.<key>                       the fp32 master (fully_reshardable)
    optimizer.state.fp32_param.<key>                  the same without the distributed optimizer
    optimizer.state.exp_avg.<key>, exp_avg_sq         moments

All have the global shape of the key, so no size of tp, pp or ep matters. The rows of a gated
`linear_fc1` are [gate; up], whatever tp was.

`fully_reshardable` files of several buckets have wrong masters and moments if a bucket has padding
at its end: Megatron-Core 0.14 to 0.19.2 gathers without the padding, and then uses offsets that
count it. `check` finds it: the masters do not round to their weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...core.facts import GraphEngine
from ...core.manifest import Entry, Manifest, Parameter, slot_name
from ...core.plan import Match
from ...core.resources import Copying
from ...core.weights import weight_of
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
    not_understood,
)
from ...files.dcpfile import ItemTable, TensorItem, read_table
from ...files.dcpitems import ItemFiles, require_same
from ...files.torchfile import Tensor
from ...training.steps import infer_optimizer
from ..statedict.tree import TensorPiece, assembled
from .common import (
    ITEM,
    NOT_DISTRIBUTED,
    arguments,
    kept,
    of_optimizer,
    read_common,
    sharding_of,
)
from .files import MARKER, located
from .groups import groups_of, members, stated_step
from .names import axes_of, named, places

CHECKING = Copying(memory=64 << 20)
OF_OPTIMIZER = re.compile(r"optimizer\.state\.(?P<slot>[^.]+)\.(?P<key>.+)")
MASTERS = ("param", "fp32_param")
BUFFERS = re.compile(r".*\.router\.expert_bias")
VALUE = re.compile(r"(?P<key>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<grid>\d+(?:\.\d+)*)")


def read(
    path: str,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: tuple[str, ...] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of an iteration's directory, or of a run around it.

    `param_names` is not used: keys are names. With `weights_only` the optimizer's state is not
    read, whatever its type. Raises NotACheckpoint, IncompleteCheckpoint (a file, a piece or the
    common state is missing), InconsistentCheckpoint, CorruptCheckpoint, UnsupportedCheckpoint
    (another type of the optimizer's state, zarr, `mp_rank_*` directories).
    """
    folder = located(path, tag)
    try:
        return _Reader(folder, weights_only).manifest(step_policy)
    except MALFORMED as error:
        raise not_understood(folder, error) from error


def check(manifest: Manifest) -> None:
    """Compares every master with its weight, before a conversion writes anything.

    Raises InconsistentCheckpoint, which names the tensors, if masters do not round to them.
    """
    from ...core.compare import compare

    matches = []
    for name in manifest.parameters:
        weight = weight_of(manifest.entries, name)
        if weight.master is not None and weight.param is not None:
            how = "bits" if weight.master.dtype == weight.param.dtype else "rounded"
            matches.append(Match(weight.master, weight.param, how))
    outcome = compare(matches, manifest, manifest, CHECKING, measure="first")
    wrong = [
        result.match.a.parameter
        for result in outcome.results
        if result.difference is not None and result.difference.count
    ]
    if wrong:
        raise InconsistentCheckpoint(
            f"{manifest.root}: the fp32 masters of {len(wrong)} of {len(matches)} parameters do "
            f"not round to their weights: {listed(wrong, 4)}",
            hint="Megatron-Core up to 0.19.2 writes fully_reshardable files of several buckets "
            "wrongly, and the moments with them; --weights-only takes the weights alone",
        )


class _Reader:
    """One directory, item by item."""

    def __init__(self, folder: str, weights_only: bool) -> None:
        self.folder = folder
        self.marker = os.path.join(folder, MARKER)
        self.weights_only = weights_only
        self.table: ItemTable = read_table(folder)
        self.files = ItemFiles()
        self.file, self.common = read_common(self.table, self.files)
        self.records = list(self.file.records.values())
        self.entries: dict[str, Entry] = {}
        self.keys: dict[str, int] = {}
        self.key_of: dict[str, str] = {}

    def manifest(self, step_policy: str | None) -> Manifest:
        sharding = None if self.weights_only else sharding_of(self.table, self.common)
        shapes, trained = self._weights(), self._trained()
        slots = {} if self.weights_only else self._states(shapes)
        values = self._values()
        step, place, sightings = stated_step(self.common, self.file, step_policy)
        groups = groups_of(self.common) if slots else []
        known = {name: shape for name, shape in shapes.items() if not BUFFERS.fullmatch(name)}
        trainable = {name for name in known if not trained or self.key_of[name] in trained}
        group_of = members(groups, {name: known[name] for name in known if name in trainable})
        has_states = bool(slots)
        warnings = []
        if groups and group_of is None:
            warnings.append(
                "no file lists the members of the parameter groups, and Megatron-Core's usual rule "
                "does not give them: the groups are kept in the state alone"
            )
        args = arguments(self.common)
        tied = args.get("untie_embeddings_and_output_weights") is False
        parameters = {
            name: Parameter(
                shape,
                name in trainable,
                group=(group_of or {}).get(name) if groups else None,
                step=step if name in trainable and has_states else None,
                aliases=_aliases(name, tied, shapes),
            )
            for name, shape in known.items()
        }
        parameters = dict(sorted(parameters.items(), key=lambda item: not item[1].trainable))
        state = {
            "megatron": {
                "common": kept(self.file, self.common, "megatron.common", self.entries),
                "keys": self.keys,
                "gated": args.get("swiglu") if isinstance(args.get("swiglu"), bool) else None,
                "vocabulary": _vocabulary(args, shapes),
                "objects": values,
            }
        }
        strangers = self._strangers()
        dtype = _usual_dtype(self.entries, known)
        return Manifest(
            root=self.folder,
            format="megatron",
            source={
                "format": "megatron",
                "version": None,  # no file states it
                "zero_stage": None if self.weights_only else int(sharding != NOT_DISTRIBUTED),
                "dp": _size(args, "data_parallel_size"),
                "tag": os.path.basename(self.folder),
            },
            entries=self.entries,
            parameters=parameters,
            buffers=tuple(name for name in shapes if name not in known),
            groups=_hyper_parameters(groups) if groups and group_of is not None else None,
            optimizer=infer_optimizer(slots, groups[0] if groups else None) if slots else None,
            engine=GraphEngine("megatron", None, sharding, dtype, "F32" if slots else None),
            step_place=place if slots else None,
            state=state,
            steps=tuple(sightings) if slots else (),
            records=tuple(self.records),
            files=tuple(
                dict.fromkeys(
                    [*self.table.files, *sorted(self.files.sizes), self.file.path, self.marker]
                )
            ),
            left_out=tuple(f"{name}, a file of the directory" for name in strangers),
            warnings=tuple(warnings),
            states_inferred=False,
        )

    def _strangers(self) -> list[str]:
        """Names in the directory that are none of its own files."""
        stated = {location.file for location in self.table.locations.values()}
        own = {*self.table.files, *stated, self.file.path, self.marker}
        with os.scandir(self.folder) as items:
            return sorted(item.name for item in items if item.path not in own)

    # -- tensors

    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Enters every weight of the model; returns the shapes by name."""
        shapes = {}
        for key, item in self.table.items.items():
            if item is None or of_optimizer(key):
                continue
            if key.startswith(("mtp.", "model.")):
                raise UnsupportedCheckpoint(
                    f"{self.folder} has {key}: zckpt does not read layers of multi-token "
                    "prediction, nor files of Megatron-FSDP"
                )
            self.keys[key] = axes_of(key)
            for name, entry in self._parts(key, item, key, "param"):
                if name in shapes:
                    raise InconsistentCheckpoint(f"{self.folder}: two keys are called {name}")
                shapes[name] = entry.shape
                self.key_of[name] = key
        if not shapes:
            raise CorruptCheckpoint(f"{self.folder} has no weights")
        return shapes

    def _trained(self) -> set[str]:
        """The keys of weights that have a state of the optimizer."""
        keys = (of_optimizer(key) for key, item in self.table.items.items() if item)
        matches = (OF_OPTIMIZER.fullmatch(key) for key in keys if key)
        return {match["key"] for match in matches if match}

    def _states(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Enters masters and moments; returns the optimizer's own slots."""
        slots = set()
        for key, item in self.table.items.items():
            own = of_optimizer(key)
            if own is None or item is None:
                continue
            match = OF_OPTIMIZER.fullmatch(own)
            if match is None or match["key"] not in self.keys:
                raise UnsupportedCheckpoint(
                    f"{self.folder} has {key}, which is no state of a weight that zckpt knows",
                    hint="--weights-only takes the weights alone",
                )
            slot = "master" if match["slot"] in MASTERS else slot_name(match["slot"])
            for name, entry in self._parts(key, item, match["key"], slot):
                if entry.shape != shapes.get(name):
                    raise InconsistentCheckpoint(
                        f"{self.folder}: {key} has the shape {list(entry.shape)} for {name}, the "
                        f"weight {list(shapes.get(name, ()))}"
                    )
            if slot != "master":
                slots.add(slot)
        return slots

    def _parts(
        self, key: str, item: TensorItem, stacked: str, slot: str
    ) -> list[tuple[str, Entry]]:
        """Enters the parameters under a key: one for each layer, and for each expert in it."""
        axes, dtype = axes_of(stacked), item.dtype
        if len(item.shape) <= axes:
            raise InconsistentCheckpoint(f"{self.folder}: {key} has no axis of layers or experts")
        pieces: dict[tuple[int, ...], list[TensorPiece]] = {}
        for box in item.boxes:
            if box.is_empty:
                continue
            location = self.table.location(key, box)
            file = self.files.torch_file(location)
            tensor = file.value
            described = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
            require_same(location, key, described, (dtype, box.sizes))
            self.records += file.records.values()
            extent = file.whole(tensor)
            for inner in places(box.sizes, axes):
                place = tuple(a + b for a, b in zip(box.offsets, inner, strict=False))
                first = sum(a * b for a, b in zip(inner, tensor.strides, strict=False))
                pieces.setdefault(place, []).append(
                    TensorPiece(
                        box.offsets[axes:],
                        box.sizes[axes:],
                        tensor.strides[axes:],
                        tensor.offset + first,
                        extent,
                    )
                )
        result = []
        if prod(item.shape[:axes]) > len(pieces):
            raise InconsistentCheckpoint(
                f"{self.folder}: {key} has {prod(item.shape[:axes])} layers or experts, but the "
                f"files hold pieces of {len(pieces)}"
            )
        for place in places(item.shape, axes):
            name, shape = named(stacked, place), item.shape[axes:]
            fragments = assembled(f"{name} in {self.folder}", dtype, shape, pieces[place])
            entry = Entry(f"{name}/{slot}", dtype, shape, fragments)
            if entry.name in self.entries:
                raise InconsistentCheckpoint(f"{self.folder}: two keys hold {entry.name}")
            self.entries[entry.name] = entry
            result.append((name, entry))
        return result

    def _values(self) -> dict[str, Any]:
        """Objects of modules and ranks (`_extra_state`, `rng_state`), by key, as inert values."""
        values: dict[str, Any] = {}
        for key, item in self.table.items.items():
            if item is not None or key == ITEM:
                continue
            if not VALUE.fullmatch(key):
                raise UnsupportedCheckpoint(f"{self.folder} has {key}, which is no sharded object")
            if self.weights_only and of_optimizer(key):
                continue
            file = self.files.torch_file(self.table.location(key))
            self.records += file.records.values()
            values[key] = kept(file, file.value, f"megatron.objects.{key}", self.entries)
        return values


def _aliases(name: str, tied: bool, shapes: Mapping[str, Any]) -> tuple[str, ...]:
    """The output layer is the embedding, if the arguments say so and no key has it."""
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    return (output,) if tied and name == embedding and output not in shapes else ()


def _hyper_parameters(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Groups without their members and their step."""
    rest = {"params", "step"}
    return tuple({k: value for k, value in group.items() if k not in rest} for group in groups)


def _vocabulary(args: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The rows of the embedding, with padding, and those of the tokenizer if it is stated."""
    shape = shapes.get("embedding.word_embeddings.weight")
    if shape is None:
        return None
    return {"rows": shape[0], "used": _size(args, "vocab_size")}


def _size(args: Mapping[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if type(value) is int and value > 0 else None


def _usual_dtype(entries: Mapping[str, Entry], names: Mapping[str, Any]) -> str | None:
    """The type of the largest weight."""
    weights = (entries[f"{name}/param"] for name in names)
    largest = max(weights, key=lambda entry: entry.numel, default=None)
    return None if largest is None else largest.dtype
