"""Joins the shards of a torch_dist directory into full tensors, for `verify --gather`.

A key has either rectangular shards of a tensor (boxes: offsets and sizes within the full tensor),
or flat buckets with the elements of many parameters. rule.py computes from Megatron-Core's layout
where each parameter is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from msgspec.structs import replace

from ....core.grouping import by_key
from ....core.ranks.partition import BoxPart, Joined, Partition
from ....core.storage import sources
from ....core.storage.fragments import Fragment, Runs
from ....errors import MALFORMED, not_understood
from ....files.dcpfile import read_table
from ....files.dcpitems import ItemFiles
from ....files.dcptable import ItemTable, TensorItem
from ....files.torchfile import TorchFile
from ....files.torchtensors import TORCH_DTYPES
from .. import saving_program as programs
from ..files import OF_FSDP, kind_of
from . import rule
from .folders import Folders
from .rule import Filled, Shape

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
BUFFER = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
    r"(?:gbuf_idx_(\d+)\.dtype_\(([\w.]+), [\w.]+\)\.bucket_idx_(\d+)\.(\w+)|param_state/shard_0_1)"
)


def partitions(path: str, _tp_rules: str | None = None) -> list[Partition]:
    """Every tensor of the model and of its optimizer, joined from the ranks' shards.

    Raises UnsupportedCheckpoint if rule.py has no rule, such as for Megatron-FSDP, for flat buffers
    of a model with frozen parameters, for modules that a GPTModel does not have, and for states
    stored by parameters' numbers.
    """
    if kind_of(path) == OF_FSDP:
        raise rule.refusal(path, "files of Megatron-FSDP")
    try:
        if sources.is_file(os.path.join(path, ".metadata")):
            return list(_Items(path).partitions())
        return list(Folders(path).partitions())
    except MALFORMED as error:
        raise not_understood(path, error) from error


# -- torch_dist


class _Items:
    """The keys of a torch_dist directory, and the tensors that are saved under them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.table: ItemTable = read_table(path)
        self.files = ItemFiles()
        common = os.path.join(path, "common.pt")
        if sources.is_file(common):
            value = TorchFile(common).value
        else:
            location = self.table.location("common_state/shard_0_1")
            value = self.files.torch_file(location).value[0]
        self.args = rule.arguments_of(value) or programs.arguments_of(path)
        self.model = {
            key: item
            for key, item in self.table.items.items()
            if item is not None and not re.match(r"(chained_\d+\.)?optimizer\.", key)
        }

    def partitions(self) -> Iterator[Partition]:
        for key, item in self.model.items():
            yield from self._of_key(key, key, item, "param")
        for key, state in self.table.items.items():
            if state is not None and (match := STATE.fullmatch(key)):
                if self.model and match[2] not in self.model:
                    continue
                slot = rule.SLOTS.get(match[1], match[1])
                # in a save of the optimizer alone, states have the shapes of weights
                whole = self.model[match[2]].shape if self.model else state.shape
                of_item = self._of_key if state.shape == whole else self._of_fragments
                yield from of_item(key, match[2], state, slot)
        if any(BUFFER.fullmatch(key) for key in self.table.items):
            yield from self._of_buffers()

    def _of_key(self, key: str, weight: str, item: TensorItem, slot: str) -> Iterator[Joined]:
        """Yields the tensor of every layer and expert that is stacked under one key.

        `weight` is the key of the weight itself, `slot` the name of the optimizer state, or
        `param`.
        """
        axes = _axes(weight)
        parts: dict[Shape, list[BoxPart]] = {}
        for box in self._boxes(key):
            size = box.extent.length // max(1, prod(box.sizes[:axes]))
            numbers = zip(box.offsets[:axes], box.sizes[:axes], strict=True)
            inside = product(*(range(start, start + n) for start, n in numbers))
            for number, place in enumerate(inside):
                extent = box.extent.part(number * size, (number + 1) * size)
                part = BoxPart(box.offsets[axes:], box.sizes[axes:], extent)
                parts.setdefault(place, []).append(part)
        for place, boxes in parts.items():
            tensor = _name(weight, place), slot
            if self.args.get("use_torch_fsdp2") and self.args.get("swiglu"):
                boxes = self._of_fsdp2(boxes) if rule.GATED.fullmatch(weight) else boxes
            yield Joined(tensor, item.dtype, item.shape[axes:], tuple(boxes))

    def _of_fsdp2(self, boxes: list[BoxPart]) -> list[BoxPart]:
        """Moves a gated layer's shards from their offsets in the files to offsets in the module.

        The files have the first half of every data rank's rows, then the second half of every data
        rank's rows: torch's FSDP2 divided the rows over the data ranks.
        """
        tp = self._size("tensor_model_parallel_size")
        boxes = sorted(boxes, key=lambda part: part.offsets)
        firsts, seconds = boxes[: len(boxes) // 2], boxes[len(boxes) // 2 :]
        # join each data rank's halves, then the data ranks, last the tensor ranks' gates and ups
        rows = [part for pair in zip(firsts, seconds, strict=True) for part in pair]
        length = len(rows) // tp
        slices = [rows[start : start + length] for start in range(0, len(rows), length)]
        gates = [part for own in slices for part in own[: length // 2]]
        ordered = gates + [part for own in slices for part in own[length // 2 :]]
        height = boxes[0].sizes[0]
        return [
            replace(part, offsets=(place * height, *part.offsets[1:]))
            for place, part in enumerate(ordered)
        ]

    def _of_fragments(self, key: str, weight: str, item: TensorItem, slot: str) -> Iterator[Joined]:
        """Yields the tensors under a key of `fully_sharded_model_space`.

        The last axis of such a key counts the flattened elements of one tensor rank's shard.
        """
        whole = self.model[weight].shape
        axes = _axes(weight)
        counts = item.shape[:-1]
        sizes = tuple(n // count for n, count in zip(whole, counts, strict=True))
        parts: dict[Shape, list[BoxPart]] = {}
        for box in self._boxes(key):
            offsets = tuple(at * n for at, n in zip(box.offsets[:-1], sizes, strict=True))
            part = BoxPart(offsets[axes:], sizes[axes:], box.extent, first=box.offsets[-1])
            parts.setdefault(offsets[:axes], []).append(part)
        for place, boxes in parts.items():
            yield Joined((_name(weight, place), slot), item.dtype, whole[axes:], tuple(boxes))

    def _of_buffers(self) -> Iterator[Joined]:
        whole = {
            _name(key, place): (item.shape[_axes(key) :], item.dtype)
            for key, item in self.model.items()
            for place in product(*map(range, item.shape[: _axes(key)]))
        }
        shapes = {name: shape for name, (shape, _) in whole.items()}
        gated = rule.is_gated(shapes)
        chunks = by_key((place[:3], slots) for place, slots in sorted(self._buffers().items()))
        stages = self._size("pipeline_model_parallel_size")
        count = max(map(len, chunks.values())) * stages
        tp, ep = self._size("tensor_model_parallel_size"), self._size("expert_model_parallel_size")
        etp = int(self.args.get("expert_tensor_parallel_size") or tp)
        apart = any(spread for spread, _, _ in chunks)
        experts = 1 + max((rule.expert_of(name) or 0 for name in whole), default=0)
        ranks = []
        for (spread, group, dtype), listed in chunks.items():
            of = etp if spread else tp
            stage, number = divmod(group // of, ep if spread else 1)
            for chunk, slots in enumerate(listed):
                names = self._names(whole, chunk * stages + stage, count)
                if apart:
                    expert_ranks = {number} if spread else {None}
                    names = [
                        name for name in names if _rank_of(name, experts // ep) in expert_ranks
                    ]
                sizes = [
                    (name, sum(prod(n) for _, n in rule.boxes_of(name, shapes[name], of, 0, gated)))
                    for name in names
                    if whole[name][1] == dtype
                ]
                size = rule.bucket_size_of(self.args, stage + chunk)
                placed = rule.layout(self.path, sizes, slots, size)
                ranks.append(Filled(group % of, of, placed))
        yield from rule.joined(ranks, shapes, gated)

    def _size(self, key: str) -> int:
        return int(self.args.get(key) or 1)

    def _buffers(self) -> dict[tuple[bool, int, str, int], dict[str, dict[int, Runs]]]:
        """All flat buffers: {(of_experts, group, dtype, buffer): {state: {bucket: file ranges}}}.

        `of_experts` is true for the experts' own optimizer. `group` is `dp_group_idx`, the
        model-parallel rank. `dtype` is the weights' type, and `buffer` is `gbuf_idx`.
        """
        buffers: dict[tuple[bool, int, str, int], dict[str, dict[int, Runs]]] = {}
        for key, saved in self.table.items.items():
            match = BUFFER.fullmatch(key)
            if match is None:
                continue
            # the experts' own optimizer is the second of the chained ones
            spread, group = int(match[1] or 0) > 0, int(match[2])
            if match[3] is None:
                file = self.files.torch_file(self.table.location(key))
                for number, dtype, in_file in rule.coalesced(file):
                    buffers[spread, group, dtype, number] = in_file
            elif saved is not None:
                place = spread, group, TORCH_DTYPES[match[4]], int(match[3])
                slots = buffers.setdefault(place, {}).setdefault(match[6], {})
                boxes = sorted(self._boxes(key), key=lambda box: box.offsets)
                slots[int(match[5])] = Runs(
                    [Fragment(b.offsets[0], b.offsets[0] + b.sizes[0], b.extent) for b in boxes]
                )
        return buffers

    def _names(self, whole: Mapping[str, Any], chunk: int, chunks: int) -> list[str]:
        """The parameters of model chunk `chunk` of `chunks`, in `named_parameters()` order."""
        layers = 1 + max(int(match[1]) for name in whole if (match := rule.LAYER.match(name)))
        fused = self.args.get("transformer_impl") == "transformer_engine"
        grouped = fused and bool(self.args.get("moe_grouped_gemm"))
        stages = self._size("pipeline_model_parallel_size")
        of_chunks = rule.layers_of_chunks(self.path, self.args, layers, stages, chunks // stages)
        ordered = []
        for name in whole:
            if rule.NOT_TRAINED.fullmatch(name):
                continue
            rule.require_known(self.path, name, whole, self._size("tensor_model_parallel_size"))
            order = rule.order_of(name, whole, fused, grouped)
            if order is None:
                raise rule.refusal(self.path, f"the module of {name}")
            side, number, *_ = order
            of_ends = 0 if side < rule.INSIDE else chunks - 1
            if number in of_chunks[chunk] if side == rule.INSIDE else chunk == of_ends:
                ordered.append((order, name))
        names = [name for _, name in sorted(ordered)]
        if chunk and chunk == chunks - 1 and rule.OUTPUT not in whole:
            names.append(rule.EMBEDDING)  # the copy of a tied embedding
        return names

    def _boxes(self, key: str) -> Iterator[BoxPart]:
        """Yields the nonempty shards of a key's tensor, with their offsets and sizes."""
        for box, file in self.files.boxes(self.table, key):
            if not file.value.contiguous:
                raise rule.refusal(file.path, "a tensor that is not contiguous")
            yield BoxPart(box.offsets, box.sizes, file.extent(file.value))


# -- names


def _rank_of(name: str, experts: int) -> int | None:
    """The expert-parallel rank of a parameter; None if the parameter is not in an expert.

    `experts` is the number of experts that every rank has in a layer.
    """
    number = rule.expert_of(name)
    return None if number is None else number // experts


def _bare(key: str) -> str:
    """The key without the prefix `module.` or `model.`, which NeMo adds."""
    return re.sub(r"^(module|model)\.", "", key)


def _axes(key: str) -> int:
    """The number of leading axes of a key's tensor that count layers and experts."""
    key = _bare(key)
    return bool(re.match(r"(de|en)coder\.layers\.(?!\d)", key)) + (".experts.experts.linear" in key)


def _name(key: str, place: Shape) -> str:
    """The name in `named_parameters()` of one tensor that is stacked under a key.

    `place` is its index on the axes of layers and experts.
    """
    numbers, key = list(place), _bare(key)
    if re.match(r"(de|en)coder\.layers\.(?!\d)", key):
        key = key.replace(".layers.", f".layers.{numbers.pop(0)}.", 1)
    if numbers:
        key = key.replace(".experts.experts.", f".experts.local_experts.{numbers.pop(0)}.")
    return rule.with_norms(key)
