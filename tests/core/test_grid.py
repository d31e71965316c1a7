"""What sentences call the tensors of one model rank."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.grid import Grid, GridPlace


@pytest.mark.parametrize(
    ("number", "grid", "title"),
    [
        (0, Grid(), "w"),
        (1, Grid(pp=2), "pipeline stage 1: w"),
        (1, Grid(tp=2), "tensor rank 1: w"),
        (4, Grid(pp=2, tp=3), "pipeline stage 1, tensor rank 1: w"),
    ],
)
def test_a_title_names_the_axes_that_have_several_ranks(
    number: int, grid: Grid, title: str
) -> None:
    assert GridPlace(number, grid).titled("w") == title
