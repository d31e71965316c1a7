"""How do the ranks of one axis hold what a whole has?

Sliced    how one parameter is cut over ranks
Row       what one rank has: which parameters, in which order and of which shapes
Table     one axis: `merge` makes a whole by its cuts, `split` the ranks of a whole by its rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from .slicing import Slicing

Shapes = Sequence[tuple[int, ...] | None]
"""A parameter's shape on every tensor rank; None where the rank has none of it."""
REPLICATED, SUM = "replicated", "sum"
"""Rules of parameters of which every rank has the whole shape: a copy, or a part of a sum."""

STAGE, TENSOR_RANK, EP_RANK = "stage", "tensor rank", "ep rank"
"""What the ranks of an axis are called, by its `Table` and by a copy (`Entry.axis`)."""


class Sliced(Struct, frozen=True):
    """How a parameter is cut: its whole shape, its pieces, and the rule that says so.

    `vocabulary` is the number of rows that are not padding; None if it is no vocabulary.
    """

    shape: tuple[int, ...]
    slicing: Slicing
    rule: str
    vocabulary: int | None = None

    @property
    def is_replicated(self) -> bool:
        return self.rule == REPLICATED

    @property
    def is_sum(self) -> bool:
        """Whether each rank has a part of its own, of the whole shape."""
        return self.rule == SUM


class Row(Struct, frozen=True):
    """One rank: its parameters and buffers in its order, and their shapes, if not the whole's."""

    names: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_weights: bool = True
    """Whether its files have weights that masters stand for too."""


class Table(Struct, frozen=True):
    """One axis, whose ranks are called `word`s; what has no cut is whole on all that have it.

    `merge` needs no rows, because ranks that were read show what they have.
    """

    word: str
    cuts: Mapping[str, Sliced] = field(default_factory=dict)
    rows: Sequence[Row] = ()
