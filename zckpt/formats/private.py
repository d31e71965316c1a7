"""The short names by which reports list state that only Megatron-Core's checkpoints can store.

The names are those in the files: keys of Megatron-Core's common state, and what its modules and
ranks save beside tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = ("common", "objects")
"""The parts of the manifest's state `megatron` that come from files; zckpt adds the other parts."""
# the groups in `optimizer` are also in the manifest; a writer makes its own `content_metadata`
TAKEN = frozenset({"optimizer", "content_metadata"})
"""Keys of Megatron-Core's common state that no report lists: no target loses their content."""


def own_names(key: str, value: Any) -> list[str]:
    """The names by which a report lists state that a target does not store.

    `key` and `value` are an item of the manifest's state. For Megatron's state, the names are short
    names of its parts, such as `rng_state`. For any other state, the only name is `key`.
    """
    if key != "megatron" or not isinstance(value, Mapping):
        return [key]
    names = [name for part in COMMON for name in value.get(part) or () if name not in TAKEN]
    # for example of rng_state/shard_0.1_1.2, or of each layer's linear_fc1._extra_state/shard_3_4
    short = (str(name).partition("/")[0].rpartition(".")[2] for name in names)
    return [*dict.fromkeys(short)] or [key]
