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
    """The pipeline stage and tensor rank of one rank, and the names of buffers in its file.

    `tied` maps the number in the name of a tied layer's file to the layer's key. It is None if the
    files do not state which layers are tied: then only equal values of tensors can show it.
    """

    number: int
    grid: Grid
    buffers: tuple[str, ...] = ()
    tied: Mapping[int, str] | None = None

    def titled(self, name: str) -> str:
        """Adds the rank to a tensor's name in messages: `pipeline stage 1, tensor rank 0: w`."""
        grid, (stage, tensor_rank) = self.grid, divmod(self.number, self.grid.tp)
        words = [f"pipeline stage {stage}"] if grid.pp > 1 else []
        words += [f"tensor rank {tensor_rank}"] if grid.tp > 1 else []
        return f"{', '.join(words)}: {name}" if words else name
