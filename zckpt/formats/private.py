"""What of a manifest's state can the files of one format alone hold, and how do reports call it?

By the names that those files have: of Megatron-Core the keys of its common state, and of what its
modules and ranks save beside tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = ("common", "objects")
"""The parts of the state `megatron` that came from the files; the others say how to write them."""
TAKEN = frozenset({"optimizer", "content_metadata"})
"""Keys of the common state: groups are those of the manifest, and a writer states its own form."""


def own_names(key: str, value: Any) -> list[str]:
    """The names for a report of what is left out; the key itself for all other states."""
    if key != "megatron" or not isinstance(value, Mapping):
        return [key]
    names = [name for part in COMMON for name in value.get(part) or () if name not in TAKEN]
    # of rng_state/shard_0.1_1.2, and of every layer's linear_fc1._extra_state/shard_3_4
    short = (str(name).partition("/")[0].rpartition(".")[2] for name in names)
    return [*dict.fromkeys(short)] or [key]
