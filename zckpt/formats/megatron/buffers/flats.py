"""Joins optimizer states that Megatron-Core saves as flat buffers into full tensors.

    [chained_N.]optimizer.distributed.dp_group_idx_G.          G = tensor rank + tp * stage
        gbuf_idx_B.dtype_(TYPES).bucket_idx_K.SLOT             dp_reshardable: one bucket
        param_state/shard_0_1                                  dp_zero_gather_scatter: all buffers
        optimizer/shard_0_1                                    the groups, with the step
        grad_scaler/shard_0_1                                  the loss scale of fp16

A bucket is stored without the padding at its end. Gaps between parameters are not initialized. With
expert parallelism, the experts have a separate optimizer: number N. Its G counts the tensor ranks
of experts first, then their expert ranks, then pipeline stages (megatron-core 0.16.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from typing import Any

from msgspec import Struct, field

from ....core.checkpoint.dtypes import SIZES
from ....core.checkpoint.entries import Entry, Key
from ....core.checkpoint.inert import Global, inside
from ....core.checkpoint.manifest import slot_name
from ....core.checkpoint.slicing import Piece, Slicing, cut, joined, replicated
from ....core.grouping import by_key
from ....core.storage import sources
from ....core.storage.fragments import Extent, Fragment, Fragments, Runs, solid
from ....errors import CorruptCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint, brief
from ....files.dcpitems import ItemFiles
from ....files.dcptable import ItemTable
from ....files.torchfile import Tensor, TorchFile
from ....files.torchtensors import TORCH_DTYPES
from ...statedict.tree import TensorPiece
from ..common_state import OPTIMIZER, WEIGHTS_ONLY
from ..groups import FileStep, groups_in
from ..optimizers import SPREAD
from .placing import SAMPLE, Flat, Local
from .stages import ModelRank

OF_RANK = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
    r"(?:(?P<kind>param_state|optimizer|grad_scaler|per_bucket_numel(?:_unpadded)?)/shard_0_1"
    r"|gbuf_idx_(?P<buffer>\d+)\.dtype_\((?P<type>[\w.]+), [\w.]+\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>[^.]+))"
)
MASTERS = ("param", "fp32_param")


def slicing_of(name: str, shape: Sequence[int], pieces: Sequence[TensorPiece], tp: int) -> Slicing:
    """How tensor-parallel ranks cut a weight, inferred from the shards in which they saved it.

    `pieces` are these shards: one for each of the `tp` ranks, two for each (a gated `linear_fc1`),
    or a single one (a replicated weight). Raises UnsupportedCheckpoint for another number of
    shards.
    """
    axes = {
        axis for piece in pieces for axis, size in enumerate(piece.sizes) if size != shape[axis]
    }
    if not axes and len(pieces) == 1:
        return replicated(shape, tp)
    if len(axes) != 1 or len(pieces) not in (tp, 2 * tp):
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{name} was saved in {len(pieces)} shards by {tp} tensor ranks: zckpt expected 1, "
            f"{tp} or {2 * tp} shards",
            hint=WEIGHTS_ONLY,
            subject=name,
        )
    (axis,) = axes
    ordered = sorted(pieces, key=lambda piece: piece.offsets[axis])
    widths = [piece.sizes[axis] for piece in ordered]
    listed = [widths[start : start + tp] for start in range(0, len(widths), tp)]
    return cut(prod(shape[:axis]), prod(shape[axis + 1 :]), listed)


def local_part(name: str, numel: int, dtype: str, piece: TensorPiece) -> Local:
    """Describes a tensor rank's shard of a weight, and the file bytes of its first elements.

    These bytes are a sample. They are compared with fp32 masters to find the shard in a flat
    buffer.
    """
    count, size = 1, SIZES[dtype]
    for axis in range(len(piece.sizes) - 1, -1, -1):
        if piece.sizes[axis] != 1 and piece.strides[axis] != count:
            break
        count *= piece.sizes[axis]
    start = piece.first * size
    first = piece.extent.part(start, start + min(count, SAMPLE) * size)
    return Local(name, numel, dtype, first)


def read_bytes(extent: Extent) -> bytes:
    """Reads a small byte range of a file; raises CorruptCheckpoint if the file ends before it."""
    with sources.opened(extent.file) as file:
        data = sources.pread(file.fileno(), extent.length, extent.offset)
    if len(data) != extent.length:
        raise CorruptCheckpoint(
            "file-cut-short",
            f"{extent.file} ends early",
            hint="take another copy of it",
            file=extent.file,
        )
    return data


class _Optimizer(Struct, eq=False):
    """The groups, loss scales and flat buffers of one optimizer, as read from files.

    The keys of `groups` and `flats` are the numbers of model-parallel ranks (`dp_group_idx`).
    """

    groups: dict[int, list[Any]] = field(default_factory=dict)
    scalers: list[tuple[TorchFile, Any]] = field(default_factory=list)
    flats: dict[int, dict[tuple[int, str], Flat]] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether this optimizer updates experts that are spread over expert-parallel ranks."""
        return any(group.get(SPREAD) for group in chain(*self.groups.values()))


class FlatItems:
    """Reads the optimizers' flat buffers and parameter groups of a torch_dist directory.

    Raises UnsupportedCheckpoint for an optimizer key that zckpt does not know.
    """

    def __init__(self, table: ItemTable, files: ItemFiles) -> None:
        self.table, self.files = table, files
        self.steps: list[FileStep] = []
        self.optimizers: dict[int, _Optimizer] = {}
        buckets: dict[tuple[int, int, int, str], dict[int, dict[str, Runs]]] = {}
        for key, item in table.items.items():
            if not OPTIMIZER.fullmatch(key):
                continue
            match = OF_RANK.fullmatch(key)
            if match is None or (item is None) != (match["slot"] is None):
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{table.folder}: zckpt does not know the optimizer key {key}",
                    hint=WEIGHTS_ONLY,
                    file=table.folder,
                )
            number, group, kind = int(match["optimizer"] or 0), int(match["group"]), match["kind"]
            optimizer = self.optimizers.setdefault(number, _Optimizer())
            if item is not None:
                place = number, group, int(match["buffer"]), _dtype_of(match["type"])
                slots = buckets.setdefault(place, {}).setdefault(int(match["bucket"]), {})
                slots[slot_of(match["slot"])] = FlatFragments(table, files, key, "F32").runs(())
            elif kind == "param_state":
                for buffer, flat in buffers_of(*self._value(key)):
                    optimizer.flats.setdefault(group, {})[buffer, flat.dtype] = flat
            elif kind == "optimizer":
                file, value = self._value(key)
                groups = optimizer.groups[group] = param_groups(file, value)
                self.steps += [(file.path, each.get("step")) for each in groups]
            elif kind == "grad_scaler":
                optimizer.scalers.append(self._value(key))
        for (number, group, buffer, dtype), of_buffer in buckets.items():
            self.optimizers[number].flats.setdefault(group, {})[buffer, dtype] = _joined_buckets(
                f"buffer {buffer} of rank {group}", dtype, of_buffer
            )
        self.optimizers = dict(sorted(self.optimizers.items()))

    @property
    def groups(self) -> list[list[Any]]:
        """For each optimizer, a list of the parameter groups that its ranks saved."""
        return [[*chain(*each.groups.values())] for each in self.optimizers.values()]

    def scalers(self, entries: dict[Key, Entry]) -> list[dict[str, Any]]:
        """Each optimizer's loss scaler as {"grad_scaler": state}; {} for one without a scaler.

        Tensors in these states are added to `entries`. Raises InconsistentCheckpoint if the ranks'
        files have different loss scales.
        """
        result: list[dict[str, Any]] = []
        for number, optimizer in enumerate(self.optimizers.values()):
            numbers = [_numbers(file, value) for file, value in optimizer.scalers]
            if any(other != numbers[0] for other in numbers):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{self.table.folder}: ranks have different loss scales (grad_scaler)",
                    hint=WEIGHTS_ONLY,
                    file=self.table.folder,
                )
            place = inside("megatron.common", "optimizer")
            place = inside(place, number) if len(self.optimizers) > 1 else place
            place = inside(place, "grad_scaler")
            result.append({})
            for file, value in optimizer.scalers[:1]:
                result[-1]["grad_scaler"] = file.kept(value, place, entries)
        return result

    def ranks(
        self, tp: int, stages: int | None = None, ep: int | None = None, experts: int = 0
    ) -> list[ModelRank]:
        """The flat buffers of every model-parallel rank, in the order of its model chunks.

        With `experts` (the number in a layer), the result has only the buffers of the experts'
        optimizer, and an `ep` of None is computed. Without it, the result has only all others, and
        `stages` of None is computed. Raises InconsistentCheckpoint if the numbers do not fit the
        files.
        """
        by_group = by_key(
            (group, flats[key])
            for optimizer in self.optimizers.values()
            if optimizer.has_experts == bool(experts)
            for group, flats in optimizer.flats.items()
            for key in sorted(flats)
        )
        count = len(by_group)
        ep = (ep or count // (tp * (stages or 1))) if experts else 1
        stages = stages or count // tp
        if sorted(by_group) != list(range(count)) or count != tp * ep * stages or not count:
            raise InconsistentCheckpoint(
                "world-size-disagrees",
                f"{self.table.folder} has optimizer buffers of the model-parallel ranks "
                f"{sorted(by_group)}, which do not fit tp={tp}, ep={ep} and pp={stages}",
                hint=WEIGHTS_ONLY,
                file=self.table.folder,
            )
        if experts % ep:
            what = f"{experts} experts of a layer cannot be divided over {ep} expert ranks"
            raise InconsistentCheckpoint(
                "partition-does-not-fit",
                f"{self.table.folder}: {what}",
                hint=WEIGHTS_ONLY,
                file=self.table.folder,
            )
        size = experts // ep
        starts = [group // tp % ep * size for group in range(count)]
        return [
            ModelRank(
                group % tp,
                group // (tp * ep),
                tuple(by_group[group]),
                range(start, start + size) if experts else None,
            )
            for group, start in enumerate(starts)
        ]

    def _value(self, key: str) -> tuple[TorchFile, Any]:
        """Reads a key under which a list of one value is saved; returns its file and that value."""
        file = self.files.torch_file(self.table.location(key))
        value = file.value
        if not isinstance(value, list) or len(value) != 1:
            raise CorruptCheckpoint(
                "file-damaged", f"{file.path}: {key} is not a list of one value", file=file.path
            )
        return file, value[0]


def buffers_of(file: TorchFile, value: Any) -> Iterator[tuple[int, Flat]]:
    """Yields (number, flat buffer) for each flat buffer in an optimizer's dictionary `value`.

    `file` contains this dictionary: distrib_optim.pt, or a `param_state` object. Raises
    UnsupportedCheckpoint for files of a Megatron-LM from before March 2024, and CorruptCheckpoint
    if a buffer is not a 1-d float32 tensor.
    """
    if not isinstance(value, dict):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{file.path}: the optimizer's buffers are not a dictionary",
            file=file.path,
        )
    if value.get("buckets_coalesced") is not True:
        raise UnsupportedCheckpoint(
            "version-unsupported",
            f"{file.path} was saved by a Megatron-LM from before March 2024, whose optimizer "
            "buffers zckpt does not read",
            hint=WEIGHTS_ONLY,
            file=file.path,
        )
    for number, kinds in value.items():
        if type(number) is not int:
            continue
        for types, tensors in kinds.items():
            dtype = _dtype_of(types[0].name if isinstance(types[0], Global) else types[0])
            runs = {}
            for key, tensor in tensors.items():
                if not isinstance(tensor, Tensor):
                    continue
                if tensor.dtype != "F32" or len(tensor.shape) != 1 or not tensor.contiguous:
                    raise CorruptCheckpoint(
                        "file-damaged",
                        f"{file.path}: {key} is not a contiguous 1-d float32 tensor",
                        file=file.path,
                    )
                runs[slot_of(key)] = solid(tensor.numel, file.extent(tensor))
            name = f"buffer {number} of {file.path}"
            yield number, _joined_buckets(name, dtype, {0: runs}, coalesced=True)


def _joined_buckets(
    name: str, dtype: str, buckets: Mapping[int, Mapping[str, Runs]], coalesced: bool = False
) -> Flat:
    ordered = [buckets[number] for number in sorted(buckets)]
    slots = list(ordered[0])
    if sorted(buckets) != list(range(len(buckets))) or "master" not in slots:
        raise InconsistentCheckpoint(
            "partition-does-not-fit",
            f"{name} lacks a bucket or its fp32 masters: it has the buckets {sorted(buckets)}",
            subject=name,
        )
    sizes: list[int] = []
    for number, bucket in enumerate(ordered):
        ends = {runs.listed[-1].stop if runs.listed else 0 for runs in bucket.values()}
        if list(bucket) != slots or len(ends) != 1:
            raise InconsistentCheckpoint(
                "partition-does-not-fit",
                f"{name}: optimizer states of bucket {number} differ in size, or one is missing",
                subject=name,
            )
        sizes += ends
    tensors = {slot: [bucket[slot] for bucket in ordered] for slot in slots}
    return Flat(name, dtype, tuple(sizes), tensors, coalesced)


def slot_of(key: str) -> str:
    """zckpt's name for an optimizer state: `master` for fp32 masters, else as in torch.optim."""
    return "master" if key in MASTERS else slot_name(key)


def _dtype_of(name: Any) -> str:
    dtype = TORCH_DTYPES.get(name)
    if dtype is None:
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"zckpt does not read weights of type {brief(name)}",
            hint=WEIGHTS_ONLY,
        )
    return dtype


def _numbers(file: TorchFile, value: Any) -> Any:
    """A copy of a dictionary, with Python numbers for tensors of one element.

    If `value` is not a dictionary, it is returned unchanged.
    """
    if not isinstance(value, dict):
        return value
    return {key: file.number(item) for key, item in value.items()}


def param_groups(file: TorchFile, value: Any) -> list[Any]:
    """The groups in an optimizer's state dict, with numbers instead of 0-d tensors.

    `value` is that state dict. Raises CorruptCheckpoint if it has no list of groups.
    """
    return [_numbers(file, group) for group in groups_in(value, file.path)]


# -- fully_sharded_model_space


class FlatFragments:
    """The flat shards saved under one key, by slice: a tensor rank's part of a parameter.

    The sharding type `fully_sharded_model_space`, Megatron-Core's default up to 0.13, stores a
    weight and its states like this (megatron-core 0.13.1):

            decoder.layers.mlp.linear_fc2.weight                           (L, h, ffn), tp cuts ffn
            optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2...    (L, 1, tp, h * ffn / tp)

            L                  layers and experts
            1, tp              the number of slices along each axis of the parameter
            h * ffn / tp       the elements of one slice, flattened
    """

    def __init__(self, table: ItemTable, files: ItemFiles, key: str, dtype: str = "") -> None:
        item = table.items[key]
        assert item is not None
        self.key, self.item, self.folder = key, item, table.folder
        self.parts: dict[tuple[int, ...], list[Fragment]] = {}
        for box, file in files.boxes(table, key, dtype):
            tensor: Tensor = file.value
            if prod(box.sizes[:-1]) != 1 or not tensor.contiguous:
                raise InconsistentCheckpoint(
                    "file-damaged",
                    f"{file.path}: a shard of {key} is not one range of flat elements",
                    file=file.path,
                )
            # each data-parallel rank saved a range of a slice's elements; a bucket of a flat buffer
            # (`dp_reshardable`) has only this axis, and is the slice with the index ()
            start = box.offsets[-1]
            part = Fragment(start, start + box.sizes[-1], file.extent(tensor))
            self.parts.setdefault(box.offsets[:-1], []).append(part)

    def whole(self, before: tuple[int, ...], shape: tuple[int, ...]) -> Fragments:
        """The optimizer state of one parameter as a full tensor, joined from its slices.

        `before` are the numbers of the parameter's layer and expert, `shape` is its shape. Raises
        InconsistentCheckpoint if the slices do not add up to this shape, or if one is incomplete.
        """
        grid = self.item.shape[len(before) : -1]
        local: tuple[int, ...] = ()
        if len(grid) == len(shape) and all(grid):
            local = tuple(size // count for size, count in zip(shape, grid, strict=True))
        part_numel = self.item.shape[-1]
        if (
            len(local) != len(shape)
            or prod(local) != part_numel
            or part_numel * prod(grid) != prod(shape)
        ):
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{self.folder}: {self.key} has the shape {list(self.item.shape)}, which does not "
                f"fit its parameter of shape {list(shape)}",
                file=self.folder,
            )
        slices: list[Fragments | None] = []
        pieces = []
        for number, place in enumerate(product(*map(range, grid))):
            slices.append(self.runs((*before, *place)))
            offsets = tuple(a * b for a, b in zip(place, local, strict=True))
            pieces.append(Piece(number, (0,) * len(local), offsets, local))
        slicing = Slicing(shape, (local,) * len(pieces), tuple(pieces))
        return joined(slicing, slices, SIZES[self.item.dtype])

    def runs(self, place: tuple[int, ...]) -> Runs:
        """The file ranges with the elements of one slice, in element order.

        `place` is the slice's index along all axes but the last. In the example of the class,
        (3, 0, 1) is the slice of tensor rank 1 in layer 3. Raises InconsistentCheckpoint if shards
        overlap or leave gaps.
        """
        parts = sorted(self.parts.get(place, []), key=lambda part: part.start)
        ends = [0, *(part.stop for part in parts)]
        if [*(part.start for part in parts), self.item.shape[-1]] != ends:
            raise InconsistentCheckpoint(
                "elements-overlap",
                f"{self.folder}: shards of {self.key} at index {list(place)} overlap or leave gaps",
                file=self.folder,
            )
        return Runs(parts)
