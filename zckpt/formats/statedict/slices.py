"""Finds tensors that are only one rank's slice: raises an error, or leaves the tensor out.

Ranks of one run hold equal weights, or shards that state their offsets. If a plain tensor has
different values on two ranks, each rank probably saved its slice (`to_local()`). Slices of averages
beside the model (EMA) are left out with a warning. Slices of these tensors are an error:

    weights     those that an optimizer lists; without an optimizer, all tensors of the model except
                running statistics, which always differ, and buffers that the user names
    states      every optimizer state except the error that gradient compression keeps on each rank
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from ...core.grouping import by_key
from ...errors import InconsistentCheckpoint, Notice, counted, note, warning
from .names import ELEMENTWISE
from .refusals import WHOLE, is_part
from .roots import fits
from .state_dict_search import MODELS, OptimizerState, lists_in, matches_any, without
from .tree import Difference, Leaf, SavedTree, TreePath, dotted

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of torch's normalizations that each DDP rank computes separately (torch 2.13)."""
# such as `worker_error` and `server_error` of 1-bit Adam
OF_RANKS = re.compile(r"(?:.*_)?(?:error|errors|err|residual|residuals|feedback|ef)(?:_.*)?")
"""Names of the errors that gradient compression keeps on each rank, such as `worker_error`."""
ZERO = (
    "if the optimizer is a ZeroRedundancyOptimizer, each rank holds the states of only some "
    "parameters: call consolidate_state_dict() before saving"
)


def taken_of_rank_0(different: Sequence[Difference]) -> list[Notice]:
    """Notes that ranks have different values and zckpt uses rank 0's; one note for each key."""
    notes = []
    for place, paths in by_key((item.path[:2], item.path) for item in different).items():
        what = dotted(paths[0]) if len(paths) == 1 else f"{dotted(place)} ({len(paths)} values)"
        message = f"{what}: the values differ between ranks; rank 0's are used"
        notes.append(note("rank-zero-taken", message, subject=dotted(place)))
    return notes


def refuse_weights(
    saved: SavedTree,
    place: TreePath,
    names: Mapping[str, str],
    model: Mapping[str, Any],
    optimizers: Mapping[TreePath, OptimizerState],
    listed: Collection[str] | None,
    buffers: Sequence[str],
) -> None:
    """Raises InconsistentCheckpoint if weights of a model are ranks' slices, and names one of them.

    place       the path of the model's state dict
    names       {key in this state dict: name in `model`}
    model       the model's tensors by name
    optimizers  the optimizers that train the model, by path
    listed      parameter names that these optimizers list; None if unknown, or without optimizer
    buffers     globs of tensors that may differ between ranks
    """
    differing = {
        names[item.path[-1]]: item
        for item in saved.ranks.different
        if item.path[:-1] == place and item.path[-1] in names
        if isinstance(model.get(names[item.path[-1]]), Leaf)
    }
    if listed is None and optimizers:
        equal = {name: leaf for name, leaf in model.items() if name not in differing}
        if all(fits(optimizer, equal) for optimizer in optimizers.values()):
            return
        if any(leaf.sharded for leaf in model.values() if isinstance(leaf, Leaf)):
            differing = {name: item for name, item in differing.items() if not item.is_alike}
    shown = () if listed is None else listed
    wrong = {
        name: item
        for name, item in differing.items()
        if name in shown
        # in DDP, weights and buffers have the same shapes on all ranks
        or not ((listed is not None and item.is_alike) or _is_of_ranks(name, buffers))
    }
    if wrong:
        name = max(wrong, key=lambda name: (not wrong[name].is_alike, prod(model[name].shape)))
        way = "" if name in shown else f"; if ranks keep different values, add --buffers '{name}'"
        raise _slices(name, wrong[name], len(wrong) - 1, WHOLE + way)


def refuse_states(
    saved: SavedTree, place: TreePath, optimizer: OptimizerState, names: Mapping[Any, str]
) -> None:
    """Raises InconsistentCheckpoint if states of an optimizer are ranks' slices.

    The error names one of the states. `place` is the path of the optimizer's state dict. `names`
    maps the parameters that it lists to the model's names, as far as these are known.
    """
    inside = [item for item in saved.ranks.different if item.path[: len(place)] == place]
    for item in inside:
        if item.path[len(place) :][:1] == ("param_groups",) and "params" in item.path:
            raise InconsistentCheckpoint(
                "rank-slices",
                f"the optimizers in {item.files[0]} and {item.files[1]} list different parameters, "
                "and only by number, not by name",
                hint=ZERO,
            )
    states = {
        state_key: item for item in inside if (state_key := _state_of(item, place, optimizer))
    }
    wrong = {
        f"{names.get(member, member)}/{key}": item
        for (member, key), item in states.items()
        if item.shapes is not None and item.shapes != ((), ())
        if not _is_kept_apart(member, key, {*states}, optimizer)
    }
    if wrong:
        name = next(iter(wrong))
        hint = f"{WHOLE}; {ZERO}" if optimizer.is_numbered else WHOLE
        raise _slices(name, wrong[name], len(wrong) - 1, hint)


def _slices(name: str, item: Difference, more: int, hint: str) -> InconsistentCheckpoint:
    a, b = item.files
    shapes = item.shapes or ((), ())
    what = f"shapes of it ({list(shapes[0])}, {list(shapes[1])})"
    other_tensors = f" (as do {counted(more, 'other tensor')})" if more else ""
    return InconsistentCheckpoint(
        "rank-slices",
        f"{name}: {a} and {b} hold different {what if shapes[0] != shapes[1] else 'values of it'}, "
        "but it is not a DTensor or ShardedTensor: each file seems to hold one rank's slice"
        f"{other_tensors}",
        hint=hint,
        subject=name,
    )


def _is_of_ranks(name: str, buffers: Sequence[str]) -> bool:
    """Whether a tensor of the model may have another value on each rank.

    True for running statistics, and for buffers that the user names (`--buffers`).
    """
    return name.rpartition(".")[2] in STATISTICS or matches_any(name, buffers)


def _state_of(
    item: Difference, place: TreePath, optimizer: OptimizerState
) -> tuple[Any, str] | None:
    """Finds out which optimizer state a difference between ranks is about: (parameter, key).

    None if it is about something else. `place` is the path of the optimizer's state dict.
    """
    rest = item.path[len(place) :]
    if optimizer.layout == "flat":
        kind, _, name = str(rest[0]).partition(".") if rest else ("", "", "")
        member, _, flat_key = name.rpartition(".")
        return (member, flat_key) if kind == "state" else None
    if len(rest) < 3 or rest[0] != "state":
        return None
    is_number = optimizer.is_numbered and str(rest[1]).isdecimal()
    return (int(rest[1]) if is_number else rest[1]), str(rest[2])


def _is_kept_apart(
    member: Any, key: str, differing: Collection[tuple[Any, str]], optimizer: OptimizerState
) -> bool:
    """Whether ranks have different values of the optimizer state `key` on purpose.

    `member` is the parameter, and `differing` has (parameter, key) of every state whose values
    differ between ranks.
    """
    if key in ELEMENTWISE:
        return False
    # a state beside moments that are equal on all ranks, or a compression error (`worker_error`)
    moments = ELEMENTWISE & optimizer.state.get(member, {}).keys()
    is_beside = bool(moments) and all((member, moment) not in differing for moment in moments)
    return is_beside or bool(OF_RANKS.fullmatch(key.lower()))


# -- averages beside the model


def omitted(key: str) -> Notice:
    """The warning that weight averages (EMA) at `key` are left out: they are one rank's slices."""
    return warning(
        "rank-slices",
        f"{key} is left out: its tensors are one rank's slices of the model's weights, and nothing "
        "shows how to join the ranks' slices",
        subject=key,
    )


def entry_of(place: TreePath, kept: Collection[TreePath]) -> TreePath:
    """Finds the path of the outermost value around `place` that contains no path in `kept`.

    ("ema", "model") becomes ("ema",), unless a kept path also begins with "ema".
    """
    ends = range(1, len(place) + 1)
    return next(place[:end] for end in ends if not any(path[:end] == place[:end] for path in kept))


def omit_slices(
    saved: SavedTree,
    models: Mapping[TreePath, dict[Any, Any]],
    optimizers: Collection[TreePath],
) -> dict[TreePath, dict[Any, Any]]:
    """Leaves out dictionaries and lists of weights that are only one rank's slices.

    Removes them from `saved.tree`, with a warning, and returns the other models by path. Raises
    InconsistentCheckpoint if the slices are under a usual key for trained weights, such as `model`.
    """
    # torch.distributed.checkpoint stores only one rank's value of a plain tensor, such as the slice
    # of an average (EMA) that `to_local()` gives
    wholes = by_key(
        (str(name), leaf)
        for model in models.values()
        for name, leaf in model.items()
        if isinstance(leaf, Leaf) and leaf.parts
    )
    if not wholes:
        return dict(models)
    leaves = [leaf for each in wholes.values() for leaf in each]
    gone = {path for path, model in models.items() if _is_slice(model, wholes)}
    if trained := next((path for path in gone if dotted(path) in MODELS), None):
        raise InconsistentCheckpoint(
            "rank-slices",
            f"{saved.root}: the weights in {dotted(trained)} are one rank's slices: tensors of the "
            "same names elsewhere in the checkpoint are larger, and sharded",
            hint=WHOLE,
            file=saved.root,
        )
    places = lists_in(saved.tree, {*models, *optimizers})
    gone |= {path for path, items in places if _are_slices(items, leaves)}
    kept = [path for path in (*models, *optimizers) if path not in gone]
    entries = {entry_of(path, kept) for path in gone}
    saved.tree = without(saved.tree, entries) if entries else saved.tree
    saved.warnings += [omitted(dotted(path)) for path in entries]
    return {path: models[path] for path in kept if path in models}


def omit_parts(
    saved: SavedTree,
    models: Mapping[TreePath, Mapping[Any, Any]],
    optimizers: Collection[TreePath],
) -> list[TreePath]:
    """Leaves out averaged weights that each rank saved as its slice.

    Returns the paths that were removed from the tree. The averages have the names of
    the model's weights, but another shape on at least one rank.
    """
    shapes = by_key(
        (str(name), leaf.shape)
        for model in models.values()
        for name, leaf in model.items()
        if isinstance(leaf, Leaf)
    )
    kept = [*models, *optimizers]
    entries = dict.fromkeys(
        entry_of(place, kept)
        for item in saved.ranks.different
        if (place := item.path[:-1]) and not any(place[: len(path)] == path for path in kept)
        for called in _spellings(item.path[-1])
        if called in shapes and not {*(item.shapes or ())} <= {*shapes[called]}
    )
    saved.tree = without(saved.tree, {*entries}) if entries else saved.tree
    saved.warnings += [omitted(dotted(path)) for path in entries]
    return [*entries]


def _spellings(name: Any) -> tuple[str, str]:
    """The name as it is, and without its first word, which may be a wrapper's prefix."""
    return str(name), str(name).partition(".")[2]


def _is_slice(model: Mapping[Any, Any], wholes: Mapping[str, Sequence[Leaf]]) -> bool:
    """Whether every weight of a model has the shape of one rank's shard of its namesake.

    `wholes` has the sharded weights by name. A wrapper's prefix in the model's names is ignored.
    """
    pairs = [
        (leaf, whole)
        for name, leaf in model.items()
        if isinstance(leaf, Leaf)
        for called in _spellings(name)
        for whole in wholes.get(called, ())
        if whole is not leaf
    ]
    return bool(pairs) and all(is_part(leaf, whole) for leaf, whole in pairs)


def _are_slices(items: Sequence[Any], wholes: Sequence[Leaf]) -> bool:
    """Whether the tensors in a list seem to be one rank's slices of the sharded weights `wholes`.

    Each tensor must have the shape of such a weight or of a shard of it, and at least one the shape
    of a shard only.
    """
    shapes = {leaf.shape for leaf in items if isinstance(leaf, Leaf) and leaf.shape}
    whole = {leaf.shape for leaf in wholes}
    parts = {shape for leaf in wholes for shape in leaf.parts}
    return bool(shapes - whole) and shapes <= whole | parts
