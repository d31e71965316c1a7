"""What is one whole tensor of a checkpoint, wherever its pieces are?"""

from math import prod
from sys import intern

from msgspec import Struct

from ..storage.fragments import Fragments
from .dtypes import SIZES

Key = tuple[str, str]
"""An entry's parameter and slot."""


def key_of(name: str) -> Key:
    """The key in a name: files, documents and users write `parameter/slot`."""
    parameter, _, slot = name.rpartition("/")
    return intern(parameter), intern(slot)


def name_of(key: Key) -> str:
    """The inverse of `key_of`."""
    return f"{key[0]}/{key[1]}"


class Entry(Struct, frozen=True):
    """One whole tensor; `digest` is the CRC-32 of its row-major little-endian bytes.

    If `mean` has entries of the same shape, a target gets the mean of their elements, rounded once
    to its type, and not the bytes of `fragments`. Of a further copy, `axis` says what those are
    called that have one each, such as `stage`.
    """

    parameter: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    digest: int | None = None
    mean: "tuple[Entry, ...]" = ()
    axis: str = ""

    @property
    def key(self) -> Key:
        return self.parameter, self.slot

    @property
    def name(self) -> str:
        """What sentences and documents call it."""
        return name_of(self.key)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def length(self) -> int:
        """Bytes."""
        return self.numel * SIZES[self.dtype]
