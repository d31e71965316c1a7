"""Reads and writes safetensors files per rank, as torch's HuggingFaceStorageWriter saves them.

    shard-RRRRR-model-FFFFF-of-NNNNN.safetensors    rank R from 1 on, file F of N

`DCP_SHARDING_INFO` in a file's header states at which offsets each shard begins in the full tensor.
No header states the full shape: the tensor ends where its last shard ends.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ...core.checkpoint.dtypes import SIZES, encode
from ...core.checkpoint.inert import Scalar
from ...core.grouping import portions
from ...core.passes.layout import Shell
from ...core.storage.fragments import Record
from ...core.storage.inventory import (
    Numbers,
    every,
    gaps,
    missing_file,
    parse_name,
    refuse_gaps,
    role,
)
from ...errors import CorruptCheckpoint, warning
from ...files import safefile
from ...files.dcptable import ItemBox
from ...files.safefile import SavedTensor, read_with_metadata
from ...training.trainers import CONSOLIDATED, once_more, vocabulary
from ..statedict.names import shape_of
from ..statedict.state_dict_search import find_optimizers, read_optimizer, value_at
from ..statedict.tree import Leaf, SavedTree, assembled, number_of, solid_piece
from ..statedict.write import BlankTensor

SHARD = role(
    "model",
    r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors",
    "dp",
    "part",
    "parts",
    fixed="parts",
)
NAMED = "shard-{:05d}-model-{:05d}-of-{:05d}.safetensors"
EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in)\.weight")
CONFIGS = ((".hf_metadata",), (), (CONSOLIDATED,))
"""Where programs keep a model's configuration: folders relative to the folder of its weights."""
STATE = re.compile(r"(?:[^.]+\.)*?state\.")
INFO, VERSION = "DCP_SHARDING_INFO", "1.0"


def files(folder: str) -> list[str]:
    """The sorted paths of all ranks' safetensors files in a folder."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if parse_name((SHARD,), entry.name))


def read(paths: Sequence[str], saved: SavedTree) -> dict[str, Leaf]:
    """Reads every tensor by name, joined from the ranks' files.

    Adds the files and their byte ranges to `saved`. Raises IncompleteCheckpoint if a file or
    elements are missing, and InconsistentCheckpoint if shards of a tensor overlap.
    """
    tree: dict[str, Leaf] = {}
    _require_complete(paths)
    pieces: dict[str, list[tuple[SavedTensor, tuple[int, ...]]]] = {}
    for path in paths:
        tensors, metadata = read_with_metadata(path)
        saved.files.records += [Record(stored.extent, None) for stored in tensors]
        info = json.loads(metadata.get(INFO, "{}"))
        for stored in tensors:
            offsets = info.get(stored.name, {}).get("saved_offsets")
            begin = tuple(offsets) if offsets is not None else (0,) * len(stored.shape)
            pieces.setdefault(stored.name, []).append((stored, begin))
    for name, parts in pieces.items():
        ends = [
            [o + s for o, s in zip(begin, stored.shape, strict=True)] for stored, begin in parts
        ]
        shape = tuple(map(max, zip(*ends, strict=True)))
        dtype = parts[0][0].dtype
        # a rank without rows writes an empty piece, so the number of pieces is the number of ranks
        fragments = assembled(name, dtype, shape, [solid_piece(*part) for part in parts])
        number = number_of(parts[0][0])
        cuts = frozenset(stored.shape for stored, _ in parts) if len(parts) > 1 else frozenset()
        tree[name] = Leaf(dtype, shape, fragments, number, sharded=len(parts) > 1, parts=cuts)
    saved.files.paths += paths
    return tree


def require_last(folder: str, weights: Mapping[str, Any], saved: SavedTree) -> None:
    """Raises IncompleteCheckpoint if another file shows that the file of the last rank is missing.

    The other file states that a weight has more rows than were read. Without the last rank's file,
    the shards look complete, because they do not state the full shape.
    """
    for name, whole, source in _stated_shapes(folder, weights, saved):
        weight = weights.get(name)
        if not isinstance(weight, Leaf) or len(whole) != len(weight.shape):
            continue
        if whole[1:] == weight.shape[1:] and whole[:1] > weight.shape[:1]:
            rank, _, count = _largest_numbers(_by_numbers(files(folder)))
            raise missing_file(
                os.path.join(folder, NAMED.format(rank + 1, 1, count)),
                hint=f"copy it again: without it, {name} has the shape {list(weight.shape)}, "
                f"and {source} {list(whole)}",
            )


def _stated_shapes(
    folder: str, weights: Mapping[str, Any], saved: SavedTree
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields the full shapes of weights, as states of the optimizer and other files show them.

    Each result is the weight's name, its shape, and words for an error message ("its moments
    have").
    """
    for path in find_optimizers(saved.tree):
        for name, state in read_optimizer(value_at(saved.tree, path)).state.items():
            if (whole := shape_of(state)) is not None:
                yield name, whole, "its moments have"
    for item in once_more(folder, folder):
        try:
            whole_weights = safefile.read(item.path) if item.name.endswith(".safetensors") else ()
        except CorruptCheckpoint as error:
            message = f"not compared with the weights: {error}"
            saved.warnings.append(warning("not-compared", message, file=item.path))
            continue
        for stored in whole_weights:
            yield stored.name, stored.shape, f"{item.path} has"
    for config in (os.path.join(folder, *place, "config.json") for place in CONFIGS):
        if size := vocabulary(config):
            for name in filter(EMBEDDING.fullmatch, weights):
                yield name, (size, *weights[name].shape[1:]), f"by {config} it has"


def state_dicts(tensors: Mapping[str, Leaf]) -> dict[Any, Any]:
    """Splits tensors into the state dicts of a model and of an optimizer.

    `fc.weight` and `optim.state.fc.weight.exp_avg` become {"fc.weight": ..., "optim": {"state":
    {"fc.weight": {"exp_avg": ...}}, "param_groups": [...]}}. All parameters are in one group,
    without hyper-parameters. Without states of an optimizer, `tensors` stays as it is.
    """
    for root in dict.fromkeys(match[0] for name in tensors if (match := STATE.match(name))):
        states = [name for name in tensors if name.startswith(root)]
        places = [name.removeprefix(root).rpartition(".") for name in states]
        owners = dict.fromkeys(owner for owner, _, _ in places)
        weights = [name for name in tensors if not name.startswith(root)]
        for front in _prefixes_before(next(iter(owners)), weights):
            if not all(f"{front}{owner}" in tensors for owner in owners):
                continue
            state: dict[str, dict[str, Leaf]] = {}
            for name, (owner, _, key) in zip(states, places, strict=True):
                state.setdefault(owner, {})[key] = tensors[name]
            other_weights = {name: tensors[name] for name in weights if not name.startswith(front)}
            model = {
                name.removeprefix(front): tensors[name]
                for name in weights
                if name not in other_weights
            }
            # the files have only tensors, and no hyper-parameters
            optimizer = {"state": state, "param_groups": [{"params": list(owners)}]}
            return {  # a common prefix of the weights, such as `model.`, becomes a key too
                **(other_weights | _nested_in(front, model)),
                **_nested_in(root.removesuffix("state."), optimizer),
            }
    return dict(tensors)


def _prefixes_before(owner: str, weights: Sequence[str]) -> list[str]:
    """Possible prefixes of weights before an optimizer's name `owner`, shortest first.

    For `fc.bias` and the weight `model.fc.bias`, the result is ["model."].
    """
    ends = [name.removesuffix(owner) for name in weights if name.endswith(owner)]
    return sorted((front for front in ends if not front or front.endswith(".")), key=len)


def _nested_in(front: str, value: dict[str, Any]) -> dict[str, Any]:
    """Nests `value` in dictionaries: {"a": {"b": value}} for the prefix "a.b."."""
    for key in reversed(front.split(".")[:-1]):
        value = {key: value}
    return value


def shells(
    tensors: Mapping[str, BlankTensor],
    scalars: Mapping[str, Scalar],
    box_of: Callable[[BlankTensor, int], ItemBox | None],
    world: int,
    most: int,
) -> Iterator[Shell]:
    """Lays out the safetensors files of all ranks, of about `most` bytes each, without elements.

    `box_of(tensor, rank)` returns the rows of a tensor that a rank writes; `world` is the number of
    ranks. The values of `scalars` are written. All other elements are left empty until the copy
    fills them in.
    """

    def length(name: str) -> int:
        """The approximate number of bytes that each rank writes of a tensor."""
        return prod(tensors[name].shape) * SIZES[tensors[name].dtype] // world

    groups = [*portions(tensors, length, most)] or [[]]
    for rank, (place, names) in product(range(world), enumerate(groups)):
        boxes = {name: box for name in names if (box := box_of(tensors[name], rank)) is not None}
        info = {name: {"saved_offsets": list(box.offsets)} for name, box in boxes.items()}
        texts = {**safefile.FORMAT, INFO: json.dumps(info), "DCP_VERSION": VERSION}
        described = [(name, tensors[name].dtype, box.sizes) for name, box in boxes.items()]
        head, size = safefile.header(described, texts)
        parts = [(0, head)]
        end = len(head)
        for name, dtype, sizes in described:
            if name in scalars:
                parts.append((end, encode(dtype, scalars[name].value)))
            end += prod(sizes) * SIZES[dtype]
        yield Shell(NAMED.format(rank + 1, place + 1, len(groups)), size, tuple(parts))


def _by_numbers(paths: Sequence[str]) -> dict[Numbers, str]:
    return {own.numbers: path for path in paths if (own := parse_name((SHARD,), path)) is not None}


def _require_complete(paths: Sequence[str]) -> None:
    """Raises IncompleteCheckpoint if a file between the first and the last shard is missing.

    Without this check, a tensor with missing shards would seem to have a smaller shape.
    """
    there = _by_numbers(paths)
    ranks, _, count = _largest_numbers(there)
    wanted = every(range(1, ranks + 1), range(1, count + 1), range(count, count + 1))
    refuse_gaps(os.path.dirname(paths[0]), gaps(SHARD, there, wanted), code="missing-file")


def _largest_numbers(there: Iterable[Numbers]) -> list[int]:
    """The largest rank, file number and count of files in the names of the files."""
    return [*map(max, zip(*there, strict=True))]
