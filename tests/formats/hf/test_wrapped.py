"""A model that was a part of what was trained: from_pretrained loads all of it, or export stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import errors

from ...conftest import Result, texts
from ..equality import same_bits
from .test_export import MODELS, build, config_of

Program = Callable[..., Result]
State = dict[str, torch.Tensor]


def exported(state: State, model: Any, tmp_path: Path, **words: Any) -> dict[str, Any]:
    (tmp_path / "run").mkdir()
    torch.save(state, tmp_path / "run" / "model.pt")
    config = config_of(model, tmp_path / "base")
    return dict(zckpt.export(tmp_path / "run", tmp_path / "out", config=config, **words))


def loads_all(model: Any, folder: Path) -> None:
    loaded, about = type(model).from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert same_bits(loaded.state_dict()[name], tensor), name


def below(front: str, model: Any) -> State:
    return {f"{front}{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("front", ["llm.", "model.", "net.policy."])
@pytest.mark.parametrize("kind", ["llama", "qwen3 tied", "gpt2", "t5", "bert", "mixtral", "llava"])
def test_a_common_prefix_is_removed(kind: str, front: str, tmp_path: Path) -> None:
    model = build(kind)
    report = exported(below(front, model), model, tmp_path)
    said = f"{front}: this prefix is removed from the names"
    assert any(line.startswith(said) for line in texts(report["warnings"]))
    assert report["about"] == "a model for from_pretrained"
    model.save_pretrained(tmp_path / "expected")
    names = [load_file(tmp_path / at / "model.safetensors").keys() for at in ("out", "expected")]
    assert names[0] == names[1]
    loads_all(model, tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama", "qwen3 tied", "gpt2", "t5", "bert", "mixtral", "llava"])
def test_names_of_the_class_stay(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    assert exported(below("", model), model, tmp_path)["warnings"] == []
    loads_all(model, tmp_path / "out")


def test_a_tie_below_a_prefix(tmp_path: Path) -> None:
    """One of the two names was saved, as an optimizer knows it."""
    model = build("qwen3 tied")
    state = below("llm.", model)
    del state["llm.lm_head.weight"]
    exported(state, model, tmp_path)
    loads_all(model, tmp_path / "out")


@pytest.mark.parametrize("front", ["", "pretrained_model."])
def test_a_value_head_is_named(front: str, tmp_path: Path) -> None:
    model = build("llama")
    state = {**below(front, model), "v_head.summary.weight": torch.ones(1, 16)}
    warnings = texts(exported(state, model, tmp_path)["warnings"])
    assert warnings[-1] == (
        "v_head.summary.weight: LlamaForCausalLM has no such weights, and does not load them"
    )
    assert len(warnings) == 1 + bool(front)
    loads_all(model, tmp_path / "out")


def test_a_base_model_with_a_tied_head(tmp_path: Path) -> None:
    """from_pretrained adds the base's prefix itself."""
    model = build("qwen3 tied")
    state = {
        n.removeprefix("model."): t for n, t in model.state_dict().items() if "lm_head" not in n
    }
    assert exported(state, model, tmp_path)["warnings"] == []
    loads_all(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.", "model.layers.0."),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.*mlp.up_proj", "model.layers.0.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("front", ["", "llm."])
def test_a_missing_weight_is_refused(lost: str, said: str, front: str, tmp_path: Path) -> None:
    model = build("llama")
    begin, _, end = lost.partition("*")
    state = {
        name: tensor
        for name, tensor in below(front, model).items()
        if not (name.removeprefix(front).startswith(begin) and end in name)
    }
    with pytest.raises(
        errors.MissingData, match="from_pretrained would initialize at random"
    ) as raised:
        exported(state, model, tmp_path)
    assert said in raised.value.message
    assert "--rename" in raised.value.hint
    assert not (tmp_path / "out").exists()


def test_other_names_are_refused_with_the_line_that_helps(tmp_path: Path) -> None:
    model = build("llama")
    state = {name.replace("model.", "decoder."): t for name, t in model.state_dict().items()}
    with pytest.raises(errors.MissingData, match=r"lacks .* of LlamaForCausalLM") as raised:
        exported(state, model, tmp_path)
    assert "--rename" in raised.value.hint
    rename = [("^decoder", "model")]
    report = zckpt.export(
        tmp_path / "run", tmp_path / "out", config=tmp_path / "base", rename=rename
    )
    assert report["warnings"] == []
    loads_all(model, tmp_path / "out")


def test_two_models_of_the_class(tmp_path: Path) -> None:
    model = build("llama")
    state = {**below("student.", model), **below("teacher.", model)}
    with pytest.raises(errors.AmbiguousCheckpoint, match=r"student\., teacher\.") as raised:
        exported(state, model, tmp_path)
    assert raised.value.hint == r"choose one with --rename '^student\.='"
    report = zckpt.export(
        tmp_path / "run", tmp_path / "out", config=tmp_path / "base", rename=[(r"^student\.", "")]
    )
    assert report["warnings"][0]["message"].startswith("teacher.")
    loads_all(model, tmp_path / "out")


def test_a_class_that_is_not_known(tmp_path: Path) -> None:
    model = build("llama")
    config = config_of(model, tmp_path / "base") / "config.json"
    state = json.loads(config.read_text())
    config.write_text(json.dumps({**state, "architectures": ["OwnForCausalLM"]}))
    torch.save(below("llm.", model), tmp_path / "model.pt")
    report = zckpt.export(tmp_path / "model.pt", tmp_path / "out", config=tmp_path / "base")
    assert report["about"] == "weights for from_pretrained"
    assert (
        "names OwnForCausalLM, whose weights zckpt does not know"
        in report["warnings"][-1]["message"]
    )


def test_an_adapter_below_a_prefix(tmp_path: Path) -> None:
    import peft
    import transformers

    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, adapter)
    torch.save(below("llm.", model), tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "saved")
    report = zckpt.export(tmp_path / "model.pt", tmp_path / "out", config=tmp_path / "saved")
    assert report["warnings"][-1]["message"].startswith(
        "llm.: this prefix is removed from the names, so that PEFT finds"
    )
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert written.keys() == expected.keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out")
    state = model.state_dict()
    assert all(same_bits(tensor, state[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("kind", ["resnet", "vit", "qwen3 moe"])
def test_other_kinds_are_asked(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    report = exported(below("backbone.", model), model, tmp_path)
    assert report["about"] == "a model for from_pretrained"
    loads_all(model, tmp_path / "out")
    assert MODELS[kind]
