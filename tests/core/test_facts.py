"""The grid: which coordinate each rank has, and which sizes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.facts import Coordinate, Grid

sizes = st.integers(1, 4)


def test_tp_varies_fastest_then_dp_then_pp() -> None:
    grid = Grid(dp=2, tp=2, pp=2, ep=2)
    assert [(each.pp, each.dp, each.tp) for each in grid.coordinates()] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert [each.ep for each in grid.coordinates()] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(sizes, sizes, sizes, sizes)
def test_each_rank_has_one_coordinate(groups: int, tp: int, pp: int, ep: int) -> None:
    grid = Grid(groups * ep, tp, pp, ep)
    coordinates = list(grid.coordinates())
    assert len(set(coordinates)) == grid.ranks == groups * ep * tp * pp
    assert [grid.rank(each) for each in coordinates] == list(range(grid.ranks))
    for each in coordinates:
        assert 0 <= each.dp < grid.dp
        assert 0 <= each.tp < grid.tp
        assert 0 <= each.pp < grid.pp
        assert each.ep == each.dp % grid.ep


def test_a_run_without_parallel_axes_has_one_rank() -> None:
    assert list(Grid().coordinates()) == [Coordinate()]


@pytest.mark.parametrize("axis", ["dp", "tp", "pp", "ep"])
def test_an_axis_below_one_is_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis} is 0"):
        Grid(**{axis: 0})


def test_experts_divide_the_data_axis() -> None:
    with pytest.raises(ValueError, match="ep is 4"):
        Grid(dp=6, ep=4)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_of_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank}"):
        Grid(dp=4, tp=2).coordinate(rank)
