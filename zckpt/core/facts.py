"""Facts about a run that a format reads and the other rooms use: the grid of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The place of one rank in a grid: its number along each parallel axis, from 0."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the parallel axes: data, tensor, pipeline, expert; raises ValueError below 1.

    Experts are spread over `ep` neighbours along the data axis, so `ep` divides `dp` and adds no
    ranks.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp", "ep"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}; a grid needs at least 1")
        if self.dp % self.ep:
            raise ValueError(f"ep is {self.ep}, which does not divide dp, which is {self.dp}")

    @property
    def ranks(self) -> int:
        """How many ranks the grid has."""
        return self.dp * self.tp * self.pp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a global rank: tp varies fastest, then dp, then pp.

        So number DeepSpeed 0.19.8 (`PipeModelDataParallelTopology`) and Megatron-Core (its default
        order "tp-cp-ep-dp-pp"). Raises ValueError for a rank outside of the grid.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is outside of a grid of {self.ranks} ranks")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(dp, tp, pp, dp % self.ep)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at a coordinate."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def coordinates(self) -> Iterator[Coordinate]:
        """The coordinates of all ranks, in the order of the ranks."""
        return map(self.coordinate, range(self.ranks))
