"""`Entry`: one complete tensor of a checkpoint, whichever files hold its shards."""

from math import prod
from sys import intern

from msgspec import Struct

from ..storage.fragments import Fragments
from .dtypes import SIZES

Key = tuple[str, str]
"""An entry's parameter and slot."""


def key_of(name: str) -> Key:
    """Splits the name of a tensor: `fc1.weight/exp_avg` becomes `("fc1.weight", "exp_avg")`."""
    parameter, _, slot = name.rpartition("/")
    return intern(parameter), intern(slot)


def name_of(key: Key) -> str:
    """Joins a parameter and a slot to the name of a tensor, such as `fc1.weight/exp_avg`."""
    return f"{key[0]}/{key[1]}"


class Entry(Struct, frozen=True):
    """One complete tensor of a checkpoint, whichever files hold its shards.

    slot      what the tensor is for its parameter, such as param, master or exp_avg
    digest    the CRC-32 of the tensor's row-major little-endian bytes, if it is known
    mean      with --replicas mean: the ranks' replicas; a conversion writes the mean of these
    axis      of a replica on another rank: `stage`, `tensor rank` or `ep rank`
    """

    parameter: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    digest: int | None = None
    mean: "tuple[Entry, ...]" = ()  # for a weight: its master's; rounded to `dtype`
    axis: str = ""

    @property
    def key(self) -> Key:
        return self.parameter, self.slot

    @property
    def name(self) -> str:
        """The name of the tensor for messages and reports, such as `fc1.weight/exp_avg`."""
        return name_of(self.key)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def length(self) -> int:
        """The size of the tensor in bytes."""
        return self.numel * SIZES[self.dtype]
