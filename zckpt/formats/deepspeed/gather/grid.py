"""What all ranks hold together: one model rank's tensors, or those of a grid, joined.

Which file is of which place in the grid, and what layers are called, say `PipelineModule` and
`PipeModelDataParallelTopology`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod

from msgspec import Struct

from ....core import sources
from ....core.dtypes import SIZES, TORCH_NAMES
from ....core.fragments import Fragment, Runs, solid
from ....core.grouping import by_key
from ....core.partition import BoxPart, Joined, Named, Nameless, Partition, Whole
from ....errors import MissingData, UnsupportedCheckpoint
from ....files.torchfile import Parsed, Tensor, TorchFile
from . import whole
from .tensor import Cut, Rules, rules_of
from .zero import RankFiles

SEVERAL = re.compile(r"^layer_\d+-.*model_states\.pt$|mp_rank_0*[1-9]\d*_")
MODEL_RANK = re.compile(r"mp_rank_(\d+)_?(?:optim|model)_states\.pt$")
LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
SHARED = "tied_modules."
HEAD = 1 << 16  # bytes that tell copies and slices of untrained tensors apart
Shape = tuple[int, ...]


class Slice(Struct, frozen=True):
    """A tensor of one tensor rank, whose elements lie in `runs`.

    `strides` are given if its one run is not row-major.
    """

    name: str
    dtype: str
    shape: Shape
    runs: Runs
    strides: tuple[int, ...] | None = None


def partitions(directory: str, tp_rules: str | None = None) -> list[Partition]:
    """All tensors of the engine: weights, masters and moments.

    `tp_rules` is a family or a file that says how tensor ranks cut parameters.
    """
    if any(SEVERAL.search(name) for name in os.listdir(directory)):
        return _of_grid(directory, tp_rules)
    engine = RankFiles(directory)
    if not engine.optimizers:  # stage 0
        optimizers = whole.optimizers(directory, engine.models[0])
        return [*engine.module(), *engine.experts(), *optimizers]
    return list(engine.partitions())


def _of_grid(directory: str, tp_rules: str | None) -> list[Partition]:
    """The same of several model ranks, each whole; further copies under the same name."""
    numbers = {int(m[1]) for n in os.listdir(directory) if (m := MODEL_RANK.search(n))}
    engines = [RankFiles(directory, number) for number in sorted(numbers)]
    if not engines[0].optimizers:
        raise MissingData(
            f"{directory} was saved by several model ranks without ZeRO (stage 0): the engine "
            "loads the optimizer's tensors by number, and no name says which slices are of one",
            hint="verify without --gather",
        )
    trained = {name for engine in engines for group in engine.param_shapes() for name in group}
    parts = [list(engine.partitions()) for engine in engines]
    layers: dict[int, dict[int, str]] = {}
    for name in os.listdir(directory):
        if match := LAYER.fullmatch(name):
            path = os.path.join(directory, name)
            layers.setdefault(int(match[2] or 0), {})[int(match[1])] = path
    tp, parsed = len(layers) or _tensor_ranks(engines), Parsed()
    by_rank = []
    for number in range(tp):
        own = [each for part in chain.from_iterable(parts[number::tp]) for each in slices(part)]
        own += _of_layers(layers.get(number, {}), trained, own, parsed)
        by_rank.append(by_key((each.name, each) for each in own))
    rules = rules_of(tp_rules, engines[0].model.get("universal_checkpoint_info"))
    return list(_joined(by_rank, trained, rules))


def _tensor_ranks(engines: Sequence[RankFiles]) -> int:
    """How many model ranks are tensor ranks, if there are no files of layers.

    With experts the others are stages: these keep their modules in the model files.
    """
    first = engines[0]
    if not first.expert_files:
        return len(engines)
    stated = first.model.get("checkpoint_parallel_dimensions")  # since 0.19.7
    if stated:
        return int(stated["tp_degree"])
    names = [[*map(tuple, engine.param_shapes())] for engine in engines]
    return names.count(names[0])


def slices(part: Partition) -> Iterator[Slice]:
    """The tensors of a part, each by itself."""
    assert not isinstance(part, Nameless | Joined)
    if isinstance(part, Whole):
        runs = solid(prod(part.shape), part.extent)
        yield Slice(part.name, part.dtype, part.shape, runs, part.strides)
        return
    size, ranks = SIZES[part.dtype], range(len(part.ranks))
    ends = list(accumulate(part.length(rank) for rank in ranks))
    flat = Runs([Fragment(ends[r] - part.length(r), ends[r], part.extent(r)) for r in ranks])
    for member in part.members:
        at, numel = member.first, member.numel
        runs = flat.part(at, at + numel, size)
        if part.interleaved:
            width, own = -(-numel // len(ranks)), []
            for rank in ranks:
                start, stop = rank * width, min((rank + 1) * width, numel)
                if start < stop:
                    extent = part.extent(rank).part(at * size, (at + stop - start) * size)
                    own.append(Fragment(start, stop, extent))
            runs = Runs(own)
        yield Slice(member.name, part.dtype, member.shape, runs)


def _whole(tensor: Slice) -> Named:
    """A tensor that its runs hold whole."""
    if tensor.strides or len(tensor.runs) == 1:
        return Whole(tensor.name, tensor.dtype, tensor.shape, tensor.runs[0].extent, tensor.strides)
    corner = (0,) * len(tensor.shape)
    return Joined(tensor.name, tensor.dtype, tensor.shape, tuple(_box(tensor, corner)))


def _box(
    tensor: Slice, offsets: Shape, sizes: Shape | None = None, first: int = 0
) -> Iterator[BoxPart]:
    """The elements of a slice from `first` on, as those of a box of the whole tensor."""
    sizes = tensor.shape if sizes is None else sizes
    if tensor.strides:
        if sizes != tensor.shape:
            raise UnsupportedCheckpoint(
                f"{tensor.runs[0].extent.file}: --gather does not cut {tensor.name}, which is not "
                "row-major in the file",
                hint="verify without --gather",
            )
        yield BoxPart(offsets, sizes, tensor.runs[0].extent, strides=tensor.strides)
        return
    for run in tensor.runs.runs(first, first + prod(sizes), SIZES[tensor.dtype]):
        yield BoxPart(offsets, sizes, run.extent, run.start - first)


# -- the files of layers


def _of_layers(
    paths: Mapping[int, str], trained: set[str], masters: Sequence[Slice], parsed: Parsed
) -> list[Slice]:
    """The tensors of all layers of one tensor rank: "{number of the layer}.{name in the file}".

    A tied layer is `tied_modules.{key}`. No file says the key: it is the one of whose parameters
    all masters round to the weights in the file.
    """
    tied: dict[str, dict[str, list[Slice]]] = {}
    for each in masters:
        name, _, slot = each.name.rpartition("/")
        if slot == "master" and name.startswith(SHARED):
            key, _, inner = name.removeprefix(SHARED).partition(".")
            tied.setdefault(key, {}).setdefault(inner, []).append(each)
    result = []
    for number, path in sorted(paths.items()):
        file = TorchFile(path, parsed)
        tensors = {
            key: _of_file(key, file, value)
            for key, value in file.value.items()
            if isinstance(value, Tensor) and not key.endswith("_extra_state")
        }
        prefix = f"{number}."
        if trained.isdisjoint(prefix + key for key in tensors):
            for key, parameters in tied.items():
                if all(
                    inner in tensors and any(_rounds(copy, tensors[inner]) for copy in copies)
                    for inner, copies in parameters.items()
                ):
                    prefix = f"{SHARED}{key}."
        result += [
            Slice(f"{prefix}{key}/param", each.dtype, each.shape, each.runs, each.strides)
            for key, each in tensors.items()
        ]
    return result


def _of_file(name: str, file: TorchFile, tensor: Tensor) -> Slice:
    extent, strides = file.reach(tensor)
    return Slice(name, tensor.dtype, tensor.shape, solid(tensor.numel, extent), strides)


def _rounds(master: Slice, weight: Slice) -> bool:
    """Whether a master rounds to a weight, by their first elements."""
    import torch

    if master.shape != weight.shape or weight.strides:
        return False
    count = min(prod(master.shape), HEAD // 8)
    if not count:
        return True
    wide, narrow = (
        torch.frombuffer(
            bytearray(_head(each, count)), dtype=getattr(torch, TORCH_NAMES[each.dtype])
        )
        for each in (master, weight)
    )
    return torch.equal(wide.to(narrow.dtype), narrow)


def _head(tensor: Slice, count: int) -> bytes:
    """The bytes of the first `count` elements in the file's order."""
    data = b""
    for run in tensor.runs.runs(0, count, SIZES[tensor.dtype]):
        with sources.opened(run.extent.file) as file:
            data += sources.pread(file.fileno(), run.extent.length, run.extent.offset)
    return data


# -- tensor ranks


def _joined(
    by_rank: Sequence[Mapping[str, Sequence[Slice]]], trained: set[str], rules: Rules
) -> Iterator[Named]:
    """The slices of all tensor ranks as whole tensors; each further copy by itself."""
    weights = {
        each.dtype for rank in by_rank for name in trained for each in rank.get(f"{name}/param", ())
    }
    for name in dict.fromkeys(name for rank in by_rank for name in rank):
        every = [rank.get(name, ()) for rank in by_rank]
        parameter = name.rpartition("/")[0]
        for number in range(max(map(len, every))):
            own = [copies[number] if number < len(copies) else None for copies in every]
            shapes = [None if each is None else each.shape for each in own]
            cut = rules.explicit(parameter, shapes) if len(own) > 1 else Cut.replicated(shapes)
            if cut is None:
                is_whole = parameter not in trained and _is_whole(own, weights)
                cut = Cut.replicated(shapes) if is_whole else Cut.along(shapes, 0)
            yield from _join(name, own, cut)


def _is_whole(own: Sequence[Slice | None], weights: set[str]) -> bool:
    """Whether all ranks have the whole of a tensor that is not trained, and that no rule names.

    The engine never joins these. A tensor of another type than all trained weights is a buffer, and
    buffers are whole. So is a tensor of which all ranks have the same bytes.
    """
    first = own[0]
    if first is None or any(each is None or each.shape != first.shape for each in own):
        return False
    return first.dtype not in weights or _are_equal(own, first)


def _are_equal(own: Sequence[Slice | None], first: Slice) -> bool:
    count = min(prod(first.shape), HEAD // SIZES[first.dtype])
    return len({_head(each, count) for each in own if each is not None}) == 1


def _join(name: str, own: Sequence[Slice | None], cut: Cut) -> Iterator[Named]:
    dtype = next(each.dtype for each in own if each is not None)
    for pieces in cut.copies:
        boxes: list[BoxPart] = []
        for piece in pieces:
            tensor = own[piece.rank]
            if tensor is None:
                continue
            if piece.sizes == tensor.shape == cut.shape:
                yield _whole(Slice(name, dtype, tensor.shape, tensor.runs, tensor.strides))
                break
            boxes += _box(tensor, piece.offsets, piece.sizes, piece.first)
        else:
            yield Joined(name, dtype, cut.shape, tuple(boxes))
