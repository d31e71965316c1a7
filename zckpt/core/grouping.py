"""What belongs together, by a key or by its size?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order of the pairs (key, value)."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


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
