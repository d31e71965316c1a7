"""Folders for from_pretrained, judged by transformers and PEFT: no key is missing or unexpected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import zckpt
from zckpt import errors

from ...conftest import EXAMPLE, Result, texts
from ..equality import same_bits

Program = Callable[..., Result]
TINY: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**TINY, "tie_word_embeddings": False}),
    "qwen3 tied": ("Qwen3ForCausalLM", {**TINY, "head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 22, "num_layers": 2, "num_heads": 2},
    ),
    "bert": ("BertForMaskedLM", TINY),
    "mixtral": ("MixtralForCausalLM", {**TINY, "num_local_experts": 2, "head_dim": 8}),
    "qwen3 moe": (  # ten experts and more, and a tied head
        "Qwen3MoeForCausalLM",
        {**TINY, "head_dim": 8, "moe_intermediate_size": 6, "num_experts": 11,
         "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "resnet": (  # has buffers
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3},
    ),
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2, "image_size": 8,
         "patch_size": 4, "num_attention_heads": 2},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **TINY}, "image_token_index": 3,
         "vision_config": {"model_type": "clip_vision_model", "hidden_size": 16, "image_size": 8,
                           "intermediate_size": 22, "num_hidden_layers": 2, "patch_size": 4,
                           "num_attention_heads": 2}},
    ),
}  # fmt: skip
HOW = ("dcp", "torch", "trainer")


def build(kind: str) -> Any:
    import transformers

    name, config = MODELS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(3)
    model = cls(cls.config_class(**config))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.25)  # so that its first value is not right by chance
    return model


def config_of(model: Any, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]  # as save_pretrained sets it
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"private")
    return folder


def saved(model: Any, folder: Path, how: str) -> Path:
    """What a program saves of a whole model, with an optimizer whose numbers no one can name."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if how == "dcp":
        dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=folder)
        return folder
    folder.mkdir()
    if how == "trainer":
        model.save_pretrained(folder)
        (folder / "trainer_state.json").write_text("{}")
    else:
        torch.save(model.state_dict(), folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MODELS)
def test_files_are_those_of_save_pretrained(kind: str, how: str, tmp_path: Path) -> None:
    """Names as well: those of modules and of files are not the same since transformers 5."""
    model = build(kind)
    source = saved(model, tmp_path / "run", how)
    zckpt.export(source, tmp_path / "out", config=config_of(model, tmp_path / "base"))
    model.save_pretrained(tmp_path / "expected")
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert sorted(written) == sorted(expected)
    assert all(same_bits(written[name], tensor) for name, tensor in expected.items())


FORMER = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.1.w2.weight",
    "qwen3 moe": "model.layers.1.mlp.experts.10.gate_proj.weight",
    "vit": "vit.encoder.layer.1.attention.attention.query.weight",
    "llava": "language_model.model.layers.1.mlp.up_proj.weight",
}
"""Names that older versions of transformers and vLLM know."""


@pytest.mark.parametrize("kind", FORMER)
def test_an_export_equals_its_source(kind: str, tmp_path: Path) -> None:
    """Although both have other names, and tensors of other shapes."""
    model = build(kind)
    source, out = saved(model, tmp_path / "run", "dcp"), tmp_path / "out"
    zckpt.export(source, out, config=config_of(model, tmp_path / "base"))
    twice = kind == "qwen3 moe"  # has a tied weight, which DCP files have twice
    assert FORMER[kind] in zckpt.read(out).parameters
    for paths in ((out, source), (source, out)):
        report = zckpt.verify(*paths)
        assert (report["equal"], report["differences"]) == (True, [])
        assert zckpt.diff(*paths)["equal"]
    assert report["tensors"] == len(zckpt.read(source).parameters) - twice
    assert zckpt.verify(source, out, gather=True, device="cpu")["equal"]
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    report = zckpt.verify(source, out)
    assert (report["equal"], len(report["differences"])) == (False, 1)
    assert not zckpt.verify(out, source)["equal"]


@pytest.mark.parametrize("place", [0, -1])
def test_weights_that_differ_are_not_tied(place: int, tmp_path: Path) -> None:
    """The configuration ties them, but a directory of DCP has two that are not equal."""
    model = build("qwen3 tied")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"].view(-1)[place] += 1
    dcp.save(state, checkpoint_id=tmp_path / "run")
    config = config_of(model, tmp_path / "base")
    zckpt.export(tmp_path / "run", tmp_path / "out", config=config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert same_bits(written[name], state[name])


def test_an_export_of_an_export_is_the_same(tmp_path: Path) -> None:
    model = build("mixtral")
    source = saved(model, tmp_path / "run", "torch")
    zckpt.export(source, tmp_path / "out", config=config_of(model, tmp_path / "base"))
    zckpt.export(tmp_path / "out", tmp_path / "again")
    files = [tmp_path / name / "model.safetensors" for name in ("out", "again")]
    assert load_file(files[0]).keys() == load_file(files[1]).keys()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_misses_nothing(kind: str, how: str, tmp_path: Path) -> None:
    model = build(kind)
    source = saved(model, tmp_path / "run", how)
    config = config_of(model, tmp_path / "base")
    zckpt.export(source, tmp_path / "out", config=config)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names <= {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    loaded, about = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {key: value for key, value in about.items() if value} == {}
    for name, tensor in model.state_dict().items():
        assert same_bits(loaded.state_dict()[name], tensor), name


def test_files_of_at_most_a_size_and_of_another_type(
    tmp_path: Path, zckpt: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("llama")
    source = saved(model, tmp_path / "run", "trainer")
    capsys.readouterr()
    done = zckpt("export", source, tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "2kB")
    assert (done.code, done.err) == (0, "")
    assert "training" not in done.out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert len(set(index["weight_map"].values())) > 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert same_bits(loaded.state_dict()[name], tensor.bfloat16()), name


def test_an_untied_copy_of_a_tied_weight(tmp_path: Path) -> None:
    """The program tied what the configuration does not: both names are needed."""
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    source = saved(model, tmp_path / "run", "torch")
    zckpt.export(source, tmp_path / "out", config=config_of(model, tmp_path / "base"))
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    _, about = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not about["missing_keys"]


def test_without_a_configuration(tmp_path: Path, zckpt: Program) -> None:
    refused = zckpt("export", EXAMPLE, tmp_path / "out")
    assert refused.code == 1
    assert "has no config.json" in refused.err
    assert "--config" in refused.err
    assert not (tmp_path / "out").exists()
    wrong = zckpt("export", EXAMPLE, tmp_path / "out", "--config", tmp_path / "nowhere")
    assert (wrong.code, "does not exist" in wrong.err) == (2, True)


def test_one_file_as_configuration(tmp_path: Path) -> None:
    model = build("gpt2")
    source = saved(model, tmp_path / "run", "torch")
    file = config_of(model, tmp_path / "base") / "config.json"
    zckpt.export(source, tmp_path / "out", config=file)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors"]


ADAPTERS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "lora": ("llama", ["q_proj", "v_proj"], {}),
    "dora": ("llama", ["q_proj", "v_proj"], {"use_dora": True}),
    "head": ("llama", ["q_proj", "v_proj"], {"modules_to_save": ["lm_head"]}),
    # PEFT compares the ends of names: input_layernorm is one of these modules
    "norms": ("llama", ["q_proj"], {"modules_to_save": ["norm", "embed_tokens"]}),
    "embedding": ("llama", ["q_proj", "embed_tokens"], {}),
    "tied head": ("qwen3 tied", ["q_proj", "lm_head"], {}),
    "bias": ("gpt2", ["c_attn"], {"bias": "lora_only"}),
    "biases": ("gpt2", ["c_attn"], {"bias": "all"}),
}


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
@pytest.mark.parametrize("shows_trained", [True, False])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_loads_an_adapter(kind: str, shows_trained: bool, tmp_path: Path) -> None:
    import peft

    base, target, options = ADAPTERS[kind]
    config = peft.LoraConfig(r=2, target_modules=target, **options)
    model = peft.get_peft_model(build(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "run" / "optim.pt")
    model.peft_config["default"].save_pretrained(tmp_path / "base")
    source = tmp_path / "run"
    if shows_trained:
        source = tmp_path / "universal"
        zckpt.convert(tmp_path / "run", source, param_names=names)
    report = zckpt.export(source, tmp_path / "out", config=tmp_path / "base")
    assert any("base model" in line for line in texts(report["left_out"]))
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model)
    assert written.keys() == expected.keys()
    assert all(same_bits(written[name], expected[name]) for name in expected)
    fresh = build(base)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out")
    saved = peft.get_peft_model_state_dict(loaded)
    assert all(same_bits(saved[name], expected[name]) for name in expected)


TUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [1], "target_modules": ["embed_tokens"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 5}),
    "HRA": ("HRAConfig", {"r": 2}),
    "MiSS": ("MissConfig", {"r": 2}),
    "C3A": ("C3AConfig", {"block_size": 4}),
}


@pytest.mark.parametrize("kind", [*TUNERS, "VeRA"])
def test_other_adapters_of_peft(kind: str, tmp_path: Path) -> None:
    """What PEFT itself saves, or a refusal of a kind whose names zckpt does not know."""
    import peft

    name, options = TUNERS.get(kind, ("VeraConfig", {"r": 2}))
    config = getattr(peft, name)(**{"target_modules": ["q_proj", "v_proj"], **options})
    model = peft.get_peft_model(build("llama"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    config.save_pretrained(tmp_path / "base")
    arguments = (tmp_path / "model.pt", tmp_path / "out")
    if kind == "VeRA":
        with pytest.raises(errors.UnsupportedCheckpoint, match=r"how PEFT saves .* \(VERA\)"):
            zckpt.export(*arguments, config=tmp_path / "base")
        return
    zckpt.export(*arguments, config=tmp_path / "base")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model)
    assert written.keys() == expected.keys()
    assert all(same_bits(written[name], expected[name]) for name in expected)


def test_options_that_do_not_apply(tmp_path: Path) -> None:
    with pytest.raises(errors.WrongOption, match="--stage"):
        zckpt.convert(EXAMPLE, tmp_path / "out", to="hf", stage=2)


def test_an_adapter_of_another_name(tmp_path: Path) -> None:
    """PEFT leaves the adapter's name out of its files, whatever it is."""
    front = "base_model.model.q"
    model = {f"{front}.lora_{each}.second.weight": torch.ones(2, 2) for each in "AB"}
    torch.save(model, tmp_path / "model.pt")
    config = tmp_path / "adapter_config.json"
    config.write_text("{}")
    with pytest.raises(errors.WrongOption, match="the adapter second") as raised:
        zckpt.export(tmp_path / "model.pt", tmp_path / "out", config=config)
    regex, _, made = raised.value.hint.rpartition(" ")[2].strip("'").rpartition("=")
    zckpt.export(tmp_path / "model.pt", tmp_path / "out", config=config, rename=[(regex, made)])
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(written) == {f"{front}.lora_{each}.weight" for each in "AB"}


def test_options_of_reading_are_not_ignored(tmp_path: Path, zckpt: Program) -> None:
    names = tmp_path / "names.txt"
    names.write_text("fc1.weight")
    refused = zckpt("export", EXAMPLE, tmp_path / "out", "--param-names", names)
    assert refused.code == 2
    assert "--param-names does not apply to export" in refused.err
    refused = zckpt("export", EXAMPLE, tmp_path / "out", "--step-policy", "newest")
    assert refused.code == 2
    assert "newest" in refused.err


def test_such_a_folder_is_read_as_weights_alone(tmp_path: Path) -> None:
    model = build("llama")
    source = saved(model, tmp_path / "run", "trainer")
    zckpt.export(source, tmp_path / "out")
    manifest = zckpt.read(tmp_path / "out")
    assert (manifest.format, manifest.groups) == ("gathered", None)
    with pytest.raises(errors.ZckptError):
        zckpt.read(tmp_path / "out", format="hf")


@pytest.mark.parametrize("option", ["model_config", "max_file_size", "weights_only", "param_names"])
def test_an_option_has_one_name(option: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"no option '{option}'"):
        zckpt.export(tmp_path / "run", tmp_path / "out", **{option: None})
