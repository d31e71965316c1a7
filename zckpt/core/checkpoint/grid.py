"""A rank's place among the pipeline stages and tensor ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Grid(Struct, frozen=True):
    """The sizes of a run's model axes. `staged`: weights lie in files of layers."""

    pp: int = 1
    tp: int = 1
    staged: bool = False


class GridPlace(Struct, frozen=True):
    """The model rank `number` of a grid; `buffers` are the names that its own file states.

    `tied` maps the numbers of tied layers' files to the keys of these layers; None if only tensor
    bytes would show them.
    """

    number: int
    grid: Grid
    buffers: tuple[str, ...] = ()
    tied: Mapping[int, str] | None = None

    def titled(self, name: str) -> str:
        """A tensor's name in messages, with this rank: `pipeline stage 1, tensor rank 0: NAME`."""
        grid, (stage, tensor_rank) = self.grid, divmod(self.number, self.grid.tp)
        words = [f"pipeline stage {stage}"] if grid.pp > 1 else []
        words += [f"tensor rank {tensor_rank}"] if grid.tp > 1 else []
        return f"{', '.join(words)}: {name}" if words else name
