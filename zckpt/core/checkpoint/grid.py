"""A rank's place among the pipeline stages and tensor ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Grid(Struct, frozen=True):
    """The number of pipeline stages (`pp`) and of tensor ranks (`tp`) of a run.

    `staged` is True if weights lie in one file per layer, as DeepSpeed's pipelines save them.
    """

    pp: int = 1
    tp: int = 1
    staged: bool = False


class GridPlace(Struct, frozen=True):
    """A model rank, by its number in a grid, and the names of buffers that its file lists.

    `tied` maps the numbers of tied layers' files to the keys of these layers. It is None if nothing
    but equal tensors would show which layers are tied.
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
