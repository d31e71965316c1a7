"""How an engine cuts what it holds over its ranks: what an all-gather puts together again.

A format that has `partitions(path)` says so by the engine's own rule, beside and independent of the
fragments of its manifest: `verify --gather` proves one against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .dtypes import SIZES
from .manifest import Extent


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor, `parameter/slot`, which begins at element `first` of a flat buffer."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A flat buffer of which every rank holds a part, in the order of the ranks.

    Either the parts one behind the other are the buffer, and `first` counts in it; or, with
    `interleaved`, every member is cut into equal slices, padded at its end, one for each rank, and
    `first` counts in every rank's part.
    """

    dtype: str
    ranks: tuple[Extent, ...]
    members: Sequence[Member]
    interleaved: bool = False

    def length(self, rank: int) -> int:
        """Elements of a rank's part."""
        return self.ranks[rank].length // SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that one file holds whole; `extent` is from its first element to its last.

    `strides` count elements; None where it is row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None


Partition = Partitioned | Whole
