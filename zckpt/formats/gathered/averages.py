"""Joins averages of weights that ranks saved as plain slices.

    model    fc.weight    DTensor    rank 0: rows 0 to 9    rank 1: rows 10 to 19 ...
    ema      fc.weight    plain      rank 0: 10 rows        rank 1: 10 rows ...

A program that averages `parameter.to_local()` saves no placement. If the slices' names and shapes
on all ranks match the shards of the model's own DTensors (or ShardedTensors), the slices get the
same offsets. Slices with other names or shapes are left out: one rank's slice never stands for all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import FLOATS
from ...core.checkpoint.inert import nested
from ...errors import Notice, warning
from ...files.torchfile import Tensor, TorchFile
from ..statedict.slices import entry_of, omitted
from ..statedict.state_dict_search import DEPTH, is_optimizer, without
from ..statedict.tree import Difference, Leaf, TreePath, dotted
from .rank_trees import joined as joined_parts
from .rank_trees import text
from .sharded_tensors import (
    DistributedTensor,
    LocalPart,
    MeshCache,
    is_distributed,
    read_distributed,
)

Tensors = dict[int, Tensor]
"""The plain tensors that ranks saved at one path of their files, by rank."""


class RankFiles(Struct, frozen=True):
    """The files of one kind, such as model or optimizer, by rank.

    The files of all kinds are merged into one tree; `place` is the path of this kind in the tree.
    """

    place: TreePath
    files: Mapping[int, TorchFile]

    def values(self, path: TreePath) -> dict[int, Any]:
        """The value at `path` in every rank's file, by rank; `path` is a tuple of keys."""
        return {rank: _value_at(file.value, path) for rank, file in self.files.items()}


class Model(Struct, frozen=True):
    """A model whose DTensors state the offsets of each rank's shard.

    `names` are the names of the model's DTensors, `plain` the names of its other tensors.
    """

    path: TreePath
    ranks: RankFiles
    names: frozenset[str]
    plain: frozenset[str]
    meshes: MeshCache

    def cut(self, name: str) -> dict[int, DistributedTensor]:
        values = self.ranks.values((*self.path, name))
        return {
            rank: read_distributed(value, rank, self.ranks.files[rank], self.meshes)
            for rank, value in values.items()
            if is_distributed(value)
        }


def joined(
    tree: dict[Any, Any], ranks: Sequence[RankFiles], different: Sequence[Difference]
) -> tuple[dict[Any, Any], list[Notice], Callable[[TreePath], bool]]:
    """Joins averages (EMA) that ranks saved as plain slices; removes those that do not fit.

    `tree` is merged from the files of all ranks, `ranks`. `different` are the values that differ
    between ranks. The last result tells whether the value at a path was joined or removed.
    """
    tables = [(each, path, value) for each in ranks for path, value in _tables(each)]
    models = [
        Model(path, rank_files, frozenset(names), frozenset(value.keys() - names), MeshCache())
        for rank_files, path, value in tables
        if isinstance(value, dict)
        if (names := {key for key, item in value.items() if is_distributed(item)})
    ]
    if not models:
        return tree, [], lambda _: False
    kept = [(*model.ranks.place, *model.path) for model in models]
    kept += [(*each.place, *path) for each in ranks for path in _optimizers(each)]
    differing = {item.path for item in different}
    warnings: list[Notice] = []
    settled: list[TreePath] = []
    for rank_files, path, value in tables:
        place = (*rank_files.place, *path)
        if place in kept or any(place[: len(done)] == done for done in settled):
            continue
        slots = value.items() if isinstance(value, dict) else enumerate(value)
        tensors = {
            key: _by_rank(rank_files, (*path, key)) for key, item in slots if _is_plain(item)
        }
        leaves, is_slices = _joined_like_model(tensors, rank_files, models, place, differing)
        if leaves:
            table = nested(tree, *place)
            table.update(leaves)
            settled += [(*place, key) for key in leaves]
            what = dotted(place)
            message = f"{what}: the ranks' plain slices are joined like the model's DTensors"
            warnings.append(warning("place-inferred", message, subject=what))
        elif is_slices:
            entry = entry_of(place, kept)
            tree = without(tree, {entry})
            settled.append(entry)
            warnings.append(omitted(dotted(entry)))
    return tree, warnings, lambda path: any(path[: len(done)] == done for done in settled)


def _joined_like_model(
    tensors: Mapping[Any, Tensors],
    ranks: RankFiles,
    models: Sequence[Model],
    place: TreePath,
    differing: set[TreePath],
) -> tuple[dict[Any, Leaf], bool]:
    """Joins ranks' tensors (by key) if they match the shards of one model's DTensors.

    The second result is true if the tensors must be left out: they are slices that cannot be
    joined, or full tensors that differ between ranks.
    """
    is_slices = False
    for model in models:
        called = _names_in_model(tensors, model)
        cuts = {key: model.cut(called[key]) for key in tensors if called.get(key) in model.names}
        if not cuts:
            continue
        if all(_are_whole(tensors[key], cut) for key, cut in cuts.items()):
            return {}, any((*place, key) in differing for key in cuts)
        other_keys = [
            key
            for key in tensors.keys() - cuts.keys()
            if (*place, key) in differing and called.get(key) not in model.plain
        ]
        leaves = {
            key: leaf
            for key, cut in cuts.items()
            if (leaf := _leaf(dotted((*place, key)), tensors[key], cut, ranks)) is not None
        }
        if len(leaves) == len(cuts) and not other_keys:
            return leaves, False
        is_slices = True
    floats = [
        key
        for key, tensors_of_key in tensors.items()
        if (*place, key) in differing
        and tensors_of_key
        and next(iter(tensors_of_key.values())).dtype in FLOATS
    ]
    shapes = [{rank: tensor.shape for rank, tensor in tensors[key].items()} for key in floats]
    return {}, is_slices or (bool(shapes) and _are_parts(shapes, models))


def _are_parts(shapes: Sequence[Mapping[int, Any]], models: Sequence[Model]) -> bool:
    """Whether any tensor has, on every rank, the shape of that rank's shard of some DTensor.

    `shapes` has one item per tensor: its shape by rank.
    """
    for model in models:
        for name in model.names:
            cut = model.cut(name)
            sizes = {rank: part for rank, each in cut.items() if (part := _sizes(each)) is not None}
            whole = next(iter(cut.values())).shape
            if any(size != whole for size in sizes.values()) and sizes in shapes:
                return True
    return False


def _sizes(tensor: DistributedTensor) -> tuple[int, ...] | None:
    """The shape of a rank's one shard of a tensor; None if the rank has none, or several."""
    return tensor.parts[0].sizes if len(tensor.parts) == 1 else None


def _are_whole(tensors: Tensors, cut: Mapping[int, DistributedTensor]) -> bool:
    """Whether each rank's plain tensor has the full shape of the model's weight.

    `cut` has the ranks' shards of this weight.
    """
    wholes = {each.shape for each in cut.values()}
    return all({tensor.shape} == wholes for tensor in tensors.values())


def _leaf(
    name: str, tensors: Tensors, cut: Mapping[int, DistributedTensor], ranks: RankFiles
) -> Leaf | None:
    """Joins ranks' plain tensors at the offsets of a DTensor's shards; None if they do not fit.

    `cut` has the ranks' shards of this DTensor. The tensors fit if they have the shards' shapes,
    and one type on all ranks.
    """
    if tensors.keys() != cut.keys() or len({tensor.dtype for tensor in tensors.values()}) > 1:
        return None
    parts: dict[TreePath, LocalPart] = {}
    for rank, tensor in tensors.items():
        parts_of_rank = cut[rank].parts
        if (_sizes(cut[rank]) if parts_of_rank else None) != (
            tensor.shape if tensor.numel else None
        ):
            return None
        if not parts_of_rank:
            continue
        part = LocalPart(
            parts_of_rank[0].offsets, parts_of_rank[0].sizes, tensor, ranks.files[rank]
        )
        first_part = parts.setdefault(part.offsets, part)
        if first_part is not part and text(first_part.tensor, first_part.file) != text(
            tensor, part.file
        ):
            return None
    first = replace(next(iter(cut.values())), dtype=next(iter(tensors.values())).dtype)
    return joined_parts(name, first, [*parts.values()])


def _names_in_model(keys: Mapping[Any, Any], model: Model) -> dict[Any, str]:
    """Maps keys of tensors to names of tensors in the model: {"module.fc.weight": "fc.weight"}.

    The keys are the names themselves, or all have one prefix before them, such as `module.`.
    Returns {} if they are neither.
    """
    names = model.names | model.plain
    if any(key in model.names for key in keys):
        return {key: key for key in keys}
    for prefix in {str(key).partition(".")[0] + "." for key in keys}:
        called = {key: str(key).removeprefix(prefix) for key in keys if str(key).startswith(prefix)}
        if model.names & {*called.values()} and {*called.values()} <= names:
            return called
    return {}


def _tables(ranks: RankFiles) -> Iterator[tuple[TreePath, Any]]:
    """Yields the dictionaries and lists that contain tensors, each with its path.

    Only the file of the lowest rank is searched. Optimizers' state dicts are skipped.
    """
    for path, value in _containers(ranks.files[min(ranks.files)].value):
        items = value.values() if isinstance(value, dict) else value
        if any(_is_plain(item) or is_distributed(item) for item in items):
            yield path, value


def _containers(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    if not isinstance(value, (dict, list)) or len(path) > DEPTH:
        return
    if isinstance(value, dict) and is_optimizer(value):
        return
    yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _containers(item, (*path, key))


def _optimizers(ranks: RankFiles) -> Iterator[TreePath]:
    value = ranks.files[min(ranks.files)].value
    if isinstance(value, dict) and is_optimizer(value):
        yield ()
    for path, table in _containers(value):
        if isinstance(table, dict):
            for key, item in table.items():
                if isinstance(item, dict) and is_optimizer(item):
                    yield (*path, key)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.shape)


def _by_rank(ranks: RankFiles, path: TreePath) -> Tensors:
    return {rank: value for rank, value in ranks.values(path).items() if _is_plain(value)}


def _value_at(tree: Any, path: TreePath) -> Any:
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and type(key) is int and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree
