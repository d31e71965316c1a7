"""Which tensors of Hugging Face are which tensors of Megatron-Core?

The rules of a family stand in the order of `named_parameters()` of transformers 5.23. Names of
Megatron-Core are those of its local spec (GPTModel 0.16.1). The rules that begin with `only` are
for other spellings of one program, which are read and never written: norms of the spec for
Transformer Engine, and experts as the Hub's files have them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.values import valueclass

HUGGING_FACE, MEGATRON = "Hugging Face", "Megatron"
OTHER = {HUGGING_FACE: MEGATRON, MEGATRON: HUGGING_FACE}


@valueclass
class Rule:
    """The names of both sides; `{layer}` and `{expert}` stand for numbers.

    `packing` is one of layouts.py. If `only` is set, the rule is for sources of this program alone.
    """

    hugging_face: tuple[str, ...]
    megatron: tuple[str, ...]
    packing: str = "same"
    only: str | None = None

    def names(self, side: str) -> tuple[str, ...]:
        return self.hugging_face if side == HUGGING_FACE else self.megatron


@valueclass
class Family:
    """The rules, the `model_type`s of config.json that they are for, and buffers to leave out."""

    rules: tuple[Rule, ...]
    types: tuple[str, ...]
    buffers: tuple[str, ...] = ()


def _rule(hugging_face: str, megatron: str, packing: str = "same", only: str | None = None) -> Rule:
    return Rule(tuple(hugging_face.split()), tuple(megatron.split()), packing, only)


def _both(hugging_face: str, megatron: str, packing: str = "same") -> tuple[Rule, ...]:
    """A rule for the weight and one for the bias."""
    kinds = ("weight", packing), ("bias", packing.removeprefix("turned ").replace("turned", "same"))
    return tuple(_rule(f"{hugging_face}.{k}", f"{megatron}.{k}", how) for k, how in kinds)


_IN, _OUT = "model.layers.{layer}", "decoder.layers.{layer}"
_EXPERT = f"{_OUT}.mlp.experts.local_experts.{{expert}}"


def _norm(name: str, plain: str, fused: str, layers: str = _IN) -> tuple[Rule, ...]:
    """A norm under its name of the local spec, and of the spec for Transformer Engine."""
    kinds = ("weight", "bias") if layers != _IN else ("weight",)
    return tuple(
        rule
        for kind in kinds
        for rule in (
            _rule(f"{layers}.{name}.{kind}", f"{_OUT}.{plain}.{kind}"),
            _rule(f"{layers}.{name}.{kind}", f"{_OUT}.{fused}_{kind}", only=MEGATRON),
        )
    )


_EMBEDDING = (_rule("model.embed_tokens.weight", "embedding.word_embeddings.weight", "vocabulary"),)
_ATTENTION = (
    *(
        _rule(
            " ".join(f"{_IN}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            f"{_OUT}.self_attention.linear_qkv.{kind}",
            "attention",
        )
        for kind in ("weight", "bias")
    ),
    _rule(f"{_IN}.self_attn.o_proj.weight", f"{_OUT}.self_attention.linear_proj.weight"),
)
_HEAD_NORMS = tuple(
    _rule(f"{_IN}.self_attn.{part}_norm.weight", f"{_OUT}.self_attention.{part}_layernorm.weight")
    for part in "qk"
)
_DENSE = (
    _rule(
        f"{_IN}.mlp.gate_proj.weight {_IN}.mlp.up_proj.weight",
        f"{_OUT}.mlp.linear_fc1.weight",
        "rows",
    ),
    _rule(f"{_IN}.mlp.down_proj.weight", f"{_OUT}.mlp.linear_fc2.weight"),
)


_ROUTER = _rule(f"{_IN}.mlp.gate.weight", f"{_OUT}.mlp.router.weight")


def _experts(hub: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The experts of a layer: stacked in the module, one by one on the Hub."""
    of_hub = f"{_IN}.{hub}.experts.{{expert}}"
    return (
        _rule(f"{_IN}.mlp.experts.gate_up_proj", f"{_EXPERT}.linear_fc1.weight", "experts"),
        _rule(f"{_IN}.mlp.experts.down_proj", f"{_EXPERT}.linear_fc2.weight", "experts"),
        *(
            [_rule(f"{_IN}.{hub}.gate.weight", f"{_OUT}.mlp.router.weight", only=HUGGING_FACE)]
            if hub != "mlp"
            else []
        ),
        _rule(
            f"{of_hub}.{gate}.weight {of_hub}.{up}.weight",
            f"{_EXPERT}.linear_fc1.weight",
            "rows",
            HUGGING_FACE,
        ),
        _rule(f"{of_hub}.{down}.weight", f"{_EXPERT}.linear_fc2.weight", only=HUGGING_FACE),
    )


_NORMS = (
    *_norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv.layer_norm"),
    *_norm("post_attention_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
)
_END = (
    _rule("model.norm.weight", "decoder.final_layernorm.weight"),
    _rule("lm_head.weight", "output_layer.weight", "vocabulary"),
)
_ROTARY = (r"(.*\.)?rotary_(pos_)?emb\.inv_freq",)
_H = "transformer.h.{layer}"

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        (*_EMBEDDING, *_ATTENTION, *_DENSE, *_NORMS, *_END),
        ("llama", "mistral", "qwen2"),
        _ROTARY,
    ),
    "qwen3": Family(
        (
            *_EMBEDDING,
            *_ATTENTION,
            *_HEAD_NORMS,
            *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
            _ROUTER,
            *_DENSE,
            *_NORMS,
            *_END,
        ),
        ("qwen3", "qwen3_moe"),
        _ROTARY,
    ),
    "mixtral": Family(
        (
            *_EMBEDDING,
            *_ATTENTION,
            _ROUTER,
            *_experts("block_sparse_moe", "w1", "w3", "w2"),
            *_NORMS,
            *_END,
        ),
        ("mixtral",),
        _ROTARY,
    ),
    "gpt2": Family(
        (
            _rule("transformer.wte.weight", "embedding.word_embeddings.weight", "vocabulary"),
            _rule("transformer.wpe.weight", "embedding.position_embeddings.weight"),
            *_norm("ln_1", "input_layernorm", "self_attention.linear_qkv.layer_norm", _H),
            *_both(
                f"{_H}.attn.c_attn", f"{_OUT}.self_attention.linear_qkv", "turned whole attention"
            ),
            *_both(f"{_H}.attn.c_proj", f"{_OUT}.self_attention.linear_proj", "turned"),
            *_norm("ln_2", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", _H),
            *_both(f"{_H}.mlp.c_fc", f"{_OUT}.mlp.linear_fc1", "turned"),
            *_both(f"{_H}.mlp.c_proj", f"{_OUT}.mlp.linear_fc2", "turned"),
            _rule("transformer.ln_f.weight", "decoder.final_layernorm.weight"),
            _rule("transformer.ln_f.bias", "decoder.final_layernorm.bias"),
            _rule("lm_head.weight", "output_layer.weight", "vocabulary"),
        ),
        ("gpt2",),
        (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    ),
}
