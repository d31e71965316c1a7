"""One optimizer's state from the local states of ZeroRedundancyOptimizer's ranks.

Every rank's optimizer has whole tensors of the parameters that it owns, under numbers of its own
that start at 0. py says which rank owns which parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from ...core import agreement
from ...errors import InconsistentCheckpoint, MissingData
from ...files.torchfile import Tensor, TorchFile
from ...training import steps
from ..statedict.tree import Leaf, SavedTree, leaves
from . import distributed, ranked


def is_local(files: Mapping[int, TorchFile]) -> bool:
    """Whether ranks number their own parameters: whole ones, but others on every rank."""
    values = [file.value for file in files.values()]
    if not all(isinstance(v, dict) and "param_groups" in v and "state" in v for v in values):
        return False
    if any(next(distributed.distributed_in(value), None) is not None for value in values):
        return False
    members = [[m for group in value["param_groups"] for m in group["params"]] for value in values]
    if not all(type(member) is int for each in members for member in each):
        return False
    if len(values) == 1:  # sorted by size, which may be chance; then the order matters less
        return all(_is_sorted(values[0]["state"], group) for group in values[0]["param_groups"])
    numels = [[_numel(state) for state in value["state"].values()] for value in values]
    if any((m, n) != (members[0], numels[0]) for m, n in zip(members, numels, strict=True)):
        return True
    # the same numbers and sizes on every rank: copies of one state, or parts of equal sizes
    texts = {ranked.text(file.value["state"], file) for file in files.values()}
    return len(texts) > 1


def _is_sorted(state: Mapping[int, Any], group: Mapping[str, Any]) -> bool:
    numels = [_numel(state.get(number, {})) or 0 for number in group["params"]]
    return numels == sorted(numels, reverse=True)


def merge(
    saved: SavedTree,
    files: Mapping[int, TorchFile],
    step_policy: str | None,
    param_names: Sequence[str] | None,
) -> dict[Any, Any]:
    """The optimizer's state dict; `saved` has the model's tree and gets `orders`.

    Raises InconsistentCheckpoint (ranks of different saves) and MissingData (a parameter whose size
    no state shows).
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
    """Every group's parameters in the program's order, if the user names all of them.

    Their sizes are the model's then, and no state is needed.
    """
    counts = [
        [len(group["params"]) for group in file.value["param_groups"]] for file in files.values()
    ]
    names = list(param_names or ())
    shapes = next((s for s in _shapes(saved.tree) if s.keys() >= set(names)), {})
    if len(names) != sum(map(sum, counts)) or not shapes or len(set(map(len, counts))) > 1:
        return None
    sizes = [sum(each) for each in zip(*counts, strict=True)]
    of_group = [
        names[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)
    ]
    numels = [[prod(shapes[name]) for name in group] for group in of_group]
    owners = [[(0, 0)] * size for size in sizes]
    for rank, parts in enumerate(partition(numels, len(files))):
        for group, part in enumerate(parts):
            if len(part) != counts[rank][group]:
                raise InconsistentCheckpoint(
                    f"{files[rank].path} holds {counts[rank][group]} parameters of group "
                    f"{group}, but ZeroRedundancyOptimizer gives {len(part)} of the names in "
                    f"--param-names to rank {rank}",
                    hint="list them in the order of the optimizer: group after group",
                )
            for position, place in enumerate(part):
                owners[group][place] = rank, position
    return owners


def _owners_by_size(saved: SavedTree, files: Mapping[int, TorchFile]) -> list[list[OwnedParameter]]:
    """Every group's parameters, the largest first; equal ones are in the program's order."""
    numels = [
        [
            [_numel_of(file, number) for number in group["params"]]
            for group in file.value["param_groups"]
        ]
        for file in files.values()
    ]
    try:
        owners = dealt(numels)
    except InconsistentCheckpoint as error:
        raise InconsistentCheckpoint(f"{saved.root}: {error.message}", error.hint) from error
    saved.orders = orders = []
    first = 0
    for place, order in enumerate(owners):
        sizes = [numels[rank][place][position] for rank, position in order]
        for start, stop in runs(sizes):
            orders.append(list(range(first + start, first + stop)))
        first += len(order)
    return owners


def _numel_of(file: TorchFile, number: int) -> int:
    numel = _numel(file.value["state"].get(number, {}))
    if numel is None:
        raise MissingData(
            f"{file.path} has no state of its parameter {number}, and nothing else shows its size: "
            "ZeroRedundancyOptimizer deals parameters to ranks by size",
            hint="name the optimizer's parameters with --param-names FILE (one per line, group "
            "by group), or save after consolidate_state_dict()",
        )
    return numel


def _numel(state: Mapping[str, Any]) -> int | None:
    """The size of a parameter, as its states show it; None without any."""
    tensors = [t for key, t in state.items() if isinstance(t, Tensor) and key != "step"]
    return max((tensor.numel for tensor in tensors), default=None)


def _shapes(tree: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of tensors by name, for every dictionary in a tree."""
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
        texts[rank] = ranked.text(groups, file)
        if texts[rank] != texts[0]:
            raise InconsistentCheckpoint(
                f"{file.path} and {files[0].path} have different hyper-parameters",
                hint=distributed.MIXED,
            )
    last = [(file.path, step) for file in files.values() if (step := _last_step(file))]
    if step_policy != agreement.KEEP:
        agreement.agree(last, step_policy)


def _last_step(file: TorchFile) -> agreement.Step | None:
    """The highest step of all parameters."""
    numbers = [file.number(state.get("step")) for state in file.value["state"].values()]
    return max((s for s in map(steps.step_of, numbers) if s is not None), default=None)


# -- the rule of ZeroRedundancyOptimizer


OwnedParameter = tuple[int, int]
"""The rank that owns a parameter, and the parameter's place in that rank's part of its group."""


def partition(groups: Sequence[Sequence[int]], world: int) -> list[list[list[int]]]:
    """What each rank owns of each group, by place in the group: `[rank][group]`."""
    parts: list[list[list[int]]] = [[] for _ in range(world)]
    sizes = [0] * world
    for numels in groups:
        for part in parts:
            part.append([])
        for place in sorted(range(len(numels)), key=lambda place: -numels[place]):
            rank = sizes.index(min(sizes))
            parts[rank][-1].append(place)
            sizes[rank] += numels[place]
    return parts


def dealt(ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[OwnedParameter]]:
    """Every group's parameters in the order in which they were dealt, largest first.

    `ranks[rank][group]` lists numels in the order of the rank's local numbers. Raises
    InconsistentCheckpoint, which names rank and group, for lists that the rule never gives.
    """
    if len({len(groups) for groups in ranks}) > 1:
        counts = ", ".join(str(len(groups)) for groups in ranks)
        raise InconsistentCheckpoint(f"ranks have different numbers of parameter groups: {counts}")
    sizes = [0] * len(ranks)
    orders: list[list[OwnedParameter]] = []
    for group in range(len(ranks[0])):
        numels = [groups[group] for groups in ranks]
        taken = [0] * len(ranks)
        order: list[OwnedParameter] = []
        before: int | None = None
        for _ in range(sum(map(len, numels))):
            rank = sizes.index(min(sizes))
            if taken[rank] == len(numels[rank]):
                more = next(r for r, each in enumerate(numels) if taken[r] < len(each))
                raise InconsistentCheckpoint(
                    f"group {group}: by the rule of ZeroRedundancyOptimizer over {len(ranks)} "
                    f"ranks, rank {rank} should own the next parameter, but rank {more} does",
                    hint="is a rank's file of another save, or was the partition the program's own "
                    "(overlap_with_ddp)? consolidate_state_dict() gives files without ranks",
                )
            numel = numels[rank][taken[rank]]
            if before is not None and numel > before:
                raise InconsistentCheckpoint(
                    f"group {group}: rank {rank} owns a parameter of {numel} elements after one of "
                    f"{before} elements, but ZeroRedundancyOptimizer deals the largest first",
                    hint="files of different saves seem to be mixed; take those of one save",
                )
            order.append((rank, taken[rank]))
            taken[rank] += 1
            sizes[rank] += numel
            before = numel
        orders.append(order)
    return orders


def runs(numels: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of equal numel: these parameters are in the program's own order."""
    cuts = [place for place in range(1, len(numels)) if numels[place] != numels[place - 1]]
    return list(pairwise([0, *cuts, len(numels)])) if numels else []
