"""Describes how an engine partitions tensors over ranks.

The function `partitions(path)` of a format makes these descriptions by the engine's own rule. It
does not use the manifest. So `verify --gather` can check the manifest against the descriptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec import Struct

from ..checkpoint.dtypes import SIZES
from ..checkpoint.entries import Key
from ..storage.fragments import Extent

UNNAMED: Key = "", ""
"""The key of a tensor that has no name yet."""


class FlatMember(Struct, frozen=True):
    """One tensor in a flat buffer: the tensor begins at element `first`."""

    key: Key
    shape: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Partitioned(Struct, frozen=True):
    """A flat buffer that is cut over ranks: every rank holds one part of the buffer.

    `members` are the tensors in the buffer. Normally the parts follow each other, and
    `FlatMember.first` counts elements of the complete buffer. If `interleaved`, every tensor is
    padded and cut into equal slices for the ranks, and `first` counts elements of a rank's part.
    """

    dtype: str
    ranks: tuple[Extent, ...]
    members: Sequence[FlatMember]
    interleaved: bool = False

    def extent(self, rank: int) -> Extent:
        """The byte range of a rank's part in its file."""
        return self.ranks[rank]

    def length(self, rank: int) -> int:
        """The number of elements in the part of the flat buffer that this rank holds."""
        return self.ranks[rank].length // SIZES[self.dtype]

    def own_range(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Limits the element range [start, stop) to the elements in this rank's part."""
        return start, min(stop, self.length(rank))


class Whole(Struct, frozen=True):
    """A tensor that is complete in one file, in the byte range `extent`.

    `strides` count elements; they are None if the tensor is row-major.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None


class BoxPart(Struct, frozen=True):
    """One rank's block of a tensor: elements [offset, offset + size) along every axis.

    Without `strides`, `extent` holds consecutive elements of the block in row-major order, perhaps
    not all. `first` is the index of the first one in the block. With `strides` (in elements),
    `extent` reaches from the block's first element in the file to the last one.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent
    first: int = 0
    strides: tuple[int, ...] | None = None


class Joined(Struct, frozen=True):
    """A tensor of which every rank holds one block; the blocks may be cut along any axes.

    `parts` may be in any order. Together they have every element once.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[BoxPart, ...]

    @property
    def ranks(self) -> tuple[BoxPart, ...]:
        return self.parts

    def extent(self, rank: int) -> Extent:
        """The byte range of a rank's part in its file."""
        return self.parts[rank].extent

    def length(self, rank: int) -> int:
        """The number of elements in the block that this rank holds."""
        return self.parts[rank].extent.length // SIZES[self.dtype]

    def own_range(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Limits the element range [start, stop) to the elements in this rank's block."""
        return start, min(stop, self.length(rank))

    @property
    def line(self) -> int:
        """The number of elements that are contiguous both in the tensor and in every rank's block.

        If blocks differ, this is the smallest number.
        """
        filled = (part for part in self.parts if part.extent.length)
        return min((prod(part.sizes[self.inner(part) :]) for part in filled), default=0)

    def inner(self, part: BoxPart) -> int:
        """The innermost axis along which a block is shorter than the tensor; 0 if there is none."""
        axes = range(len(self.shape))
        return max((axis for axis in axes if part.sizes[axis] != self.shape[axis]), default=0)


class Nameless(Struct, frozen=True):
    """A tensor whose name no file states, such as that of an optimizer that numbers parameters.

    `slot` is what the tensor is for its parameter, such as `exp_avg`. `verify --gather` takes the
    name from the manifest, and so checks only the elements.
    """

    slot: str
    tensor: Joined | Whole


Named = Partitioned | Joined | Whole
Partition = Named | Nameless
