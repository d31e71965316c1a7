"""Finds torch_checkpointing's files: one for each item (a saved object) and rank.

    model_0.pt, model_1.pt, optimizer_0.pt, ...     its default: DTensors, in files of torch.save
    model_0.safetensors, model_1.safetensors        each rank's slices of the tensors

The names are `{item}_{rank}`. Files that programs number by epochs have such names too. Files of
torch.save show whether they hold shards of tensors. Safetensors files do not: if the files of one
item have the same tensor names, but not the same bytes, they count as slices of one model. Only
torch_checkpointing's own `metadata.pkl` states the offsets of a slice; it is written if an item has
a resharder.

Facts are of torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from ...core.storage import sources
from ...core.storage.filenames import counted
from ...errors import UnsupportedCheckpoint, ZckptError
from ...files import safefile
from ...files.torchfile import Tensor, is_torch, peek
from ..statedict.tree import TreePath
from . import sharded_tensors

METADATA = "metadata.pkl"
CONSOLIDATE = "torch_checkpointing.hf.consolidation.consolidate_hf_safetensors_checkpoint"

Items = dict[str | None, dict[int, str]]
"""Paths by item and rank."""


def parts(folder: str, names: Sequence[str], of: str | None = None) -> Items:
    """Finds torch_checkpointing's files `{item}_{rank}.pt`: {item: {rank: path}}.

    An item is a saved object, such as `model`. Returns {} if no item's files have shards of
    tensors. With `of`, the name of one file, only that file's item is considered.
    """
    items = _by_item(folder, names, ".pt", of)
    likeliest = _models_first(items)
    first = next((item for item in likeliest if _is_distributed(items[item])), None)
    # plain tensors that seem to be cut into rows, which zckpt refuses when it merges them
    first = first or next((item for item in likeliest if _are_rows(items[item])), None)
    if first is None:
        return {}
    # other programs number files too: an item without shards must have ranks of the first item
    return {
        item: paths
        for item, paths in items.items()
        if (paths.keys() <= items[first].keys() and any(map(is_torch, paths.values())))
        or _is_distributed(paths)
    }


def slices(folder: str, names: Sequence[str], of: str | None = None) -> list[str]:
    """Finds safetensors files `{item}_{rank}` that may be slices of one model, in order of rank.

    Returns the slices of one item, preferably with `model` in its name; [] if there are none. With
    `of`, the name of one file, only that file's item is considered.
    """
    items = _by_item(folder, names, ".safetensors", of)
    return next((files for item in _models_first(items) if (files := _slices_of(items[item]))), [])


def said_of(files: Sequence[str]) -> str:
    """A clause for an error or a warning: these files seem to be ranks' slices of one model."""
    first, last = (os.path.basename(files[place]) for place in (0, -1))
    return (
        f"{first} to {last} have the same tensor names: they seem to be slices of one model on "
        f"{len(files)} ranks, but do not state the offsets of their slices"
    )


def refusal(path: str, files: Sequence[str]) -> UnsupportedCheckpoint:
    """Returns the error for a file that is a slice, or for a directory of slices (`files`)."""
    folder = os.path.dirname(files[0])
    which = "the file is" if path in files else "each file is"
    name = shlex.quote(path if path in files else files[0])
    hint = f"if {which} a full model, for example of one epoch, give {name} --from gathered"
    if sources.is_file(os.path.join(folder, METADATA)):
        hint += f"; if not, {CONSOLIDATE}({folder!r}) writes full tensors beside the slices"
    return UnsupportedCheckpoint(
        "writer-unsupported", f"{path}: {said_of(files)}", hint=hint, file=path
    )


def _by_item(folder: str, names: Iterable[str], ending: str, of: str | None) -> Items:
    places = {name: place for name in names if (place := counted(name, ending))}
    items: Items = {}
    for name, (item, rank) in places.items():
        if of is None or item == places[of][0]:
            items.setdefault(item, {})[rank] = os.path.join(folder, name)
    return items


def _models_first(items: Items) -> list[str]:
    return sorted(map(str, items), key=lambda item: ("model" not in item, item))


def _is_distributed(paths: Mapping[int, str]) -> bool:
    """Whether the first readable file contains shards of tensors: DTensors or ShardedTensors."""
    for rank in sorted(paths):
        try:
            value = peek(paths[rank])
        except ZckptError:
            continue
        return next(sharded_tensors.distributed_in(value), None) is not None
    return False


def _are_rows(paths: Mapping[int, str]) -> bool:
    """Whether the ranks' files of one saved object seem to have its tensors cut into rows.

    Then the first and the last file have the same tensor names. Some tensors have fewer rows in the
    last file, and no other sizes differ.
    """
    if len(paths) < 2 or sorted(paths) != list(range(len(paths))):
        return False
    try:
        first, last = (dict(_shapes_in(peek(paths[rank]))) for rank in (0, len(paths) - 1))
    except ZckptError:
        return False
    cut = [(shape, last[name]) for name, shape in first.items() if last.get(name) != shape]
    return (
        first.keys() == last.keys() and bool(cut) and all(a[1:] == b[1:] and a > b for a, b in cut)
    )


def _shapes_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, tuple[int, ...]]]:
    if isinstance(tree, Tensor):
        yield path, tree.shape
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _shapes_in(value, (*path, key))


def _slices_of(paths: Mapping[int, str]) -> list[str]:
    """The files in the order of ranks, if they may be slices of one model; else [].

    Slices have the same tensor names, but not all the same bytes.
    """
    files = [paths[rank] for rank in sorted(paths)]
    if len(files) < 2 or sorted(paths) != list(range(len(files))):
        return []
    # a damaged file without readable names counts as a slice: else the others pass for full models
    names = {frozenset(tensors) for path in files if (tensors := _tensors_in(path)) is not None}
    if len(names) == 1 and not all(map(sources.same_bytes, repeat(files[0]), files[1:])):
        return files
    return []


def _tensors_in(path: str) -> list[str] | None:
    try:
        return [stored.name for stored in safefile.read(path)]
    except ZckptError:
        return None
