"""Joins the shards of `mp_rank_*` directories into full tensors, for `verify --gather`.

rule.py computes from Megatron-Core's layout where each parameter is.

A state dict has the parameters in the module's order. Experts that are spread over ranks have a
separate optimizer. All other flat buffers are in the folders of the first expert rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import product

from ....core.checkpoint.dtypes import SIZES
from ....core.grouping import by_key
from ....core.ranks.partition import BoxPart, Joined
from ....core.storage import sources
from ....core.storage.fragments import solid
from ....files.torchfile import Parsed, Tensor, TorchFile
from . import rule
from .rule import Filled, Shape

FOLDER = re.compile(r"mp_rank_\d+(?:_\d+)*")
GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")  # TEGroupedLinear
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")

Local = tuple[TorchFile, Tensor]


class Folders:
    """The rank folders of a `mp_rank_*` directory, by pipeline stage, expert and tensor rank."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.parsed = Parsed()
        names = sorted(filter(FOLDER.fullmatch, os.listdir(path)))
        folders = [os.path.join(path, name) for name in names]
        files = [
            TorchFile(os.path.join(each, "model_optim_rng.pt"), self.parsed) for each in folders
        ]
        self.args = rule.arguments_of(files[0].value)
        self.spread = int(self.args.get("expert_model_parallel_size") or 1) > 1
        staged = int(self.args.get("pipeline_model_parallel_size") or 1) > 1 or not self.spread
        self.ranks: dict[tuple[int, int, int], tuple[str, TorchFile]] = {}
        for name, folder, file in zip(names, folders, files, strict=True):
            rank, *further_numbers = map(int, name.split("_")[2:])
            stage = further_numbers.pop(0) if staged and further_numbers else 0
            self.ranks[stage, further_numbers.pop() if further_numbers else 0, rank] = folder, file
        self.stages, self.ep, self.tp = (1 + max(each) for each in zip(*self.ranks, strict=True))

    def partitions(self) -> Iterator[Joined]:
        """Yields every weight, then the masters and moments in flat buffers."""
        whole: dict[str, Shape] = {}
        weights: dict[str, Joined] = {}
        filled: list[Filled] = []
        first, gated = 0, False
        chunks = [
            key for key in self.ranks[0, 0, 0][1].value if re.fullmatch(r"model\d*", str(key))
        ]
        for number, stage in product(range(len(chunks)), range(self.stages)):
            before = first
            for expert in range(self.ep):
                places = [(stage, expert, rank) for rank in range(self.tp)]
                ranks = [self._weights(place, chunks[number], before) for place in places]
                shapes = {name: own.shape for name, (_, own) in ranks[0].items()}
                gated = gated or rule.is_gated(shapes)
                for name, (_, tensor) in ranks[0].items():
                    rule.require_known(self.path, name, ranks[0], self.tp)
                    shape = rule.whole_shape(name, tensor.shape, self.tp)
                    parts: list[BoxPart] = []
                    for rank, tensors in enumerate(ranks):
                        boxes = rule.boxes_of(name, shape, self.tp, rank, gated)
                        if not rank or boxes != rule.boxes_of(name, shape, self.tp, 0, gated):
                            file, local = tensors[name]
                            runs = solid(local.numel, file.extent(local))
                            parts += rule.in_boxes(runs, SIZES[local.dtype], boxes)
                    saved = Joined((name, "param"), tensor.dtype, shape, tuple(parts))
                    weights.setdefault(name, saved)
                    whole[name] = shape
                for place, tensors in zip(places, ranks, strict=True):
                    filled += self._buffers(place, number, tensors)
                layers = [int(match[1]) for name in ranks[0] if (match := rule.LAYER.match(name))]
                first = max([first, *(layer + 1 for layer in layers)])
        yield from weights.values()
        yield from rule.joined(filled, whole, gated)

    def _weights(self, place: tuple[int, int, int], chunk: str, first: int) -> dict[str, Local]:
        """The weights in one model chunk of a rank, in the file's order, by their full names.

        `place` is (stage, expert rank, tensor rank), `chunk` the chunk's key in the file. The
        chunk's first layer has the number `first` in the full model.
        """
        unties = self.args.get("untie_embeddings_and_output_weights") is not False
        stage, number, _ = place
        file = self.ranks[place][1]
        tensors = {
            GROUPED.sub(r"\1.local_experts.\3.\2", key): tensor
            for key, tensor in file.value[chunk].items()
            if isinstance(tensor, Tensor) and not key.endswith("_extra_state")
        }
        experts = {rule.expert_of(key) for key in tensors} - {None}
        weights = {}
        for key, tensor in tensors.items():
            is_copy = key == rule.OUTPUT and stage and not unties
            name = rule.EMBEDDING if is_copy else rule.with_norms(key)
            if match := rule.LAYER.match(name):
                name = f"decoder.layers.{int(match[1]) + first}{name[match.end() :]}"
            if (local := rule.expert_of(name)) is not None:
                name = EXPERT.sub(str(local + number * len(experts)), name)
            weights[name] = file, tensor
        return weights

    def _buffers(
        self, place: tuple[int, int, int], chunk: int, weights: Mapping[str, Local]
    ) -> Iterator[Filled]:
        """Yields a rank's flat buffers of one model chunk, divided among their parameters.

        Each type of weights has a separate buffer. Experts that are spread over ranks have separate
        buffers, too.
        """
        stage, expert, rank = place
        path = os.path.join(self.ranks[place][0], "distrib_optim.pt")
        if not sources.is_file(path):
            raise rule.refusal(self.path, "an optimizer that lists its parameters by number")
        file = TorchFile(path, self.parsed)
        for optimizer in range(1 + self.spread):
            if self.spread and expert and not optimizer:
                continue
            by_type = by_key((dtype, slots) for _, dtype, slots in rule.coalesced(file, optimizer))
            for dtype, listed in by_type.items():
                sizes = [
                    (name, tensor.numel)
                    for name, (_, tensor) in weights.items()
                    if tensor.dtype == dtype
                    and not rule.NOT_TRAINED.fullmatch(name)
                    and (not self.spread or (rule.expert_of(name) is not None) == bool(optimizer))
                ]
                size = rule.bucket_size_of(self.args, stage + chunk)
                yield Filled(rank, self.tp, rule.layout(path, sizes, listed[chunk], size))
