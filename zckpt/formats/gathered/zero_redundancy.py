"""Joins the local states of ZeroRedundancyOptimizer's ranks into one optimizer's state dict.

Every rank's optimizer has full tensors for the parameters that it owns, which it numbers from 0 on.
ZeroRedundancyOptimizer assigns parameters to ranks by their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, count, groupby, islice
from math import prod
from typing import Any

from ...core.checkpoint import agreement
from ...errors import InconsistentCheckpoint, MissingData, counted
from ...files.torchfile import Tensor, TorchFile
from ...training import steps
from ..statedict.tree import Leaf, SavedTree, leaves
from . import rank_trees, sharded_tensors


def is_local(files: Mapping[int, TorchFile]) -> bool:
    """Whether the files are ZeroRedundancyOptimizer's local states, one per rank.

    In such files, each rank numbers its own parameters from 0 on.
    """
    values = [file.value for file in files.values()]
    if not all(isinstance(v, dict) and "param_groups" in v and "state" in v for v in values):
        return False
    if any(next(sharded_tensors.distributed_in(value), None) is not None for value in values):
        return False
    members = [[m for group in value["param_groups"] for m in group["params"]] for value in values]
    if not all(type(member) is int for each in members for member in each):
        return False
    if len(values) == 1:  # sorted by size, maybe by chance; then the order matters less
        return all(_is_sorted(values[0]["state"], group) for group in values[0]["param_groups"])
    # equal states on every rank are copies of one state
    states = zip(members, values, files.values(), strict=True)
    return len({rank_trees.text([own, value["state"]], file) for own, value, file in states}) > 1


def _is_sorted(state: Mapping[int, Any], group: Mapping[str, Any]) -> bool:
    numels = [_numel_by_states(state.get(number, {})) or 0 for number in group["params"]]
    return numels == sorted(numels, reverse=True)


def merge(
    saved: SavedTree,
    files: Mapping[int, TorchFile],
    step_policy: str | None,
    param_names: Sequence[str] | None,
) -> dict[Any, Any]:
    """Joins the ranks' local states into one optimizer's state dict, with new parameter numbers.

    If `param_names` lists all parameters, the numbers follow its order. If not, a group's largest
    parameters come first (`_owners_by_size`). Raises InconsistentCheckpoint (ranks of different
    saves) and MissingData (no state shows the size of a parameter).
    """
    _check_alike(files, step_policy)
    groups = [file.value["param_groups"] for file in files.values()]
    owners = _owners_by_names(saved, files, param_names) or _owners_by_size(saved, files)
    state: dict[int, Any] = {}
    merged: list[dict[str, Any]] = []
    for place, order in enumerate(owners):
        first = len(state)
        for rank, position in order:
            number = groups[rank][place]["params"][position]
            state[len(state)] = leaves(files[rank], files[rank].value["state"].get(number, {}))
        numbers = list(range(first, len(state)))
        merged.append({**leaves(files[0], groups[0][place]), "params": numbers})
    return {"state": state, "param_groups": merged}


def _owners_by_names(
    saved: SavedTree, files: Mapping[int, TorchFile], param_names: Sequence[str] | None
) -> list[list[OwnedParameter]] | None:
    """The owners of each group's parameters, found by the shapes of the model's weights.

    None if `param_names` does not list all parameters, or the model lacks some. Raises
    InconsistentCheckpoint if a rank's file contradicts these shapes.
    """
    names = list(param_names or ())
    parts = [[group["params"] for group in file.value["param_groups"]] for file in files.values()]
    sizes = [sum(map(len, own)) for own in zip(*parts, strict=True)]
    shapes = next((s for s in _shapes(saved.tree) if s.keys() >= set(names)), {})
    if len(names) != sum(sizes) or not shapes:
        return None
    numels = [
        [prod(shapes[name]) for name in names[stop - size : stop]]
        for size, stop in zip(sizes, accumulate(sizes), strict=True)
    ]
    unknown = [[[None] * len(own) for own in rank] for rank in parts]
    hint = "list the names for --param-names in the order of the optimizer: group after group"
    return dealt(numels, unknown, [file.path for file in files.values()], hint)


def _owners_by_size(saved: SavedTree, files: Mapping[int, TorchFile]) -> list[list[OwnedParameter]]:
    """Finds the owner of every parameter, group by group, the largest parameters first.

    Equally large parameters are in the program's order. `saved.orders` gets a list of their numbers
    for each size. Raises MissingData if no state shows the size of a parameter.
    """
    ranks = [
        [
            [_numel_of(file, number) for number in group["params"]]
            for group in file.value["param_groups"]
        ]
        for file in files.values()
    ]
    numels = [sorted(chain(*own), reverse=True) for own in zip(*ranks, strict=True)]
    numbers = count()
    # the caller compares these lists with the model's parameters to find their names
    saved.orders = [
        list(islice(numbers, len([*equal]))) for group in numels for _, equal in groupby(group)
    ]
    hint = (
        "a rank's file may be of another save, or the program may have chosen the partition "
        "(overlap_with_ddp): call consolidate_state_dict() before saving"
    )
    return dealt(numels, ranks, [file.path for file in files.values()], hint)


def _numel_of(file: TorchFile, number: int) -> int:
    numel = _numel_by_states(file.value["state"].get(number, {}))
    if numel is None:
        raise MissingData(
            "names-needed",
            f"{file.path} has no state of parameter {number}, so its size is unknown: "
            "ZeroRedundancyOptimizer assigns parameters to ranks by size",
            hint="list the optimizer's parameters with --param-names FILE (one per line, group "
            "by group), or call consolidate_state_dict() before saving",
            file=file.path,
        )
    return numel


def _numel_by_states(state: Mapping[str, Any]) -> int | None:
    tensors = [t for key, t in state.items() if isinstance(t, Tensor) and key != "step"]
    return max((tensor.numel for tensor in tensors), default=None)


def _shapes(tree: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yields, for every dictionary in a tree, the shapes of its tensors: {name: shape}."""
    if isinstance(tree, dict):
        yield {key: value.shape for key, value in tree.items() if isinstance(value, Leaf)}
        for value in tree.values():
            yield from _shapes(value)


def _check_alike(files: Mapping[int, TorchFile], step_policy: str | None) -> None:
    """Raises InconsistentCheckpoint unless ranks agree on hyper-parameters and on the step."""
    texts: dict[int, str] = {}
    for rank, file in files.items():
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in file.value["param_groups"]
        ]
        texts[rank] = rank_trees.text(groups, file)
        if texts[rank] != texts[0]:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{file.path} and {files[0].path} have different hyper-parameters",
                file=file.path,
            )
    last = [(file.path, step) for file in files.values() if (step := _highest_step(file))]
    if step_policy != agreement.KEEP:
        agreement.agree(last, step_policy)


def _highest_step(file: TorchFile) -> agreement.Step | None:
    numbers = [file.number(state.get("step")) for state in file.value["state"].values()]
    return max((s for s in map(steps.step_of, numbers) if s is not None), default=None)


# -- the rule of ZeroRedundancyOptimizer


OwnedParameter = tuple[int, int]
"""The owner of a parameter: (rank, the parameter's position in the group of this rank's file)."""


def partition(groups: Sequence[Sequence[int]], world: int) -> list[list[list[int]]]:
    """Assigns parameters to `world` ranks by ZeroRedundancyOptimizer's rule.

    `groups` has the parameters' element counts. The result `[rank][group]` lists the parameters of
    a rank by their positions in the group.
    """
    parts: list[list[list[int]]] = [[] for _ in range(world)]
    sizes = [0] * world
    for numels in groups:
        for part in parts:
            part.append([])
        # the largest first, to the rank that has the fewest elements so far
        for place in sorted(range(len(numels)), key=lambda place: -numels[place]):
            rank = sizes.index(min(sizes))
            parts[rank][-1].append(place)
            sizes[rank] += numels[place]
    return parts


def dealt(
    groups: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[Sequence[int | None]]],
    files: Sequence[str],
    hint: str,
) -> list[list[OwnedParameter]]:
    """Finds the owner of every parameter of every group, by ZeroRedundancyOptimizer's rule.

    `groups` has the parameters' element counts, `ranks[rank][group]` those in the rank's file (None
    where unknown). `files` are the ranks' paths. Raises InconsistentCheckpoint with `hint` if a
    rank's file does not fit the rule.
    """
    owners = [[(0, 0)] * len(numels) for numels in groups]
    for rank, parts in enumerate(partition(groups, len(ranks))):
        for group, part in enumerate(parts):
            numels, numels_in_file = [groups[group][place] for place in part], ranks[rank][group]
            alike = len(numels_in_file) == len(numels)
            if not alike or any(
                a not in (None, b) for a, b in zip(numels_in_file, numels, strict=True)
            ):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{files[rank]} has {counted(len(numels_in_file), 'parameter')} of group "
                    f"{group}, but by ZeroRedundancyOptimizer's rule (the largest first) rank "
                    f"{rank} of {len(ranks)} should have {len(numels)}"
                    + (" of other sizes" if alike else ""),
                    hint=hint,
                )
            for position, place in enumerate(part):
                owners[group][place] = rank, position
    return owners
