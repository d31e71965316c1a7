"""Values by their keys, neighbors in portions of a size, and neighbors by their number."""

from __future__ import annotations

import pytest

from zckpt.core.grouping import by_key, neighbors, portions


def test_values_of_a_key_keep_their_order() -> None:
    groups = by_key([("b", 3), ("a", 1), ("b", 2)])
    assert list(groups.items()) == [("b", [3, 2]), ("a", [1])]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([2, 3], [[2, 3]]),
        ([2, 3, 1], [[2, 3], [1]]),
        ([5, 2, 3], [[5], [2, 3]]),
        ([7, 1], [[7], [1]]),
        ([1, 7, 1, 4], [[1], [7], [1, 4]]),
    ],
)
def test_a_portion_has_at_most_five_or_one_larger_item(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert list(portions(sizes, int, 5)) == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [("", []), ("abc", ["a", "b", "c"]), ("abcd", ["ab", "cd"]), ("abcdefg", ["abc", "def", "g"])],
)
def test_at_most_three_parts(items: str, expected: list[str]) -> None:
    assert neighbors(items, 3) == expected
