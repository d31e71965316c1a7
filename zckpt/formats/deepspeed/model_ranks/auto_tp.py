"""Which share of a dimension does AutoTP give to each tensor rank?

    attention                    whole key-value heads, the first ranks one more
    MLP, output layer            rows, the first ranks one more

DeepSpeed 0.19.8, module_inject/tp_shard.py `get_shard_size`. Its files do not state the number of
heads. Uneven shares of the source show it, and so does config.json of a trainer's directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

from msgspec import Struct

from ....core.manifest import Manifest
from ....naming.ties import CONFIG
from ....training.trainers import files_to_load_by, json_of
from ...deepspeed_states.patterns import INFO
from .universal_info import UniversalInfo

# the output layer's shares are also those of an embedding that is tied to it
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


def is_auto(config: Mapping[str, Any] | None) -> bool:
    """Whether a ds_config is of a run with AutoTP."""
    return isinstance((config or {}).get("tensor_parallel"), Mapping)


class AutoTP(Struct, frozen=True):
    """The shares of a run with AutoTP; `heads` is the number of key-value heads, if known."""

    heads: int | None

    @classmethod
    def of(cls, source: Manifest) -> AutoTP:
        return cls(_of_config(source) or _of_shares(source))

    def shares(self, names: tuple[str, ...], size: int, tp: int) -> list[int] | None:
        """What each rank has of a dimension; None if that is not known.

        `names` are those of the parameter, also second ones.
        """
        if any(map(NEAR_EVEN.search, names)) or (self.heads and size % self.heads):
            return _dealt(size, tp)
        if self.heads:
            return [count * (size // self.heads) for count in _dealt(self.heads, tp)]
        return None if size % tp else [size // tp] * tp


def _dealt(count: int, ranks: int) -> list[int]:
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _of_config(source: Manifest) -> int | None:
    config = json_of(files_to_load_by(source.siblings), CONFIG) or {}
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        return None
    number = next((config[key] for key in HEADS if config.get(key) is not None), None)
    return number if type(number) is int and number > 0 else None


def _of_shares(source: Manifest) -> int | None:
    """The number of heads that uneven shares have together; None if no share is uneven."""
    numbers = set()
    stated = UniversalInfo((source.state.get("client_state") or {}).get(INFO) or {})
    for name, parameter in source.parameters.items():
        if any(map(NEAR_EVEN.search, (name, *parameter.aliases))):
            continue
        shapes = [shape for shape in stated.stated_shapes(name) or () if shape is not None]
        for sizes in zip(*shapes, strict=True):
            if len({*sizes}) > 1:
                numbers.add(sum(sizes) // gcd(*sizes))
    return numbers.pop() if len(numbers) == 1 else None
