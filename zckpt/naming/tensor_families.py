"""Rules that say how tensor-parallel ranks slice the parameters of known families of models.

A family is a text in the format of a --tp-rules file: lines `REGEX = RULE`, of which the first
match counts. tensor_rules.py explains the rules, such as `0:2x`. The rules of Megatron-DeepSpeed
are those of its `universal_checkpoint_info` (gpt_model.py, 2023), and GPT-NeoX's those of its
converter (tools/ckpts/convert_neox_to_hf.py). The rules of `llama` are what AutoTP of DeepSpeed
0.19.8 does. A wrong rule `replicated` is detected when tensors are copied, because the replicas of
all ranks must be equal.

A GPT-NeoX model with `gpt_j_residual` is special: each rank adds its own bias of a row-parallel
layer before the ranks' outputs are summed (ParallelTransformerLayer of transformer.py), so the full
bias is the sum of the ranks' biases. No file states this setting.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEGATRON = r"""
.*\b(query_key_value|query|key_value|linear_qkv)\.(weight|bias) = 0
.*\b(dense_h_to_4h|linear_fc1)\.(weight|bias) = {fused}
.*\b(word_embeddings|lm_head|output_layer)\.weight = 0
.*\b(attention\.dense|dense_4h_to_h|linear_proj|linear_fc2)\.weight = 1
.*\b(attention\.dense|dense_4h_to_h|linear_proj|linear_fc2)\.bias = replicated
.*(norm|layer_norm|ln_f|layernorm)[_.](weight|bias) = replicated
\d+\.(weight|bias) = replicated
.*\bposition_embeddings\.weight = replicated
"""

_ATTENTION = _MEGATRON.replace(r"attention\.dense", r"(self_)?attention\.dense")

_NEOX = r"""
.*\battention\.query_key_value\.(weight|bias) = 0
.*\bmlp\.(dense_h_to_4h|w1|w3)\.(weight|bias) = 0
.*\b(word_embeddings|final_linear)\.weight = 0
.*\b(attention\.dense|mlp\.dense_4h_to_h|mlp\.linear2|mlp\.w2)\.weight = 1
.*\b(attention\.dense|mlp\.dense_4h_to_h|mlp\.linear2|mlp\.w2)\.bias = {biases}
.*norm[^.]*\.(weight|bias|scale) = replicated
"""

FAMILIES: Mapping[str, str] = {
    "megatron": _ATTENTION.format(fused="0"),
    "megatron-swiglu": _ATTENTION.format(fused="0:2x"),
    "bloom": _ATTENTION.format(fused="0"),
    "neox": _NEOX.format(biases="replicated"),
    "neox-parallel": _NEOX.format(biases="sum"),
    "llama": r"""
.*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias) = 0
.*\.gate_up_proj\.(weight|bias) = 0:2x
.*\.(o_proj|down_proj)\.weight = 1
.*\.(o_proj|down_proj)\.bias = replicated
.*norm\.(weight|bias) = replicated
(.*\.)?(embed_tokens|lm_head)\.weight = replicated
""",
}
"""Rules by family name; a file of rules may `include` one."""

DOUBTS: Mapping[str, tuple[str, str]] = {
    "neox": (
        r".*\b(attention\.dense|mlp\.(dense_4h_to_h|linear2|w2))\.bias",
        "--tp-rules neox takes {names} as whole on each rank. If the model has gpt_j_residual, "
        "they are parts of a sum: use --tp-rules neox-parallel",
    ),
}
"""For a family: a pattern of names whose rule no file confirms, and the sentence that warns."""

WIDTHS: tuple[tuple[str, str], ...] = (
    ("dense_h_to_4h.weight", "dense_4h_to_h.weight"),
    ("linear_fc1.weight", "linear_fc2.weight"),
    ("gate_up_proj.weight", "down_proj.weight"),
    ("gate_up.weight", "down.weight"),
    ("linear1.weight", "linear2.weight"),
)
"""Ends of the names of two consecutive layers' weights, by which cuts are checked.

Each fused part of the first weight must have as many rows as the second weight has columns.
"""
