"""Display names of Megatron-only state.

The names are those in the files: keys of Megatron-Core's common state, and what its modules and
ranks save beside tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = ("common", "objects")
"""Parts of the state `megatron` that came from the files.

Other parts describe how to write them.
"""
TAKEN = frozenset({"optimizer", "content_metadata"})
"""Keys of the common state that a target has: the manifest has groups, writers state their form."""


def own_names(key: str, value: Any) -> list[str]:
    """The names of omitted state for a report; for other states, the key itself."""
    if key != "megatron" or not isinstance(value, Mapping):
        return [key]
    names = [name for part in COMMON for name in value.get(part) or () if name not in TAKEN]
    # for example of rng_state/shard_0.1_1.2, or of each layer's linear_fc1._extra_state/shard_3_4
    short = (str(name).partition("/")[0].rpartition(".")[2] for name in names)
    return [*dict.fromkeys(short)] or [key]
