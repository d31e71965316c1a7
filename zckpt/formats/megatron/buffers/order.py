"""The order of the parameters in a Megatron-Core GPTModel.

Flat buffers hold parameters in the reverse order of `named_parameters()`, and no file lists it. A
GPTModel has the embedding, its layers, the last norm, the layers of multi-token prediction, and the
output layer. Within a layer two things depend on the spec:

    norms      modules of their own before attention and MLP (local spec), or a part of the linear
               module behind them (Transformer Engine's spec)
    experts    one after the other, or grouped: all of linear_fc1 before all of linear_fc2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
PREDICTION = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<part>\w+)(?:\.(?P<rest>.+))?")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
BEFORE = ("embedding.word_embeddings", "embedding.position_embeddings")
BEHIND = ("decoder.final_layernorm", "mtp", "output_layer")
PARTS = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm")
"""The parts of a multi-token prediction layer, in order.

Its decoder layer is `transformer_layer` or, in modules of 0.19, `mtp_model_layer`.
"""
MODULES = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",  # multi-latent attention
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",  # it has the weight of a gate
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
FUSED = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "gate_weight")

Key = tuple[int | str, ...]


def layer_of(name: str) -> int | None:
    """The number of the layer that contains a parameter; None if it is not in a layer."""
    match = LAYER.fullmatch(name)
    return int(match["layer"]) if match else None


def expert_of(name: str) -> int | None:
    """The number of the expert that contains a parameter; None if it is not in an expert."""
    match = LAYER.fullmatch(name) or PREDICTION.fullmatch(name)
    expert = EXPERT.fullmatch(match["rest"] or "") if match else None
    return int(expert["expert"]) if expert else None


def is_before(name: str) -> bool:
    """Whether a parameter comes before the layers in the model, as the embedding does.

    The first pipeline stage has such parameters. With multi-token prediction, the last stage has a
    replica of them.
    """
    return name.startswith("embedding.")


def predicts(names: Iterable[str]) -> bool:
    """Whether a model with these parameter names has layers for multi-token prediction.

    If so, the last pipeline stage has replicas of the embedding's parameters.
    """
    return any(map(PREDICTION.fullmatch, names))


def orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Yields every order in which a GPTModel may have these parameters.

    The order depends on the layer spec: local or Transformer Engine's, with grouped experts or not.
    Yields nothing if one of the names is not a GPTModel's.
    """
    listed = list(names)
    all_names = frozenset(listed)
    given: list[list[str]] = []
    for fused, grouped in product((False, True), repeat=2):
        keys = {name: _key(name, fused, grouped, all_names) for name in listed}
        if None in keys.values():
            return
        order = sorted(listed, key=lambda name: keys[name] or ())
        if order not in given:
            given.append(order)
            yield order


def _key(name: str, fused: bool, grouped: bool, names: frozenset[str]) -> Key | None:
    """The sort key of a parameter in the order of the model; None for an unknown module.

    `fused`: norms are part of the linear module behind them. `grouped`: experts are one module.
    """
    module, _, kind = name.rpartition(".")
    if kind not in KINDS:
        return None
    last = KINDS.index(kind)
    for side, modules in ((0, BEFORE), (2, BEHIND)):
        if module in modules:
            return side, modules.index(module), last
    if match := LAYER.fullmatch(module):
        start: Key = 1, int(match["layer"])
    else:
        match = PREDICTION.fullmatch(module)
        if match is None or match["part"] not in PARTS:
            return None
        start = 2, BEHIND.index("mtp"), int(match["layer"]), PARTS.index(match["part"])
        if match["rest"] is None:
            return (*start, last)
    rest = match["rest"]
    if expert := EXPERT.fullmatch(rest):
        inner: Key = int(expert["expert"]), expert["rest"], last
        if grouped:
            inner = expert["rest"], last, int(expert["expert"])
        return (*start, MODULES.index("mlp.experts"), *inner)
    if rest not in MODULES:
        return None
    if fused and rest in FUSED and f"{match[0][: -len(rest)]}{FUSED[rest]}.weight" in names:
        return (*start, MODULES.index(FUSED[rest]), -1, last)
    return (*start, MODULES.index(rest), 0, last)
