"""Which place does a rank have among the stages of a pipeline and the tensor ranks of a run?"""

from __future__ import annotations

from msgspec import Struct


class Grid(Struct, frozen=True):
    """The sizes of a run's model axes; `staged` says that weights lie in files of layers."""

    pp: int = 1
    tp: int = 1
    staged: bool = False


class Place(Struct, frozen=True):
    """Which model rank of a grid it is; `buffers` are the names that its own file states."""

    number: int
    grid: Grid
    buffers: tuple[str, ...] = ()
