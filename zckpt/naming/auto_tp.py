"""How DeepSpeed's AutoTP divides a dimension that is no multiple of the number of ranks.

The first ranks get one unit more. In attention a unit is a complete key-value head, in MLP and
output layers a row (DeepSpeed 0.19.8, module_inject/tp_shard.py `get_shard_size`). DeepSpeed's
files do not state the number of heads. It is read from config.json in a trainer's directory, or
inferred from uneven slices in the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

from msgspec import Struct

from ..core.checkpoint import slicing
from ..core.checkpoint.placement import Shapes

# the output layer's shares also apply to an embedding that is tied to it
NEAR_EVEN = re.compile(r"(^|\.)(lm_head|embed_out|mlp|gate_proj|up_proj|down_proj|w[123])\.")
HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "kv_n_heads",
    "num_attention_heads",
    "n_heads",
    "attention_heads",
)
"""Keys of config.json, in the order in which DeepSpeed asks for them."""

Names = tuple[str, ...]
"""All names of one parameter: its own, and second names if it is tied."""


class AutoTP(Struct, frozen=True):
    """AutoTP's rule for dividing a dimension, for a model with `heads` key-value heads.

    `heads` is None if the number is unknown.
    """

    heads: int | None

    def shares(self, names: Names, size: int, tp: int) -> list[int] | None:
        """How many of the `size` elements along a dimension each of `tp` ranks gets.

        `names` are the parameter's name and, if it is tied, its second names; they show whether
        the dimension consists of heads. None if the number of heads is needed and unknown.
        """
        if any(map(NEAR_EVEN.search, names)) or (self.heads and size % self.heads):
            return [*slicing.dealt(size, tp)]
        if self.heads:
            return [count * (size // self.heads) for count in slicing.dealt(self.heads, tp)]
        shares = slicing.even(size, tp)
        return None if shares is None else [*shares]


def heads_in(config: Mapping[str, Any] | None) -> int | None:
    """The number of key-value heads in a config.json; None if it is not stated."""
    config = (config or {}).get("text_config") or config
    if not isinstance(config, Mapping):
        return None
    number = next((config[key] for key in HEADS if config.get(key) is not None), None)
    return number if type(number) is int and number > 0 else None


def heads_shown(parameters: Iterable[tuple[Names, Shapes]]) -> int | None:
    """Infers the number of key-value heads from the uneven slices of a source.

    None if no slices are uneven, or if several numbers of heads would give these slices.
    """
    numbers = set()
    for names, shapes in parameters:
        if any(map(NEAR_EVEN.search, names)):
            continue
        known_shapes = [shape for shape in shapes if shape is not None]
        for sizes in zip(*known_shapes, strict=True):
            if len({*sizes}) > 1:
                numbers.add(sum(sizes) // gcd(*sizes))
    return numbers.pop() if len(numbers) == 1 else None
