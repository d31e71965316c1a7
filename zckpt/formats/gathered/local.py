"""One optimizer's state from the local states of ZeroRedundancyOptimizer's ranks.

Every rank's optimizer has whole tensors of the parameters that it owns, under numbers of its own
that start at 0. zro.py says which rank owns which parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ...errors import InconsistentCheckpoint, MissingData
from ...files.torchfile import Tensor, TorchFile
from ...training import steps
from ..statedict.tree import Leaf, SavedTree, leaves
from . import distributed, ranked, zro


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
) -> list[list[zro.OwnedParameter]] | None:
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
    owners = [[zro.OwnedParameter(0, 0)] * size for size in sizes]
    for rank, parts in enumerate(zro.partition(numels, len(files))):
        for group, part in enumerate(parts):
            if len(part) != counts[rank][group]:
                raise InconsistentCheckpoint(
                    f"{files[rank].path} holds {counts[rank][group]} parameters of group "
                    f"{group}, but ZeroRedundancyOptimizer gives {len(part)} of the names in "
                    f"--param-names to rank {rank}",
                    hint="list them in the order of the optimizer: group after group",
                )
            for position, place in enumerate(part):
                owners[group][place] = zro.OwnedParameter(rank, position)
    return owners


def _owners_by_size(
    saved: SavedTree, files: Mapping[int, TorchFile]
) -> list[list[zro.OwnedParameter]]:
    """Every group's parameters, the largest first; equal ones are in the program's order."""
    numels = [
        [
            [_numel_of(file, number) for number in group["params"]]
            for group in file.value["param_groups"]
        ]
        for file in files.values()
    ]
    try:
        owners = zro.dealt(numels)
    except InconsistentCheckpoint as error:
        raise InconsistentCheckpoint(f"{saved.root}: {error.message}", error.hint) from error
    saved.orders = orders = []
    first = 0
    for place, order in enumerate(owners):
        sizes = [numels[rank][place][position] for rank, position in order]
        for start, stop in zro.runs(sizes):
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
    if step_policy != steps.KEEP:
        steps.agree(last, step_policy)


def _last_step(file: TorchFile) -> steps.Step | None:
    """The highest step of all parameters."""
    values = [state.get("step") for state in file.value["state"].values()]
    numbers = [file.scalar(value) if isinstance(value, Tensor) else value for value in values]
    return max((s for s in map(steps.step_of, numbers) if s is not None), default=None)
