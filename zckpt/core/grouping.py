"""Groups items by a key, by their sizes, or by their position in a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Groups (key, value) pairs: maps each key to the list of its values, in order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def neighbors(items: Sequence[V], most: int) -> list[Sequence[V]]:
    """Cuts a sequence into at most `most` lists of consecutive items.

    All lists have the same length, except that the last may be shorter.
    """
    length = max(-(-len(items) // most), 1)
    return [items[place : place + length] for place in range(0, len(items), length)]


def portions(items: Iterable[V], size_of: Callable[[V], int], most: int) -> Iterator[list[V]]:
    """Cuts `items` into consecutive lists whose sizes add up to at most `most`.

    `size_of` returns the size of an item. An item larger than `most` gets a separate list.
    """
    portion: list[V] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if portion and size + item_size > most:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += item_size
    if portion:
        yield portion
