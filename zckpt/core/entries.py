"""What is one whole tensor of a checkpoint, wherever its pieces are?"""

from math import prod

from msgspec import Struct

from .dtypes import SIZES
from .fragments import Fragments


class Entry(Struct, frozen=True):
    """One whole tensor; `digest` is the CRC-32 of its row-major little-endian bytes.

    If `mean` has entries of the same shape, a target gets the mean of their elements, rounded once
    to its type, and not the bytes of `fragments`. Of a further copy, `axis` says what those are
    called that have one each, such as `stage`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    digest: int | None = None
    mean: "tuple[Entry, ...]" = ()
    axis: str = ""

    @property
    def parameter(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def slot(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def length(self) -> int:
        """Bytes."""
        return self.numel * SIZES[self.dtype]
