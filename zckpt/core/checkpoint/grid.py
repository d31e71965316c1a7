"""Which place does a rank have among the stages of a pipeline and the tensor ranks of a run?"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Grid(Struct, frozen=True):
    """The sizes of a run's model axes; `staged` says that weights lie in files of layers."""

    pp: int = 1
    tp: int = 1
    staged: bool = False


class Place(Struct, frozen=True):
    """Which model rank of a grid it is; `buffers` are the names that its own file states.

    `tied` are the keys of tied layers by the numbers of their files, if it is known without bytes.
    """

    number: int
    grid: Grid
    buffers: tuple[str, ...] = ()
    tied: Mapping[int, str] | None = None

    def titled(self, name: str) -> str:
        """What a sentence calls a tensor of this rank: `pipeline stage 1, tensor rank 0: NAME`."""
        grid, (stage, tensor_rank) = self.grid, divmod(self.number, self.grid.tp)
        words = [f"pipeline stage {stage}"] if grid.pp > 1 else []
        words += [f"tensor rank {tensor_rank}"] if grid.tp > 1 else []
        return f"{', '.join(words)}: {name}" if words else name
