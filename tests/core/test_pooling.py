"""Which tasks a process gets when several share a pass: whole blocks, by their numbers."""

from __future__ import annotations

from itertools import count

import pytest

from zckpt.core.passes.pooling import BLOCK, SINGLE, claimed

SIZES = [BLOCK - 1, 1, BLOCK - 1, 1, BLOCK + 1, 6, 5]
BLOCKS = [[0, 1], [2, 3], [4], [5, 6]]
"""A block ends with the task that fills it."""


@pytest.mark.parametrize("numbers", [[0, 4], [1, 4], [0, 2, 4], [1, 3], [0, 1, 2, 3], [4]], ids=str)
def test_a_process_gets_the_blocks_that_it_claims(numbers: list[int]) -> None:
    passed: list[int] = []
    claims = iter(numbers)
    tasks = claimed(range(len(SIZES)), SIZES.__getitem__, claims.__next__, passed.append)
    own = [task for number in numbers for task in [*BLOCKS, []][number]]
    assert list(tasks) == own
    assert passed == [size for task, size in enumerate(SIZES) if task not in own]


def test_a_process_alone_reports_as_the_first_one() -> None:
    """The others say nothing."""
    assert SINGLE.rank == 0


def test_others_need_no_progress() -> None:
    assert list(claimed(range(7), SIZES.__getitem__, iter([1, 4]).__next__, None)) == [2, 3]


def test_one_process_alone_gets_all_tasks() -> None:
    passed: list[int] = []
    tasks = claimed(range(7), SIZES.__getitem__, count().__next__, passed.append)
    assert (list(tasks), passed) == ([*range(7)], [])
