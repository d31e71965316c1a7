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
from collections.abc import Iterable, Iterator
from itertools import product

LAYERS = re.compile(r"(?P<stack>(?:decoder|encoder)\.layers)\.(?P<rest>(?!\d+\.).+)")
EXPERTS = re.compile(r"(?P<before>.*\bmlp\.experts)\.experts\.(?P<rest>(?!\d+\.).+)")
LAYER = re.compile(r"(?P<before>(?:decoder|encoder)\.layers\.)(?P<number>\d+)(?P<rest>\..+)")
EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<number>\d+)(?P<rest>\..+)")
GROUPED = re.compile(
    r"(?P<experts>.*\bmlp\.experts)\.(?P<linear>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)"
)
"""A parameter of Transformer Engine's module of all experts of a rank."""
PREFIX = re.compile(r"mod(?:ule|el)\.")
"""In front of NeMo's keys: it saves a module around the model."""
PLACE = "*"  # instead of a number
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def without_prefix(key: str) -> str:
    """A key as Megatron-LM has it."""
    match = PREFIX.match(key)
    return key[match.end() :] if match else key


def axes_of(key: str) -> int:
    """How many axes in front of a parameter's own count layers and experts."""
    key = without_prefix(key)
    return int(bool(LAYERS.fullmatch(key))) + int(bool(EXPERTS.fullmatch(key)))


def places(shape: tuple[int, ...], axes: int) -> Iterator[tuple[int, ...]]:
    """The numbers of layer and expert of every parameter under a key."""
    return product(*map(range, shape[:axes]))


def named(key: str, place: tuple[int | str, ...]) -> str:
    """The name of the parameter at a place on the axes of layers and experts."""
    numbers, name = list(place), without_prefix(key)
    if match := LAYERS.fullmatch(name):
        name = f"{match['stack']}.{numbers.pop(0)}.{match['rest']}"
    if match := EXPERTS.fullmatch(name):
        name = f"{match['before']}.local_experts.{numbers.pop(0)}.{match['rest']}"
    return with_plain_norms(name)


def with_plain_norms(name: str) -> str:
    """A name whose norm is called as in the local spec."""
    for fused, plain in NORMS.items():
        name = name.replace(fused, plain)
    return name


def with_own_expert(name: str) -> str:
    """A name whose expert is a module of its own, as in the local spec."""
    match = GROUPED.fullmatch(name)
    if match is None:
        return name
    return f"{match['experts']}.local_experts.{match['number']}.{match['linear']}"


def keys_of(
    names: Iterable[str], keys: Iterable[str]
) -> tuple[dict[str, dict[tuple[int, ...], str]], list[str]]:
    """The parameters under every key, by their places: the inverse of `named`.

    Also the names that no key has.
    """
    by_name = {named(key, (PLACE,) * axes_of(key)): key for key in keys}
    parts: dict[str, dict[tuple[int, ...], str]] = {}
    strangers = []
    for name in names:
        for general, place in _generalized(name):
            if general in by_name:
                parts.setdefault(by_name[general], {})[place] = name
                break
        else:
            strangers.append(name)
    return parts, strangers


def _generalized(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name itself, and with PLACE for the numbers of its expert, its layer, and both."""
    yield name, ()
    for patterns in ((EXPERT,), (LAYER,), (LAYER, EXPERT)):
        general, place = name, []
        for pattern in patterns:
            match = pattern.fullmatch(general)
            if match is None:
                break
            general = f"{match['before']}{PLACE}{match['rest']}"
            place.append(int(match["number"]))
        else:
            yield general, tuple(place)
