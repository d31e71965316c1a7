"""Joins the tensors of all ranks, with or without pipeline stages and tensor parallelism.

DeepSpeed's `PipelineModule` and `PipeModelDataParallelTopology` define which stage and tensor rank
a file belongs to, and the names of layers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise, zip_longest
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from ....core.checkpoint.dtypes import SIZES, TORCH_NAMES
from ....core.checkpoint.entries import Key, name_of
from ....core.grouping import by_key
from ....core.ranks.partition import BoxPart, Joined, Named, Nameless, Partition, Whole
from ....core.storage import sources
from ....core.storage.fragments import Fragment, Runs, solid
from ....errors import MissingData, UnsupportedCheckpoint
from ....files.torchfile import Parsed, Tensor, TorchFile
from .model_rank import OPTIMIZER, ModelRank
from .tensor import Cut, Piece, Rules, rules_of

SEVERAL = re.compile(r"^layer_\d+-.*model_states\.pt$|mp_rank_0*[1-9]\d*_")
MODEL_RANK = re.compile(r"mp_rank_(\d+)_?(?:optim|model)_states\.pt$")
LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
TIED = re.compile(r"(tied_modules\.[^.]*)\.(.*)")
HEAD = 1 << 15  # elements that distinguish copies from slices of untrained tensors


class Slice(Struct, frozen=True):
    """One tensor rank's slice of a tensor, and where its bytes are in files.

    key       (name, slot): ("fc.weight", "master")
    dtype     such as "BF16"
    shape     of the slice
    runs      the byte ranges of its elements
    strides   in elements, if the slice is one byte range that is not row-major; else None
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    runs: Runs
    strides: tuple[int, ...] | None = None

    def head(self, count: int) -> bytes:
        """The bytes of the first `count` elements, in the order in which the file stores them."""
        data = b""
        for run in self.runs.runs(0, min(count, prod(self.shape)), SIZES[self.dtype]):
            with sources.opened(run.extent.file) as file:
                data += sources.pread(file.fileno(), run.extent.length, run.extent.offset)
        return data

    def boxes(self, piece: Piece) -> Iterator[BoxPart]:
        """Yields the byte ranges in files that contain the elements of a piece of the full tensor.

        Each `BoxPart` states the piece (its offsets and sizes in the full tensor), one contiguous
        byte range, and where in the piece this range begins.
        """
        if self.strides:
            if piece.sizes != self.shape:
                raise UnsupportedCheckpoint(
                    "proof-unsupported",
                    f"{self.runs[0].extent.file}: --gather cannot cut {name_of(self.key)}, "
                    "which is not row-major in the file",
                    hint="verify without --gather",
                    file=self.runs[0].extent.file,
                )
            yield BoxPart(piece.offsets, piece.sizes, self.runs[0].extent, strides=self.strides)
            return
        first, stop = piece.first, piece.first + prod(piece.sizes)
        for run in self.runs.runs(first, stop, SIZES[self.dtype]):
            yield BoxPart(piece.offsets, piece.sizes, run.extent, run.start - first)


def partitions(directory: str, tp_rules: str | None = None) -> list[Partition]:
    """The weights, masters and moments in a directory, and where their bytes are in its files.

    An item is one tensor, or a flat buffer of several; copies have the same name. `tp_rules` is a
    model family or a rule file that states how tensor ranks cut parameters. Raises MissingData if
    no file shows the tensors' names.
    """
    names = os.listdir(directory)
    if not any(map(SEVERAL.search, names)):
        return list(ModelRank(directory).partitions())
    numbers = {int(match[1]) for name in names if (match := MODEL_RANK.search(name))}
    data_ranks = [match["rank"] for name in names if (match := OPTIMIZER.fullmatch(name))]
    if len(numbers) > 1 and 0 < len(data_ranks) == len({*data_ranks}):
        # up to 0.19.5, rank r of a run with sequence parallelism loads mp_rank_{r % sp}
        return list(ModelRank(directory, None).partitions())
    ranks = [ModelRank(directory, number) for number in sorted(numbers)]
    if not ranks[0].optimizers:
        raise MissingData(
            "proof-unsupported",
            f"{directory} was saved by several model ranks without ZeRO (stage 0): the files "
            "number the optimizer's tensors, and no name shows which slices belong to one tensor",
            hint="verify without --gather",
        )
    trained = {name for rank in ranks for group in rank.param_shapes() for name in group}
    layers = by_key(
        (int(match[2] or 0), (int(match[1]), os.path.join(directory, match[0])))
        for name in names
        if (match := LAYER.fullmatch(name))
    )
    tp, parsed = len(layers) or _tensor_ranks(ranks), Parsed()
    by_rank = []
    for number in range(tp):
        parts = [part for rank in ranks[number::tp] for part in rank.partitions()]
        tensors = [each for part in parts for each in slices(part)]
        files = [(layer, TorchFile(path, parsed)) for layer, path in sorted(layers.get(number, ()))]
        tensors += [*_of_layers(files, trained, tensors)]
        by_rank.append(by_key((each.key, each) for each in tensors))
    rules = rules_of(tp_rules, ranks[0].model.get("universal_checkpoint_info"))
    return list(_joined(by_rank, trained, rules))


def _tensor_ranks(ranks: Sequence[ModelRank]) -> int:
    """The number of tensor ranks if there are no files of layers.

    If the model has experts, some of the model ranks may be stages of a pipeline: such a pipeline
    saves the weights of its stages in model files, not in files of layers.
    """
    first = ranks[0]
    if not first.experts:
        return len(ranks)
    dimensions = first.model.get("checkpoint_parallel_dimensions")  # since 0.19.7
    if dimensions:
        return int(dimensions["tp_degree"])
    names = [[*map(tuple, rank.param_shapes())] for rank in ranks]
    return names.count(names[0])


def slices(part: Partition) -> Iterator[Slice]:
    """Yields the tensors that `part` contains, each with its byte ranges in files.

    `part` is one tensor, or a flat buffer that contains several tensors.
    """
    assert not isinstance(part, Nameless | Joined)
    if isinstance(part, Whole):
        runs = solid(prod(part.shape), part.extent)
        yield Slice(part.key, part.dtype, part.shape, runs, part.strides)
        return
    size, ends = SIZES[part.dtype], accumulate(map(part.length, range(len(part.ranks))))
    pairs = zip(pairwise((0, *ends)), part.ranks, strict=True)
    flat = Runs([Fragment(start, stop, extent) for (start, stop), extent in pairs])
    for member in part.members:
        at, numel = member.first, member.numel
        runs = flat.part(at, at + numel, size)
        if part.interleaved:
            width = -(-numel // len(part.ranks))
            bounds = [min(rank * width, numel) for rank in range(len(part.ranks) + 1)]
            runs = Runs(
                [
                    Fragment(start, stop, extent.part(at * size, (at + stop - start) * size))
                    for (start, stop), extent in zip(pairwise(bounds), part.ranks, strict=True)
                ]
            )
        yield Slice(member.key, part.dtype, member.shape, runs)


# -- the files of layers


def _of_layers(
    files: Sequence[tuple[int, TorchFile]], trained: set[str], tensors: Sequence[Slice]
) -> Iterator[Slice]:
    """Yields the tensors in one tensor rank's layer files, with their names in the full model.

    Names are such as "3.fc.weight" and, in tied layers, "tied_modules.embed.weight". The masters in
    `tensors` show which layers are tied. `trained` has the names of trained parameters.
    """
    tied = by_key(
        (m[1], (m[2], tensor))
        for tensor in tensors
        if tensor.key[1] == "master" and (m := TIED.fullmatch(tensor.key[0]))
    )
    for number, file in files:
        weights = {
            name: Slice(
                (name, "param"), value.dtype, value.shape, solid(value.numel, extent), strides
            )
            for name, value in file.value.items()
            if isinstance(value, Tensor) and not name.endswith("_extra_state")
            for extent, strides in [file.reach(value)]
        }
        prefix = str(number)
        # no file states the key of a tied layer: all its masters must round to the file's weights
        if trained.isdisjoint(f"{number}.{key}" for key in weights):
            for name, masters in tied.items():
                rounded = {key for key, each in masters if _rounds(each, weights.get(key))}
                prefix = name if rounded == {key for key, _ in masters} else prefix
        for key, weight in weights.items():
            yield replace(weight, key=(f"{prefix}.{key}", "param"))


def _rounds(master: Slice, weight: Slice | None) -> bool:
    """Whether the first elements of a master, rounded, equal the first elements of a weight."""
    import torch

    if weight is None or master.shape != weight.shape or weight.strides:
        return False
    if not prod(master.shape):
        return True
    wide, narrow = (
        torch.frombuffer(
            bytearray(tensor.head(HEAD)), dtype=getattr(torch, TORCH_NAMES[tensor.dtype])
        )
        for tensor in (master, weight)
    )
    return torch.equal(wide.to(narrow.dtype), narrow)


# -- tensor ranks


def _joined(
    by_rank: Sequence[Mapping[Key, Sequence[Slice]]], trained: set[str], rules: Rules
) -> Iterator[Named]:
    """Joins the slices of all tensor ranks; yields full tensors.

    If each rank has several copies of a tensor, the first copies of all ranks are joined, then the
    second ones, and so on.
    """
    weights = {
        each.dtype for rank in by_rank for name in trained for each in rank.get((name, "param"), ())
    }
    for key in dict.fromkeys(chain.from_iterable(by_rank)):
        parameter, _ = key
        for tensors in zip_longest(*(rank.get(key, ()) for rank in by_rank)):
            shapes = [None if each is None else each.shape for each in tensors]
            cut = rules.explicit(parameter, shapes) if len(tensors) > 1 else Cut.replicated(shapes)
            if cut is None:
                is_whole = parameter not in trained and _is_whole(tensors, weights)
                cut = Cut.replicated(shapes) if is_whole else Cut.along(shapes, 0)
            yield from _join(key, tensors, cut)


def _is_whole(slices_of_ranks: Sequence[Slice | None], weights: set[str]) -> bool:
    """Whether every tensor rank has a full copy of an untrained tensor, and not a slice.

    `weights` has the dtypes of trained weights.
    """
    if None in slices_of_ranks or len({each.shape for each in slices_of_ranks if each}) > 1:
        return False
    # a tensor of another dtype is a buffer, and complete; else the first elements decide
    return {each.dtype for each in slices_of_ranks if each}.isdisjoint(weights) or (
        len({each.head(HEAD) for each in slices_of_ranks if each}) == 1
    )


def _join(key: Key, slices_of_ranks: Sequence[Slice | None], cut: Cut) -> Iterator[Named]:
    dtype = next(each.dtype for each in slices_of_ranks if each)
    for pieces in cut.copies:
        pairs = [(slices_of_ranks[piece.rank], piece) for piece in pieces]
        boxes = [box for tensor, piece in pairs if tensor for box in tensor.boxes(piece)]
        if len(boxes) == 1 and boxes[0].sizes == cut.shape:
            yield Whole(key, dtype, cut.shape, boxes[0].extent, boxes[0].strides)
        else:
            yield Joined(key, dtype, cut.shape, tuple(boxes))
