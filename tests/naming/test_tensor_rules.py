"""How parameters are cut, as --tp-rules says it: families, and files of rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.core.checkpoint.placement import Cut, Shapes
from zckpt.errors import MissingData, WrongOption
from zckpt.naming.tensor_families import FAMILIES
from zckpt.naming.tensor_rules import RuleFile, TensorRule, decide, rules_of, shapes_by
from zckpt.naming.universal_info import of_json

from ..conftest import texts

# Names and the slices' shapes at tp 2: hidden 8, four heads, vocabulary 32
GELU = {
    "{0}.self_attention.query_key_value.weight": ((12, 8), "0"),
    "{0}.self_attention.query_key_value.bias": ((12,), "0"),
    "{0}.self_attention.dense.weight": ((8, 4), "1"),
    "{0}.self_attention.dense.bias": ((8,), "replicated"),
    "{0}.mlp.dense_h_to_4h.weight": ((16, 8), "0"),
    "{0}.mlp.dense_h_to_4h.bias": ((16,), "0"),
    "{0}.mlp.dense_4h_to_h.weight": ((8, 16), "1"),
    "{0}.mlp.dense_4h_to_h.bias": ((8,), "replicated"),
    "{0}.input_layernorm.weight": ((8,), "replicated"),
    "{0}.post_attention_layernorm.bias": ((8,), "replicated"),
}
MODELS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "megatron": {
        **{name.format(3): item for name, item in GELU.items()},
        "tied_modules.embed.word_embeddings.weight": ((16, 8), "0"),
        "tied_modules.embed.position_embeddings.weight": ((5, 8), "replicated"),
        "7.weight": ((8,), "replicated"),
        "language_model.output_layer.weight": ((16, 8), "0"),
        "decoder.layers.0.mlp.linear_fc2.weight": ((8, 16), "1"),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ((8,), "replicated"),
    },
    "bloom": {
        **{name.format(4): item for name, item in GELU.items()},
        "tied_modules.embed.word_embeddings.weight": ((16, 8), "0"),
        "tied_modules.embed.word_embeddings.norm.weight": ((8,), "replicated"),
        "34.bias": ((8,), "replicated"),
    },
    "neox": {
        **{
            name.format("sequential.2").replace("self_attention", "attention"): item
            for name, item in GELU.items()
        },
        "sequential.0.word_embeddings.weight": ((16, 8), "0"),
        "sequential.5.norm.scale": ((8,), "replicated"),
        "sequential.6.final_linear.weight": ((16, 8), "0"),
    },
    "llama": {
        "model.embed_tokens.weight": ((32, 8), "replicated"),
        "model.layers.0.self_attn.q_proj.weight": ((4, 8), "0"),
        "model.layers.0.self_attn.k_proj.bias": ((2,), "0"),
        "model.layers.0.self_attn.o_proj.weight": ((8, 4), "1"),
        "model.layers.0.self_attn.o_proj.bias": ((8,), "replicated"),
        "model.layers.0.mlp.gate_up_proj.weight": ((20, 8), "0:2x"),
        "model.layers.0.mlp.down_proj.weight": ((8, 10), "1"),
        "model.layers.0.post_attention_layernorm.weight": ((8,), "replicated"),
        "model.norm.weight": ((8,), "replicated"),
    },
}


@pytest.mark.parametrize("family", MODELS)
def test_families_decide_all_names(family: str) -> None:
    shapes: dict[str, Shapes] = {n: [shape] * 2 for n, (shape, _) in MODELS[family].items()}
    found = decide("run", shapes, [rules_of(family)], 2)
    assert {name: sliced.placement.text for name, sliced in found.items()} == {
        name: rule for name, (_, rule) in MODELS[family].items()
    }
    with pytest.raises(MissingData) as raised:
        decide("run", shapes, [], 2)
    assert "--tp-rules" in raised.value.hint


def test_a_fused_layer_is_seen_by_its_neighbor() -> None:
    shapes: dict[str, Shapes] = {
        "3.mlp.dense_h_to_4h.weight": [(16, 8)] * 2,
        "3.mlp.dense_4h_to_h.weight": [(8, 8)] * 2,
    }
    with pytest.raises(WrongOption, match="has 2 fused parts") as raised:
        decide("run", shapes, [rules_of("megatron")], 2)
    assert "megatron-swiglu" in raised.value.hint
    found = decide("run", shapes, [rules_of("megatron-swiglu")], 2)
    assert found["3.mlp.dense_h_to_4h.weight"].placement.text == "0:2x"


@pytest.mark.parametrize(
    ("weight", "bias", "said"),
    [
        ("0", "replicated", "has 8 rows, but by the rule `replicated` its bias has 4 elements"),
        ("1", "0", "has 4 rows, but by the rule `0` its bias has 8"),
        ("0:2x", "0", "`0:2x` cuts the rows of a.up.weight, but the rule `0` cuts its bias"),
        ("0:4,4", "0:2,6", "the rule `0:4,4` cuts"),
        ("0", "0", None),
        ("0:1x", "0", None),
        ("1", "replicated", None),
        ("1", "sum", None),
        ("1:1x", "0", None),
        ("vocab:7", "replicated", None),
    ],
)
def test_a_wrong_rule_is_seen_by_the_bias(
    weight: str, bias: str, said: str | None, tmp_path: Path
) -> None:
    """The sizes of the ranks fit, but the whole bias does not fit the whole weight."""
    path = tmp_path / "rules"
    path.write_text(f".*weight = {weight}\n.*bias = {bias}\n")
    shapes: dict[str, Shapes] = {"a.up.weight": [(4, 4)] * 2, "a.up.bias": [(4,)] * 2}
    rules = [rules_of(str(path))]
    if said is None:
        assert len(decide("run", shapes, rules, 2)) == 2
        return
    with pytest.raises(WrongOption, match=said) as raised:
        decide("run", shapes, rules, 2)
    assert "1:1x" in raised.value.hint or weight != "1"
    transposed = {name.replace("up", "c_fc"): shape for name, shape in shapes.items()}
    assert len(decide("run", transposed, rules, 2)) == 2


def test_files_of_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("# own names first\n\n.*q_proj.weight = 1  # columns\ninclude llama\n")
    shapes: dict[str, Shapes] = {
        "a.q_proj.weight": [(4, 4)] * 2,
        "a.k_proj.weight": [(4, 4)] * 2,
    }
    found = decide("run", shapes, [rules_of(str(path))], 2)
    assert [sliced.shape for sliced in found.values()] == [(4, 8), (8, 4)]
    families = {"megatron", "megatron-swiglu", "bloom", "neox", "neox-parallel", "llama"}
    assert set(FAMILIES) == families
    for text, said in (
        ("a = 0:", "line 1"), ("a", "line 1"), ("( = 0", "line 1"), ("x = 0\na = -1", "line 2"),
        ("include nothing", "line 1"), ("a = 0:0x", "line 1"), ("{", "JSON"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(WrongOption, match=said):
            rules_of(str(path), of_json)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(WrongOption, match="neither a family nor a file"):
        rules_of(str(path))
    with pytest.raises(WrongOption, match="neither a family nor a file"):
        rules_of(str(tmp_path / "none"))


def test_the_first_shapes_that_give_the_whole_again() -> None:
    """A candidate that the rule is not for, or of which it makes another whole, is passed over."""
    rules = [RuleFile("rules", [TensorRule("fused", Cut(0, (4, 2)))])]
    candidates: list[Shapes] = [[(6, 4)] * 2, [(3, 5)] * 2, [(3, 4)] * 2, [(3, 4)] * 2]
    found = shapes_by(rules, "fused", (6, 4), candidates)
    assert found is not None
    assert found[0] is candidates[2]
    assert found[1].shape == (6, 4)
    assert shapes_by(rules, "fused", (6, 4), candidates[:2]) is None
    assert shapes_by(rules, "other", (6, 4), candidates) is None


def test_doubts_about_a_family() -> None:
    names = ["0.attention.dense.bias", "0.attention.dense.weight"]
    (line,) = texts(RuleFile("neox", []).doubts(names))
    assert line.startswith("--tp-rules neox takes 0.attention.dense.bias as whole on each rank")
    assert RuleFile("neox", []).doubts(names[1:]) == RuleFile("llama", []).doubts(names) == []
