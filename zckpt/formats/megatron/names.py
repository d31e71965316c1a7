"""Maps the keys of Megatron-Core to parameter names and back.

    key           decoder.layers.mlp.experts.experts.linear_fc1.weight     (L, E, 2 * ffn, h)
    parameter     decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight    (2 * ffn, h)

Layers are stacked on axis 0 and experts on axis 1. A parameter's name is the one that
`model.named_parameters()` gives it in a run on one rank, so layers are numbered in the full model
and experts in the full layer. If a model's layers differ, there is no axis for layers: the keys
contain the layer's number. Norms are named as in the local spec; Transformer Engine's spec names
them like the keys.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

LAYERS = re.compile(r"(?P<stack>(?:decoder|encoder)\.layers)\.(?P<rest>(?!\d+\.).+)")
EXPERTS = re.compile(r"(?P<before>.*\bmlp\.experts)\.experts\.(?P<rest>(?!\d+\.).+)")
LAYER = re.compile(r"(?P<before>(?:decoder|encoder)\.layers\.)(?P<number>\d+)(?P<rest>\..+)")
EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<number>\d+)(?P<rest>\..+)")
GROUPED = re.compile(
    r"\A(?P<experts>.*\bmlp\.experts)\.(?P<linear>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)\Z"
)
"""The name of a parameter in Transformer Engine's grouped experts: it ends with a number."""
PREFIX = re.compile(r"\Amod(?:ule|el)\.")
"""The prefix of NeMo's keys: it saves a module around the model."""
PLACE = "*"  # instead of a number
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def without_prefix(key: str) -> str:
    """A key without the prefix that NeMo adds, as Megatron-LM writes it."""
    return PREFIX.sub("", key)


def axes_of(key: str) -> int:
    """The number of leading axes of a key's tensor that count layers and experts."""
    key = without_prefix(key)
    return int(bool(LAYERS.fullmatch(key))) + int(bool(EXPERTS.fullmatch(key)))


def places(shape: tuple[int, ...], axes: int) -> Iterator[tuple[int, ...]]:
    """Yields the index (layer, expert) of every parameter that is stacked under a key.

    `shape` is the shape of the key's tensor, `axes` its number of leading axes.
    """
    return product(*map(range, shape[:axes]))


def named(key: str, place: tuple[int | str, ...]) -> str:
    """The name of the parameter at index `place` (layer, expert) of a key's stacked tensor.

    For `decoder.layers.mlp.linear_fc2.weight` and (3,): `decoder.layers.3.mlp.linear_fc2.weight`.
    """
    numbers, name = list(place), without_prefix(key)
    if match := LAYERS.fullmatch(name):
        name = f"{match['stack']}.{numbers.pop(0)}.{match['rest']}"
    if match := EXPERTS.fullmatch(name):
        name = f"{match['before']}.local_experts.{numbers.pop(0)}.{match['rest']}"
    return with_plain_norms(name)


def with_plain_norms(name: str) -> str:
    """Renames a norm's parameter from Transformer Engine's layer spec to Megatron-Core's local one.

    `mlp.linear_fc1.layer_norm_weight` becomes `pre_mlp_layernorm.weight`.
    """
    for fused, plain in NORMS.items():
        name = name.replace(fused, plain)
    return name


def with_own_expert(name: str) -> str:
    """Renames a parameter of grouped experts as if each expert were a separate module.

    `experts.linear_fc1.weight1` becomes `experts.local_experts.1.linear_fc1.weight`, as in
    Megatron-Core's local layer spec. Other names stay unchanged.
    """
    return GROUPED.sub(r"\g<experts>.local_experts.\g<number>.\g<linear>", name)


def keys_of(
    names: Iterable[str], keys: Iterable[str]
) -> tuple[dict[str, dict[tuple[int, ...], str]], list[str]]:
    """Assigns parameter names to keys, by their index (layer, expert): the inverse of `named`.

    Returns {key: {index: name}}, and the names that belong to no key.
    """
    by_name = {named(key, (PLACE,) * axes_of(key)): key for key in keys}
    parts: dict[str, dict[tuple[int, ...], str]] = {}
    unnamed = []
    for name in names:
        for general, place in _with_numbers_replaced(name):
            if general in by_name:
                parts.setdefault(by_name[general], {})[place] = name
                break
        else:
            unnamed.append(name)
    return parts, unnamed


def _with_numbers_replaced(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields a name, then the name with PLACE for the number of the expert, the layer, and both.

    Each result is (name, replaced numbers), such as ("decoder.layers.*.mlp.router.weight", (3,)).
    The layer's number comes before the expert's. Results for numbers that the name lacks
    are left out.
    """
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


# -- the keys that a GPTModel has in torch_dist


# the keys of other modules depend on the code of these modules
KNOWN = re.compile(
    r"embedding\.(?:word|position)_embeddings\.weight|output_layer\.weight"
    r"|decoder\.final_layernorm\.(?:weight|bias)"
    r"|decoder\.layers\.\d+\.(?:"
    r"(?:input_layernorm|pre_mlp_layernorm)\.(?:weight|bias)"
    r"|self_attention\.linear_(?:qkv|proj)\.(?:weight|bias)"
    r"|self_attention\.linear_(?:q|(?:q|kv)_(?:down|up))_proj\.(?:weight|bias|layer_norm_\w+)"
    r"|self_attention\.(?:q|k|kv)_layernorm\.(?:weight|bias)"
    r"|mlp\.(?:experts\.local_experts\.\d+\.|shared_experts\.)?linear_fc[12]\.(?:weight|bias)"
    r"|mlp\.shared_experts\.gate_weight"
    r"|mlp\.router\.(?:weight|bias|expert_bias))"
)
LINEAR = re.compile(r"(?P<module>decoder\.layers\..*\blinear_(?:\w+_proj|qkv|proj|fc[12]))\.weight")
LATENT = re.compile(r"decoder\.layers\.\d+\.self_attention\.linear_kv_up_proj\.weight")
ROUTER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.mlp\.router\.weight")
OF_MODULE = "._extra_state"
OF_OUTPUT = "output_layer._extra_state"  # under no key: GPTModel.sharded_state_dict removes it
FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
MARKS_OF_LAYERS = ("hetereogenous_dist_checkpoint", "heterogeneous_layers_config_path")


class KeysOfGpt:
    """The keys of one GPTModel in `torch_dist` (megatron-core 0.16.1).

        name in the full model                          key
        decoder.layers.3.mlp.linear_fc2.weight          decoder.layers.mlp.linear_fc2.weight
        decoder.layers.3.input_layernorm.weight         ...linear_qkv.layer_norm_weight
        decoder.layers.3.mlp.linear_fc2._extra_state    ...mlp.linear_fc2._extra_state/shard_3_L

    `names` are the names of parameters, buffers and modules' extra states in the full model, with
    norms as in Megatron-Core's local layer spec. `raw` are the names in the files. If `args` state
    that layers differ, a key has the layer's number instead of stacking all L layers.
    """

    def __init__(self, names: Iterable[str], raw: Iterable[str], args: Mapping[str, Any]) -> None:
        self.names = list(names)
        self.fused = any(norm in name for name in raw for norm in NORMS)
        self.stacked = not layers_differ(args)
        self.latent = any(map(LATENT.fullmatch, self.names))
        self.with_experts = {m["layer"] for name in self.names if (m := ROUTER.fullmatch(name))}
        self.sizes = (
            1 + max(_numbers_in(LAYER, self.names), default=0),
            1 + max(_numbers_in(EXPERT, self.names), default=0),
        )

    def keys(self) -> dict[str, int]:
        """The torch_dist keys of parameters and buffers, each with its number of leading axes.

        Leading axes count layers and experts. Unknown modules, and modules that only some layers or
        experts have, get no key. The result is {} if the method `items` returns {}.
        """
        # a run cannot load a directory without modules' extra states
        if not self.items():
            return {}
        keys_and_axes = [self._key(name) for name in self.names if KNOWN.fullmatch(name)]
        return {
            key: axes
            for (key, axes), n in Counter(keys_and_axes).items()
            if n == prod(self._sizes_of_leading_axes(axes))
        }

    def items(self) -> dict[str, str]:
        """Maps modules' extra states (`..._extra_state`, pickled objects) to their torch_dist keys.

        A source may have no extra states. Then, with Megatron-Core's local layer spec, the result
        has one for each linear module. With Transformer Engine's spec it is then {}, because zckpt
        does not know which modules need one.
        """
        # to load a directory, a run needs the extra state of each of its modules, even an empty one
        modules = [name for name in self.names if name.endswith(OF_MODULE)]
        if not modules and not self.fused:
            linears = (LINEAR.fullmatch(name) for name in self.names)
            modules = [f"{match['module']}{OF_MODULE}" for match in linears if match]
        items = {}
        for name in modules:
            key, axes = self._key(name, norms=False)
            layer = _numbers_in(LAYER, [name]) if self.stacked else []
            shard = (
                (*layer, *_numbers_in(EXPERT, [name])) or (0,),
                self._sizes_of_leading_axes(axes) or (1,),
            )
            place, grid = (".".join(map(str, each)) for each in shard)
            items[name] = f"{key}/shard_{place}_{grid}"
        return items

    def _sizes_of_leading_axes(self, axes: int) -> tuple[int, ...]:
        return self.sizes[:axes] if self.stacked else self.sizes[1 : 1 + axes]

    def _key(self, name: str, norms: bool = True) -> tuple[str, int]:
        """The torch_dist key of a parameter or extra state, and the number of its leading axes.

        Leading axes count layers, then experts; they come before the parameter's own axes. With
        `norms=False`, norms keep their names of the local layer spec.
        """
        match = LAYER.fullmatch(name)
        if match is None:
            return name, 0
        rest, axes = match["rest"], int(self.stacked)
        if expert := EXPERT.fullmatch(rest):
            before = expert["before"].removesuffix("local_experts.")
            rest, axes = f"{before}experts{expert['rest']}", axes + 1
        for norm, plain in NORMS.items() if norms else ():
            if not self._is_separate(plain, match["number"]):
                rest = rest.replace(f".{plain}", f".{norm}")
        stack = match["before"].removesuffix(".") if self.stacked else name[: match.end("number")]
        return f"{stack}{rest}", axes

    def _is_separate(self, norm: str, layer: str) -> bool:
        """Whether a norm has its own torch_dist key, and is not stored with a linear module."""
        if self.latent and not (self.fused and norm.startswith("pre_mlp")):
            return True
        return self.fused and norm.startswith("pre_mlp") and layer in self.with_experts


def layers_differ(args: Mapping[str, Any]) -> bool:
    """Whether a run with these arguments has separate keys for each layer.

    Source: TransformerBlock of Megatron-Core 0.16.1.
    """
    frequencies = [args.get(name) for name in FREQUENCIES]
    return any(isinstance(each, list) or (each or 1) != 1 for each in frequencies) or any(
        args.get(name) for name in MARKS_OF_LAYERS
    )


def _numbers_in(pattern: re.Pattern[str], names: Sequence[str]) -> list[int]:
    return [int(match["number"]) for name in names if (match := pattern.fullmatch(name))]
