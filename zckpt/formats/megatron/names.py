"""What is a parameter called that lies under a key of Megatron-Core?

    key           decoder.layers.mlp.experts.experts.linear_fc1.weight     (L, E, 2 * ffn, h)
    parameter     decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight    (2 * ffn, h)

Layers are stacked on axis 0 and experts on axis 1. A parameter gets the name that
`model.named_parameters()` has without ranks: with the number of its layer in the whole model, and
of its expert in the whole layer. Models whose layers differ have no axis for layers: their keys
have the number of the layer. Norms are called as in the local spec; Transformer Engine's spec
calls them like the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

LAYERS = re.compile(r"(?P<stack>(?:decoder|encoder)\.layers)\.(?P<rest>(?!\d+\.).+)")
EXPERTS = re.compile(r"(?P<before>.*\bmlp\.experts)\.experts\.(?P<rest>(?!\d+\.).+)")
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def axes_of(key: str) -> int:
    """How many axes in front of a parameter's own count layers and experts."""
    return int(bool(LAYERS.fullmatch(key))) + int(bool(EXPERTS.fullmatch(key)))


def places(shape: tuple[int, ...], axes: int) -> Iterator[tuple[int, ...]]:
    """The numbers of layer and expert of every parameter under a key."""
    return product(*map(range, shape[:axes]))


def named(key: str, place: tuple[int, ...]) -> str:
    """The name of the parameter at a place on the axes of layers and experts."""
    numbers, name = list(place), key
    if match := LAYERS.fullmatch(key):
        name = f"{match['stack']}.{numbers.pop(0)}.{match['rest']}"
    if match := EXPERTS.fullmatch(name):
        name = f"{match['before']}.local_experts.{numbers.pop(0)}.{match['rest']}"
    for fused, plain in NORMS.items():
        name = name.replace(fused, plain)
    return name
