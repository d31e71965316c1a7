"""Which tensors hold the same: names of one weight, or a copy of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...core.dtypes import FLOATS
from .tree import Leaf

SAMPLE = 4096  # bytes


def is_float(held: Any) -> bool:
    return isinstance(held, Leaf) and held.dtype in FLOATS


def is_updated(state: Mapping[str, Any]) -> bool:
    """Whether there are moments: torch's helpers count an update that was none."""
    return any(isinstance(h, Leaf) and h.shape and is_telling(h) for h in state.values())


class Seen:
    """Leaves by what they hold, so that the second names of tied weights are found."""

    def __init__(self) -> None:
        self.places: dict[Any, str] = {}
        self.twins: dict[Any, str] = {}

    def add(self, name: str, held: Leaf) -> None:
        self.places.setdefault(held.place, name)
        self.twins.setdefault(held.twin, name)

    def find(self, held: Leaf) -> str | None:
        """Who holds the same: one memory, or equal bytes that are no chance."""
        if held.place is not None and held.place in self.places:
            return self.places[held.place]
        if held.twin is not None and held.twin in self.twins and is_telling(held):
            return self.twins[held.twin]
        return None

    def owner(self, name: str, held: Leaf) -> str:
        """Who held the same before; itself, and then it is remembered."""
        found = self.find(held)
        if found is None:
            self.add(name, held)
        return found or name


def is_telling(held: Leaf) -> bool:
    """Whether two tensors with these bytes are one: zeros and ones are met by chance."""
    first = next(iter(held.fragments), None)
    if first is None or held.numel < 2:
        return False
    with open(first.extent.file, "rb") as file:
        sample = os.pread(file.fileno(), min(SAMPLE, first.extent.length), first.extent.offset)
    size = first.extent.length // ((first.stop - first.start) * first.count)
    return sample != sample[:size] * (len(sample) // size)
