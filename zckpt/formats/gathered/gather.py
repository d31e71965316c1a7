"""How torch joins files that ranks saved separately: the rule behind `verify --gather`.

    DTensor          `full_tensor()` concatenates the local tensors along the axis of every `Shard`,
                     in the order of the ranks' coordinates in the mesh; mesh axes of
                     `_StridedShard` count last. Each rank's mesh states this rank's coordinate.
                     Nothing is computed from the number of ranks.
    ShardedTensor    the metadata, common to all ranks, states the rank of each shard
    names            a group's parameters are those of all ranks together (pipeline stages)
    other values     are the first rank's

(torch 2.13: distributed/tensor/_redistribute.py, distributed/_shard/sharded_tensor/api.py.) This
module does not use the reader's modules, because `verify --gather` checks the reader. The reader
computes the shards of a DTensor from the size of the mesh, and relies on every rank's own statement
of its shards.

In ZeroRedundancyOptimizer's local states, each rank numbers its own parameters. No file states
which parameters these are, so they have no names here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checkpoint.inert import Foreign, Global
from ...core.ranks.partition import BoxPart, Partition
from ...core.storage import sources
from ...core.storage.fileio import crc_of
from ...errors import MALFORMED, InconsistentCheckpoint, UnsupportedCheckpoint, not_understood
from ...files import safefile
from ...files.torchfile import Parsed, Tensor, TorchFile
from ...files.torchtensors import TORCH_DTYPES, class_of
from ..statedict import gather
from .files import StateDictFiles, locate

LEFT_OUT = "verify without --gather"


def partitions(path: str, _tp_rules: str | None = None) -> list[Partition]:
    """Returns every tensor of model and optimizer, joined from shards by torch's own rule.

    Raises UnsupportedCheckpoint for a DTensor that the rule cannot place, and
    InconsistentCheckpoint if a rank has more or fewer shards than its metadata lists.
    """
    try:
        return _partitions(locate(path))
    except MALFORMED as error:
        raise not_understood(path, error) from error


def _partitions(files: StateDictFiles) -> list[Partition]:
    parsed = Parsed()
    trees: dict[str | None, Any] = {
        kind: _whole_file(name, parsed) for kind, name in files.whole.items() if kind != "extra"
    }
    local: list[Partition] = []
    for kind, paths in files.ranks.items():
        ranks = {rank: TorchFile(paths[rank], parsed) for rank in sorted(paths)}
        if "model" in files.whole and _number_their_own(ranks):
            for file in ranks.values():
                local += gather.states(_Ranks({0: file}).tree(), {})
        else:
            trees[kind] = _Ranks(ranks).tree()
    everything = trees.pop(None, {})
    return gather.partitions({**everything, **trees}, _numbers(files.whole, parsed)) + local


def _whole_file(path: str, parsed: Parsed) -> Any:
    """Reads the values in a complete file, or in all files that an index (.json) lists."""
    if path.endswith(".json"):
        with sources.opened(path) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        folder = os.path.dirname(path)
        paths = [os.path.join(folder, os.path.basename(name)) for name in names]
        return {key: value for part in paths for key, value in _whole_file(part, parsed).items()}
    if path.endswith(".safetensors"):
        return gather.all_stored(safefile.read(path))
    return _Ranks({0: TorchFile(path, parsed)}).tree()


def _numbers(whole: Mapping[str | None, str], parsed: Parsed) -> Sequence[str]:
    """The names of an optimizer's numbered parameters, in its order; zckpt writes them in extra.pt.

    The result is empty if extra.pt does not state the names.
    """
    value = TorchFile(whole["extra"], parsed).value if "extra" in whole else None
    record = value.get("zckpt") if isinstance(value, dict) else None
    names: Sequence[str] = (record.get("numbers") or ()) if isinstance(record, dict) else ()
    return names


class _Ranks:
    """Joins the files of all ranks into one tree of state dicts."""

    def __init__(self, files: Mapping[int, TorchFile]) -> None:
        self.files = files

    def tree(self) -> Any:
        return self._value({rank: file.value for rank, file in self.files.items()})

    def _value(self, by_rank: Mapping[int, Any]) -> Any:
        first, value = next(iter(by_rank.items()))
        if _is_distributed(value):
            return self._joined(by_rank)
        if isinstance(value, dict):
            dicts = {rank: item for rank, item in by_rank.items() if isinstance(item, dict)}
            keys = dict.fromkeys(key for item in dicts.values() for key in item)
            return {
                key: self._value({rank: d[key] for rank, d in dicts.items() if key in d})
                for key in keys
            }
        if isinstance(value, list) and value and all(type(name) is str for name in value):
            return list(dict.fromkeys(name for names in by_rank.values() for name in names))
        if isinstance(value, (list, tuple)):
            lists = {
                rank: item
                for rank, item in by_rank.items()
                if isinstance(item, (list, tuple)) and len(item) == len(value)
            }
            return [
                self._value({rank: item[place] for rank, item in lists.items()})
                for place in range(len(value))
            ]
        return gather.whole(self.files[first], value) if isinstance(value, Tensor) else value

    def _joined(self, by_rank: Mapping[int, Foreign]) -> gather.Saved:
        """Joins all ranks' shards of a DTensor or ShardedTensor into the full tensor.

        If several ranks have the same shard, the first rank's is used.
        """
        _, cls, about, _ = next(iter(by_rank.values())).arguments
        shape = tuple(about[2])
        states = {rank: value.arguments[3] for rank, value in by_rank.items()}
        is_dtensor = isinstance(cls, Global) and cls.name.endswith(".DTensor")
        rule = self._placed_by_mesh if is_dtensor else self._placed_by_metadata
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], BoxPart] = {}
        for box in rule(states, shape):
            boxes.setdefault((box.offsets, box.sizes), box)
        return gather.joined(TORCH_DTYPES[about[1].name], shape, list(boxes.values()))

    def _placed_by_mesh(self, states: Mapping[int, Any], shape: tuple[int, ...]) -> list[BoxPart]:
        """Places every rank's local tensor in the full DTensor, by the ranks' mesh coordinates.

        Raises UnsupportedCheckpoint if a rank's coordinate is not stated, and for placements other
        than Shard, _StridedShard and Replicate.
        """
        tensors: dict[int, Tensor] = {}
        positions: dict[int, list[tuple[int, ...]]] = {}
        lengths: list[dict[tuple[int, ...], int]] = [{} for _ in shape]
        for rank, state in states.items():
            fields = _fields(state)
            tensors[rank], spec = fields["_local_tensor"], _fields(fields["_spec"].state)
            coordinate = _fields(spec["mesh"].state).get("_coordinate_on_dim")
            if coordinate is None:
                raise UnsupportedCheckpoint(
                    "proof-unsupported",
                    f"{self.files[rank].path} does not state the rank's coordinate in its device "
                    "mesh, which --gather needs",
                    hint=LEFT_OUT,
                    file=self.files[rank].path,
                )
            positions[rank] = [() for _ in shape]
            places = zip(spec["placements"], coordinate, strict=True)
            for placement, place in sorted(places, key=_is_strided_shard):
                kind = placement.name.rpartition(".")[2]
                if kind in ("Shard", "_StridedShard"):
                    axis = _fields(placement.state).get("dim", *placement.arguments)
                    positions[rank][axis] += (place,)
                elif kind != "Replicate":
                    raise UnsupportedCheckpoint(
                        "proof-unsupported",
                        f"{self.files[rank].path} has a DTensor with the placement {kind}, for "
                        "which --gather has no rule",
                        hint=LEFT_OUT,
                        file=self.files[rank].path,
                    )
            for axis, position in enumerate(positions[rank]):
                lengths[axis].setdefault(position, tensors[rank].shape[axis])
        starts = [_starts(each) for each in lengths]
        return [
            gather.box_of(
                self.files[rank],
                tensor,
                tuple(
                    each[position] for each, position in zip(starts, positions[rank], strict=True)
                ),
            )
            for rank, tensor in tensors.items()
        ]

    def _placed_by_metadata(self, states: Mapping[int, Any], _: tuple[int, ...]) -> list[BoxPart]:
        """Places the shards of every rank in the full ShardedTensor, by offsets in its metadata.

        All ranks share this metadata.
        """
        boxes = []
        for rank, (shards, metadata, group, *_) in states.items():
            number = _fields(group.state)["global_rank"]
            listed = [_fields(shard.state) for shard in _fields(metadata.state)["shards_metadata"]]
            boxes_of_rank = [s for s in listed if _fields(s["placement"].state)["_rank"] == number]
            if len(boxes_of_rank) != len(shards):
                raise InconsistentCheckpoint(
                    "file-damaged",
                    f"{self.files[rank].path} has {len(shards)} shards of a tensor, but its "
                    f"metadata lists {len(boxes_of_rank)} for rank {number}",
                    file=self.files[rank].path,
                )
            for shard, box in zip(shards, boxes_of_rank, strict=True):
                tensor = _fields(shard.state)["tensor"]
                boxes.append(gather.box_of(self.files[rank], tensor, tuple(box["shard_offsets"])))
        return boxes


def _is_strided_shard(placed: tuple[Foreign, int]) -> bool:
    return placed[0].name.endswith("._StridedShard")


def _starts(lengths: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    """Computes the offset of each shard along one axis of a tensor.

    `lengths` maps a shard's position (its mesh coordinates) to its size along this axis. Shards
    follow each other in the order of their positions.
    """
    starts, end = {}, 0
    for position in sorted(lengths):
        starts[position] = end
        end += lengths[position]
    return starts


def _is_distributed(value: Any) -> bool:
    return class_of(value).endswith((".DTensor", ".ShardedTensor"))


def _fields(state: Any) -> dict[str, Any]:
    """The attributes of a pickled object, from the state in its pickle.

    The state is a dictionary, or a pair of dictionaries: `__dict__` and the slots.
    """
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts for key, value in (part or {}).items()}


# -- ZeroRedundancyOptimizer


def _number_their_own(files: Mapping[int, TorchFile]) -> bool:
    """Whether the ranks' optimizers use the same numbers for different parameters.

    ZeroRedundancyOptimizer's local states do so. They are recognized by lists of numbers, or by
    tensors, that differ between ranks.
    """
    states = []
    for file in files.values():
        value = file.value
        if not (isinstance(value, dict) and {"state", "param_groups"} <= value.keys()):
            return False
        members = [member for group in value["param_groups"] for member in group["params"]]
        if not all(type(member) is int for member in members):
            return False
        tensors = [
            (number, key, tensor)
            for number, state in value["state"].items()
            for key, tensor in state.items()
        ]
        if any(_is_distributed(tensor) for _, _, tensor in tensors):
            return False
        states.append((members, [(n, key, _comparable(file, item)) for n, key, item in tensors]))
        if states[-1] != states[0]:
            return True
    return False


def _comparable(file: TorchFile, value: Any) -> Any:
    """Converts a value for comparisons: equal values have equal results.

    A tensor is represented by its layout and checksum. The checksum is computed if the file does
    not state one.
    """
    if not isinstance(value, Tensor):
        return value
    length, crc = file.crc(value)
    if crc is None:
        crc = crc_of([gather.box_of(file, value, (0,) * len(value.shape)).extent])
    return value.dtype, value.shape, value.strides, value.offset, length, crc
