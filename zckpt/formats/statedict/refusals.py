"""Refuses state dicts that zckpt cannot read, because of their keys or their tensors' shapes.

Every reader of state dicts calls this module: files of torch.save, directories of
torch.distributed.checkpoint and safetensors all have keys and shapes.

    flat weights    FSDP1's LOCAL_STATE_DICT: a key `_flat_param`
    flat states     `optimizer.state_dict()` of FSDP1: 1-d states of weights with more axes
    slices          a weight that is one rank's slice beside a full moment, or the reverse
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.checkpoint.inert import PLAIN
from ...errors import FlatParameters, InconsistentCheckpoint
from .names import ELEMENTWISE
from .roots import fits
from .state_dict_search import DEPTH, OptimizerState
from .tree import Leaf, SavedTree, TreePath, dotted

FLAT = ("_flat_param", "flat_param")
"""How names of FSDP1's flat parameters begin, after the name of their module."""
WHOLE = (
    "save the DTensors themselves, without to_local(), because a DTensor states which slice it "
    "holds; or save whole tensors (full_tensor(), or full_state_dict=True)"
)
"""A hint: what a program should save instead of slices."""


def refuse_tree(tree: Any, where: str) -> None:
    """Raises FlatParameters if a key in the state dicts names one of FSDP1's flat parameters.

    `where` is the path of the checkpoint, for the message.
    """
    for path in _keys(tree):
        if str(path[-1]).rpartition(".")[2].startswith(FLAT):
            raise FlatParameters(
                "writer-unsupported",
                f"{where} was saved as FSDP1's LOCAL_STATE_DICT: {dotted(path)} is a flat "
                "parameter. No file states the names and shapes of the weights in it",
                hint="save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def refuse_flat_states(
    saved: SavedTree,
    models: Sequence[Mapping[Any, Any]],
    optimizers: Mapping[TreePath, OptimizerState],
) -> None:
    """Raises FlatParameters if an optimizer's states belong to FSDP1's flat parameters.

    `optimizer.state_dict()` of FSDP1 numbers flat parameters, and each rank holds a 1-d slice of
    their states. The weights, and the optimizer state dict that FSDP itself returns, are sharded
    but not flat.
    """
    weights = [leaf for model in models for leaf in model.values() if isinstance(leaf, Leaf)]
    if not any(leaf.sharded and len(leaf.shape) > 1 for leaf in weights):
        return
    for path, optimizer in optimizers.items():
        moments = [
            leaf
            for state in optimizer.state.values()
            for key, leaf in state.items()
            if key in ELEMENTWISE and isinstance(leaf, Leaf)
        ]
        is_flat = all(len(leaf.shape) == 1 and not leaf.sharded for leaf in moments)
        if optimizer.is_numbered and moments and is_flat:
            raise FlatParameters(
                "writer-unsupported",
                f"{saved.root}: the optimizer {dotted(path)} has states of FSDP1's flat "
                "parameters, sharded over the ranks. No file states which weights a flat parameter "
                "contains",
                hint=f"convert only the weights: `zckpt convert {saved.root} DST --weights-only`. "
                "To keep the optimizer, save FSDP.optim_state_dict(model, optimizer), or train "
                "with FSDP2 (in verl: actor.strategy=fsdp2)",
                file=saved.root,
            )


def refuse_parts(
    saved: SavedTree, model: Mapping[str, Any], optimizer: OptimizerState, weights_only: bool
) -> None:
    """Raises InconsistentCheckpoint if a weight or a moment is only one rank's slice of the tensor.

    Each weight is compared with its moments: a slice has the shape of one rank's shard of the
    other tensor. With `weights_only`, a moment may be a slice. `optimizer` must have the names in
    `model`.
    """
    # torch.distributed.checkpoint stores only one rank's slice if a program saved slices as plain
    # tensors, and no trace of the others; but shapes show it
    for name, state in optimizer.state.items():
        weight = model.get(name)
        for key in ELEMENTWISE & state.keys():
            moment = state[key]
            if not (isinstance(weight, Leaf) and isinstance(moment, Leaf)):
                continue
            if is_part(weight, moment):
                raise _slice(saved, name, weight, moment, f"its {key}")
            if is_part(moment, weight) and not weights_only:
                raise _slice(saved, f"{name}/{key}", moment, weight, "its weight")


def refuse_unnamed_parts(
    saved: SavedTree, model: Mapping[str, Any], optimizer: OptimizerState, weights_only: bool
) -> None:
    """Raises InconsistentCheckpoint if a weight or a moment seems to be one rank's slice.

    Parameters have numbers and no names, so it is unknown which moments a weight has. Weights are
    compared with all moments, and moments with all weights: a slice has the shape of one rank's
    shard of the other tensor. With `weights_only`, a moment may be a slice.
    """
    weights = {name: leaf for name, leaf in model.items() if isinstance(leaf, Leaf) and leaf.shape}
    moments = {
        f"{number}/{key}": leaf
        for number, state in optimizer.state.items()
        for key, leaf in state.items()
        if key in ELEMENTWISE and isinstance(leaf, Leaf)
    }
    if not optimizer.is_numbered or fits(optimizer, model):  # the states have the weights' shapes
        return
    if part := _part_among(weights, moments):
        raise _slice(saved, *part, "a state of the optimizer")
    if not weights_only and (part := _part_among(moments, weights)):
        raise _slice(saved, *part, "a weight")


def _part_among(
    tensors: Mapping[str, Leaf], other_tensors: Mapping[str, Leaf]
) -> tuple[str, Leaf, Leaf] | None:
    """Finds the first of `tensors` with the shape of one rank's shard of one of `other_tensors`.

    Returns (its name, the tensor, the other tensor). None if there is none, or if any of `tensors`
    is sharded.
    """
    # sharded tensors state their offsets: they are no slices
    if any(leaf.sharded for leaf in tensors.values()):
        return None
    parts = {shape: leaf for leaf in other_tensors.values() for shape in leaf.parts}
    wholes = {leaf.shape for leaf in other_tensors.values()}
    parts_found = [
        (name, leaf, parts[leaf.shape])
        for name, leaf in tensors.items()
        if leaf.shape in parts.keys() - wholes
    ]
    return parts_found[0] if parts_found else None


def _slice(
    saved: SavedTree, name: str, part: Leaf, whole: Leaf, other: str
) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        "rank-slices",
        f"{saved.root}: {name} has the shape {list(part.shape)}, which is one rank's slice of "
        f"{list(whole.shape)}, the shape of {other}",
        hint=WHOLE,
        file=saved.root,
        subject=name,
    )


def is_part(leaf: Leaf, whole: Leaf) -> bool:
    """Whether the plain tensor `leaf` has the shape of one rank's shard of the tensor `whole`."""
    return not leaf.sharded and leaf.shape != whole.shape and leaf.shape in whole.parts


def _keys(tree: Any, path: TreePath = ()) -> Iterator[TreePath]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            if type(value) not in PLAIN and len(path) < DEPTH:
                yield from _keys(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for place, item in enumerate(tree):
            if type(item) not in PLAIN and len(path) < DEPTH:
                yield from _keys(item, (*path, place))
