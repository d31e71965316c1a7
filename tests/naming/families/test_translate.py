"""`--family` without engines: directions, vocabularies, and every refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zckpt.naming.families import rules
from zckpt.naming.families.layouts import LAYOUTS

from ...conftest import texts

H, HEADS, QUERY, GROUPS, VOCABULARY = 8, 2, 4, 2, 5
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, H),
    f"{LAYER}self_attn.q_proj.weight": (QUERY * HEADS, H),
    f"{LAYER}self_attn.k_proj.weight": (GROUPS * HEADS, H),
    f"{LAYER}self_attn.v_proj.weight": (GROUPS * HEADS, H),
    f"{LAYER}self_attn.o_proj.weight": (H, QUERY * HEADS),
    f"{LAYER}mlp.gate_proj.weight": (6, H),
    f"{LAYER}mlp.up_proj.weight": (6, H),
    f"{LAYER}mlp.down_proj.weight": (H, 6),
    f"{LAYER}input_layernorm.weight": (H,),
    f"{LAYER}post_attention_layernorm.weight": (H,),
    "model.norm.weight": (H,),
    "lm_head.weight": (VOCABULARY, H),
}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SIZES = f"llama:heads={QUERY},kv_heads={GROUPS}"


def drawn() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def saved(
    folder: Path,
    change: Callable[[dict[str, Any]], Any] = lambda weights: None,
    groups: Callable[[str], int] = lambda name: 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A step of AdamW for the model; parameters of group 1 have another learning rate."""
    weights: dict[str, Any] = drawn()
    change(weights)
    options = [{"lr": 0.1}, {"lr": 0.2}]
    for number, group in enumerate(options):
        group["params"] = [(n, w) for n, w in weights.items() if groups(n) == number]  # type: ignore[assignment]
    optimizer = torch.optim.AdamW([group for group in options if group["params"]])
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    folder.mkdir()
    torch.save({name: weight.detach() for name, weight in weights.items()}, folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optim.pt")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_directions(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    source, there, back = saved(tmp_path / "source"), tmp_path / "there", tmp_path / "back"
    assert zckpt("convert", source, there, "--family", f"{SIZES},vocab_size=8").code == 0
    weights, theirs = torch.load(source / "model.pt"), load_file(there / "model.safetensors")
    q, k, v = (weights[f"{LAYER}self_attn.{part}_proj.weight"].chunk(GROUPS) for part in "qkv")
    assert torch.equal(
        theirs[QKV], torch.cat([t for g in range(GROUPS) for t in (q[g], k[g], v[g])])
    )
    embedding = theirs["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:VOCABULARY], weights["model.embed_tokens.weight"])
    assert embedding.shape == (8, H)
    assert not embedding[VOCABULARY:].any()
    assert zckpt("verify", there).code == 0
    family = f"{SIZES},vocab_size={VOCABULARY}"
    ended = zckpt("convert", there, back, "--family", family, "--json")
    assert "model.embed_tokens" not in str(ended.document["left_out"])
    assert any("rows 5 to 7" in line for line in texts(ended.document["left_out"]))
    assert zckpt("verify", source, "--against", back).code == 0
    assert zckpt("verify", there, "--against", source, "--family", family).code == 0
    assert zckpt("diff", there, source, "--family", family).code == 0


def test_config_beside_the_source(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    config = {"model_type": "llama", "num_attention_heads": QUERY, "num_key_value_heads": GROUPS}
    source = saved(tmp_path / "source", config=config)
    assert zckpt("convert", source, tmp_path / "a", "--family", "llama").code == 0
    ended = zckpt("convert", source, tmp_path / "b", "--family", "llama:kv_heads=1", "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "--family says kv_heads=1, config.json says kv_heads=2" in ended.document["message"]
    ended = zckpt("convert", source, tmp_path / "b", "--family", "mixtral", "--json")
    assert ended.document["error"] == "WrongOption"


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda weights: weights.pop(f"{LAYER}{name}")


def _with(name: str, *shape: int) -> Callable[[dict[str, Any]], Any]:
    return lambda weights: weights.update({name: torch.nn.Parameter(torch.randn(shape))})


@pytest.mark.parametrize(
    ("change", "family", "error", "words"),
    [
        (_without("self_attn.k_proj.weight"), SIZES, "MissingData", "but not model.layers.0"),
        (_with("model.extra.weight", 2), SIZES, "WrongOption", "names: model.extra.weight"),
        (_with(QKV, 16, H), SIZES, "WrongOption", "names of Hugging Face and of Megatron"),
        (_with(f"{LAYER}mlp.up_proj.weight", 5, H), SIZES, "WrongOption", "[6, 8] and [5, 8]"),
        (_with("other", 2), "llama:heads=0", "WrongOption", "'heads=0' is not a size"),
        (lambda weights: None, "bert", "WrongOption", "none of llama"),
        (lambda weights: None, "llama", "MissingData", "does not state the number of heads"),
        (lambda weights: None, "llama:kv_heads=3", "WrongOption", "do not match 3 key"),
        (lambda weights: None, "llama:heads=3,kv_heads=2", "WrongOption", "3 heads and 2 key"),
        (lambda weights: None, f"{SIZES},vocab_size=4", "WrongOption", "more rows than"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path,
    zckpt: Callable[..., Any],
    change: Callable[[dict[str, Any]], Any],
    family: str,
    error: str,
    words: str,
) -> None:
    source = saved(tmp_path / "source", change)
    ended = zckpt("convert", source, tmp_path / "target", "--family", family, "--json")
    assert (ended.code != 0, ended.document["error"]) == (True, error)
    assert words in ended.document["message"]
    assert not (tmp_path / "target").exists()


def test_parts_of_several_groups(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    source = saved(tmp_path / "source", groups=lambda name: int("k_proj" in name))
    ended = zckpt("convert", source, tmp_path / "target", "--family", SIZES, "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "q_proj.weight and model.layers.0.self_attn.k_proj" in ended.document["message"]
    assert "lr" in ended.document["message"]


def test_verify_alone_takes_no_family(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    source = saved(tmp_path / "source")
    assert "--against" in zckpt("verify", source, "--family", SIZES).err


def test_names_of_transformer_engine(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Its spec keeps the norms in the linear layers that follow them."""
    source, there = saved(tmp_path / "source"), tmp_path / "there"
    assert zckpt("convert", source, there, "--family", SIZES).code == 0
    weights = load_file(there / "model.safetensors")
    for name, fused in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ):
        layer = "decoder.layers.0."
        weights[f"{layer}{fused}weight"] = weights.pop(f"{layer}{name}weight")
    torch.save(weights, tmp_path / "te.pt")
    ended = zckpt("convert", tmp_path / "te.pt", tmp_path / "back", "--family", SIZES)
    assert ended.code == 0, ended.err
    back, expected = (
        load_file(tmp_path / "back" / "model.safetensors"),
        torch.load(source / "model.pt"),
    )
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in back)


def test_masters_of_partitions(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """bf16 weights with fp32 masters, both of which ranks share in slices."""
    source, names = saved(tmp_path / "source"), tmp_path / "names"
    names.write_text("\n".join(SHAPES))
    assert zckpt("convert", source, tmp_path / "there", "--family", SIZES).code == 0
    for stage in (1, 3):
        ranks, target = tmp_path / f"ranks{stage}", tmp_path / f"target{stage}"
        options = ["--to", "deepspeed", "--dtype", "bf16", "--dp", "3", "--stage", stage]
        assert zckpt("convert", source, ranks, *options, "--param-names", names).code == 0
        assert zckpt("convert", ranks, target, "--family", SIZES).code == 0
        for slot, own in (
            ("model", "master"),
            ("exp_avg", "exp_avg"),
            ("exp_avg_sq", "exp_avg_sq"),
        ):
            expected = load_file(tmp_path / "there" / f"{slot}.safetensors")
            read = load_file(target / f"{own}.safetensors")
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], expected[name]) for name in read)
        if stage == 1:
            weights = load_file(target / "model.safetensors")
            masters = load_file(target / "master.safetensors")
            assert all(torch.equal(weights[name], masters[name].bfloat16()) for name in masters)


FILE = Path(rules.__file__).with_name("llama.json")


def test_a_family_in_a_file(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Another model: its attention is called `attn`, and its rules are those of Llama otherwise."""

    def renamed(weights: dict[str, Any]) -> None:
        for name in [*weights]:
            weights[name.replace("self_attn", "attn")] = weights.pop(name)

    source, there, back = saved(tmp_path / "source", renamed), tmp_path / "there", tmp_path / "back"
    file = tmp_path / "own.json"
    file.write_text(FILE.read_text().replace("self_attn.", "attn."))
    family = f"{file}:heads={QUERY},kv_heads={GROUPS}"
    ended = zckpt("convert", source, there, "--family", SIZES, "--json")
    assert "does not know these names" in ended.document["message"]
    assert zckpt("convert", source, there, "--family", family).code == 0
    assert QKV in load_file(there / "model.safetensors")
    assert zckpt("convert", there, back, "--family", family).code == 0
    assert zckpt("verify", source, "--against", back).code == 0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("{", "", "is not a family"),
        ('"rules"', '"rule"', "missing required field `rules`"),
        ("attention", "atention", "there is no packing 'atention'"),
        ('"packing"', '"packings"', "unknown field `packings`"),
        ('"only": "Megatron"', '"only": "megatron"', "none of Hugging Face, Megatron"),
        ("{layer}", "{block}", "only {layer} and {expert} may be in braces"),
        ("(pos_)", "(pos_", "is not a family"),
        ('["llama"', '[["llama"]', "Expected `str`, got `array` - at `$.types[0]`"),
    ],
)
def test_a_file_that_is_no_family(
    before: str, after: str, words: str, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    file = tmp_path / "own.json"
    file.write_text(FILE.read_text().replace(before, after))
    source, out = saved(tmp_path / "source"), tmp_path / "out"
    ended = zckpt("convert", source, out, "--family", file, "--json")
    assert (ended.code, ended.document["error"]) == (2, "WrongOption")
    assert words in ended.document["message"]
    assert not out.exists()


def test_a_file_that_is_not_there(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    source, file = saved(tmp_path / "source"), tmp_path / "own.json"
    ended = zckpt("convert", source, tmp_path / "out", "--family", f"{file}:heads=4", "--json")
    assert f"{file}: there is no such file" in ended.document["message"]


def test_packings_of_files_are_those_of_layouts() -> None:
    assert LAYOUTS.keys() == {*rules.PACKINGS}
    for name in rules.NAMES:
        assert rules.family_of(name).types
