"""Finds tensors with the same content: two names of one weight, or a frozen copy of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checkpoint.dtypes import FLOATS, SIZES
from ...core.comparison.duplicates import is_varied
from .tree import Leaf


def is_float(value: Any) -> bool:
    return isinstance(value, Leaf) and value.dtype in FLOATS


def is_updated(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's optimizer states show that it was updated.

    True if the elements of a state differ from one another. A step count does not matter.
    """
    # before the first update all elements of a moment are zero, even if there is a step count:
    # torch.distributed.checkpoint.state_dict creates states by a step with zero gradients
    return any(isinstance(v, Leaf) and v.shape and is_distinctive(v) for v in state.values())


def is_complex(value: Any) -> bool:
    return isinstance(value, Leaf) and value.dtype == "C64"


def is_distinctive(leaf: Leaf) -> bool:
    """Whether a tensor has at least two different elements.

    Only such tensors can be recognized by equal bytes. Two tensors of zeros, or of ones, may be
    equal by chance.
    """
    first = next(iter(leaf.fragments), None)
    if first is None or leaf.numel < 2:
        return False
    return is_varied(first.extent, SIZES[leaf.dtype])


def second_names(
    model: Mapping[str, Leaf], trained: Sequence[str], state: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, str], list[str]]:
    """Finds the second names of tied weights, such as `lm_head.weight` for `embed.weight`.

    `trained` are the names that optimizers list, and `state` maps them to optimizer states. Returns
    a dictionary from second names to first names, and a list of those second names that may be
    frozen copies instead.
    """
    owned = set(trained)
    untrained = {name: leaf for name, leaf in model.items() if name not in owned}
    alike = {(leaf.dtype, leaf.shape) for leaf in untrained.values()}
    by_memory = {leaf.memory: name for name in reversed(trained) if (leaf := model[name]).memory}
    by_twin = {
        twin: name
        for name in reversed(trained)
        if ((leaf := model[name]).dtype, leaf.shape) in alike and (twin := leaf.twin)
    }
    aliases: dict[str, str] = {}
    doubtful: list[str] = []
    for name, leaf in untrained.items():
        owner = by_memory.get(leaf.memory)
        # equal bytes show nothing if all elements are the same, such as zeros
        if owner is None and by_twin and (twin := leaf.twin) in by_twin and is_distinctive(leaf):
            owner = by_twin[twin]
        if owner is None:  # among weights outside of optimizers, only the same storage is proof
            by_memory |= {leaf.memory: name} if leaf.memory else {}
            continue
        # a frozen copy, such as a teacher model, has equal bytes until the first update
        never_updated = owner in owned and not is_updated(state.get(owner, {}))
        if never_updated and leaf.memory != model[owner].memory:
            continue
        aliases[name] = owner
        if never_updated and leaf.memory is None:  # the file does not show storages
            doubtful.append(name)
    return aliases, doubtful
