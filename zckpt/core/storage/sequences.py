"""Sequences whose items are made when they are read, so that millions of items take no memory.

They behave like a list of these items.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Made(Sequence[T], Generic[S, T]):
    """A sequence that applies `make` to an item of another sequence when the item is read."""

    __slots__ = ("items", "make")

    def __init__(self, make: Callable[[S], T], items: Sequence[S]) -> None:
        self.make, self.items = make, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [*map(self.make, self.items[place])]
        return self.make(self.items[place])

    def __iter__(self) -> Iterator[T]:
        return map(self.make, self.items)


class Joined(Sequence[T]):
    """A sequence that consists of single items and of other sequences, one after the other."""

    __slots__ = ("_ends", "_parts")

    def __init__(self) -> None:
        self._parts: list[Sequence[T]] = []
        self._ends: list[int] = []

    def append(self, item: T) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, list):
            last.append(item)
            self._ends[-1] += 1
        else:
            self.join([item])

    def join(self, items: Sequence[T]) -> None:
        """Appends all items of a sequence, without copying them."""
        if items:
            self._ends.append(len(self) + len(items))
            self._parts.append(items)

    def __iadd__(self, items: Iterable[T]) -> Joined[T]:
        for item in items:
            self.append(item)
        return self

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[T]:
        for part in self._parts:
            yield from part
