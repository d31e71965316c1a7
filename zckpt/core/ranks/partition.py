"""Records by which a format describes how its engine partitions tensors over ranks.

The function `partitions(path)` of a format makes these records by the engine's own rule, without
the format's manifest. So `verify --gather` can check the fragments in the manifest against these
records.
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
    """A flat buffer of which every rank holds one part, in the order of the ranks.

    Without `interleaved`, the buffer is the concatenation of the parts, and a member's `first`
    counts elements of the buffer. With `interleaved`, every member is padded and cut into one equal
    slice per rank, and `first` counts elements of each rank's part.
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
        """Limits the element range [start, stop) to the length of this rank's part."""
        return start, min(stop, self.length(rank))


class Whole(Struct, frozen=True):
    """A tensor that is complete in one file; `extent` ranges from its first element to its last.

    `strides` count elements; they are None if the tensor is row-major.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None


class BoxPart(Struct, frozen=True):
    """One rank's block of a tensor: [offset, offset + size) along every axis.

    Without `strides`, the byte range `extent` holds elements of the block in row-major order,
    starting with element `first` of the block; it may end before the block does. With `strides`,
    which count elements, the block is not row-major: `extent` ranges from the block's first element
    to its last, and holds all of them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent
    first: int = 0
    strides: tuple[int, ...] | None = None


class Joined(Struct, frozen=True):
    """A tensor of which every rank holds one block, cut along any axes, in any sizes.

    The parts may be listed in any order. Together they hold every element once.
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
        """Limits the element range [start, stop) to the length of this rank's part."""
        return start, min(stop, self.length(rank))

    @property
    def line(self) -> int:
        """The smallest number of elements contiguous in both the tensor and a rank's block."""
        filled = (part for part in self.parts if part.extent.length)
        return min((prod(part.sizes[self.inner(part) :]) for part in filled), default=0)

    def inner(self, part: BoxPart) -> int:
        """The innermost axis along which a block is shorter than the tensor; 0 if there is none."""
        axes = range(len(self.shape))
        return max((axis for axis in axes if part.sizes[axis] != self.shape[axis]), default=0)


class Nameless(Struct, frozen=True):
    """A tensor for whose parameter no file states a name, only a number in the optimizer.

    `slot` is the kind of the tensor, such as `exp_avg`. `verify --gather` takes the tensor's name
    from the format's reader: the name of the tensor with the same slot, dtype, shape and first
    byte. So the engine's rule proves the tensor's elements, but not its name.
    """

    slot: str
    tensor: Joined | Whole


Named = Partitioned | Joined | Whole
Partition = Named | Nameless
