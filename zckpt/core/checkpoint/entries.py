"""A record of one complete tensor of a checkpoint, wherever its shards are."""

from math import prod
from sys import intern

from msgspec import Struct

from ..storage.fragments import Fragments
from .dtypes import SIZES

Key = tuple[str, str]
"""An entry's parameter and slot."""


def key_of(name: str) -> Key:
    """Parses a tensor's name `parameter/slot`, as files, documents and users write it."""
    parameter, _, slot = name.rpartition("/")
    return intern(parameter), intern(slot)


def name_of(key: Key) -> str:
    """The name `parameter/slot` of a key: the inverse of `key_of`."""
    return f"{key[0]}/{key[1]}"


class Entry(Struct, frozen=True):
    """One complete tensor; `digest` is the CRC-32 of its row-major little-endian bytes.

    If `mean` lists entries of the same shape, a target gets the mean of their elements, rounded
    once to the tensor's type, instead of the bytes of `fragments`. In the record of a replica,
    `axis` is the parallel dimension whose ranks hold it: `stage`, `tensor rank` or `ep rank`.
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
        """The entry as `parameter/slot`, as messages and documents name it."""
        return name_of(self.key)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def length(self) -> int:
        """The size of the tensor in bytes."""
        return self.numel * SIZES[self.dtype]
