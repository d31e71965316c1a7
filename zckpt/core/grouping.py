"""What belongs together, by a key, by its size or by its place?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order of the pairs (key, value)."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def neighbors(items: Sequence[V], most: int) -> list[Sequence[V]]:
    """At most `most` parts of as many neighbors; the last one may have fewer."""
    each = max(-(-len(items) // most), 1)
    return [items[place : place + each] for place in range(0, len(items), each)]


def portions(items: Iterable[V], size_of: Callable[[V], int], most: int) -> Iterator[list[V]]:
    """Neighbors whose sizes are `most` together at most; a larger item is alone."""
    portion: list[V] = []
    size = 0
    for item in items:
        own = size_of(item)
        if portion and size + own > most:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += own
    if portion:
        yield portion
