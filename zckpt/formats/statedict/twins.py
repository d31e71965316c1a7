"""Which tensors have the same content: two names of one weight, or a copy of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...core.dtypes import FLOATS
from .tree import Leaf

SAMPLE = 4096  # bytes


def is_float(value: Any) -> bool:
    return isinstance(value, Leaf) and value.dtype in FLOATS


def is_updated(state: Mapping[str, Any]) -> bool:
    """Whether moments show an update: torch's helpers count one that never happened."""
    return any(isinstance(v, Leaf) and v.shape and is_distinctive(v) for v in state.values())


class NamesByContent:
    """The first name of every content, by which second names of tied weights are recognised."""

    def __init__(self) -> None:
        self._by_memory: dict[Any, str] = {}
        self._by_twin: dict[Any, str] = {}

    def add(self, name: str, leaf: Leaf) -> None:
        self._by_memory.setdefault(leaf.memory, name)
        self._by_twin.setdefault(leaf.twin, name)

    def find(self, leaf: Leaf) -> str | None:
        """The name with the same memory, or with equal bytes that cannot be equal by chance."""
        if leaf.memory is not None and leaf.memory in self._by_memory:
            return self._by_memory[leaf.memory]
        if leaf.twin is not None and leaf.twin in self._by_twin and is_distinctive(leaf):
            return self._by_twin[leaf.twin]
        return None

    def owner(self, name: str, leaf: Leaf) -> str:
        """The first name with this content; adds `name` if there is none."""
        owner = self.find(leaf)
        if owner is None:
            self.add(name, leaf)
        return owner or name


def is_distinctive(leaf: Leaf) -> bool:
    """Whether equal bytes mean the same tensor: all zeros or all ones are equal by chance."""
    first = next(iter(leaf.fragments), None)
    if first is None or leaf.numel < 2:
        return False
    with open(first.extent.file, "rb") as file:
        sample = os.pread(file.fileno(), min(SAMPLE, first.extent.length), first.extent.offset)
    size = first.extent.length // ((first.stop - first.start) * first.count)
    return sample != sample[:size] * (len(sample) // size)
