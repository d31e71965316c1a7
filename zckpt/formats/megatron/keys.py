"""Under which keys does Megatron-Core save a GPTModel in `torch_dist` directories?

    module of a rank                            key                                axes
    decoder.layers.3.mlp.linear_fc2.weight      decoder.layers.mlp.linear_fc2.weight      1
    decoder.layers.3.input_layernorm.weight     ...self_attention.linear_qkv.layer_norm_weight
    decoder.layers.3.mlp.linear_fc2._extra_state    ...linear_fc2._extra_state/shard_3_L

`mp_rank_*` directories have the names of modules alone. The keys of other modules depend on their
code, so they get none here. Read in source and proven with 0.16.1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from .names import EXPERT, LAYER, NORMS

KNOWN = re.compile(
    r"embedding\.(?:word|position)_embeddings\.weight|output_layer\.weight"
    r"|decoder\.final_layernorm\.(?:weight|bias)"
    r"|decoder\.layers\.\d+\.(?:"
    r"(?:input_layernorm|pre_mlp_layernorm)\.(?:weight|bias)"
    r"|self_attention\.linear_(?:qkv|proj)\.(?:weight|bias)"
    r"|mlp\.(?:experts\.local_experts\.\d+\.)?linear_fc[12]\.(?:weight|bias)"
    r"|mlp\.router\.weight)"
)
LINEAR = re.compile(r"(?P<module>decoder\.layers\..*\blinear_(?:qkv|proj|fc[12]))\.weight")
OF_MODULE = "._extra_state"
OF_OUTPUT = "output_layer._extra_state"  # of no key: GPTModel.sharded_state_dict takes it out
FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
MARKS_OF_LAYERS = ("hetereogenous_dist_checkpoint", "heterogeneous_layers_config_path")


def keys_of_gpt(names: Iterable[str], fused: bool, args: Mapping[str, Any]) -> dict[str, int]:
    """The keys of the parameters and buffers that a GPTModel has, with their number of axes.

    `names` are those of the local spec, in the whole model. `fused` says that the file calls norms
    as Transformer Engine's spec does. Modules of another kind get no key, nor do those that only
    some layers or experts have. If `args` state that layers differ, nothing gets one: such models
    have no axis of layers.
    """
    names = list(names)
    if layers_differ(args):
        return {}
    separate = fused and any(".mlp.router." in name for name in names)
    sizes = _sizes(names)
    keys = [_key(name, separate) for name in names if KNOWN.fullmatch(name)]
    return {key: axes for (key, axes), n in Counter(keys).items() if n == prod(sizes[:axes])}


def layers_differ(args: Mapping[str, Any]) -> bool:
    """Whether every layer has keys of its own, by the arguments (TransformerBlock, 0.16.1)."""
    frequencies = [args.get(name) for name in FREQUENCIES]
    return any(isinstance(each, list) or (each or 1) != 1 for each in frequencies) or any(
        args.get(name) for name in MARKS_OF_LAYERS
    )


def items_of_modules(names: Iterable[str], fused: bool) -> dict[str, str]:
    """The key of every module's own state, by its name in the whole model.

    A run loads only if all of its modules have one, even an empty one. `names` are all names of the
    model. If none of them is such a state, the linear modules of the local spec get one; those of
    Transformer Engine's spec (`fused`) are not known without it.
    """
    names = list(names)
    modules = [name for name in names if name.endswith(OF_MODULE)]
    if not modules and not fused:
        linears = (LINEAR.fullmatch(name) for name in names)
        modules = [f"{match['module']}{OF_MODULE}" for match in linears if match]
    sizes, items = _sizes(names), {}
    for name in modules:
        key, axes = _key(name, False)
        place = (*_numbers(LAYER, [name]), *_numbers(EXPERT, [name])) or (0,)
        items[name] = f"{key}/shard_{_joined(place)}_{_joined(sizes[:axes] or (1,))}"
    return items


def _sizes(names: Sequence[str]) -> tuple[int, int]:
    """How many layers a model has, and how many experts in a layer."""
    return 1 + max(_numbers(LAYER, names), default=0), 1 + max(_numbers(EXPERT, names), default=0)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    """The numbers of layers or experts in names."""
    return [int(match["number"]) for name in names if (match := pattern.fullmatch(name))]


def _key(name: str, separate: bool) -> tuple[str, int]:
    """The key of a name, and the number of axes in front of the parameter's own.

    `separate` says that the norm before experts is a module of its own (Transformer Engine).
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return name, 0
    rest, axes = match["rest"], 1
    if expert := EXPERT.fullmatch(rest):
        before = expert["before"].removesuffix("local_experts.")
        rest, axes = f"{before}experts{expert['rest']}", 2
    for norm, plain in NORMS.items():
        if not (separate and plain.startswith("pre_mlp")):
            rest = rest.replace(f".{plain}", f".{norm}")
    return f"{match['before'].removesuffix('.')}{rest}", axes


def _joined(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
