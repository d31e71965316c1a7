"""Tied weights that a file has once: ties of config.json and --tie, and the hint of a tie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt import errors
from zckpt.naming import ties

from ..conftest import EXAMPLE, Result, needs, texts

Program = Callable[..., Result]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A Trainer's directory of a tied model, as save_pretrained writes it."""
    folder.mkdir()
    weights = {EMBEDDING: torch.rand(5, 3), "model.norm.weight": torch.rand(3)}
    save_file(weights, folder / "model.safetensors")
    parameters = [torch.nn.Parameter(each) for each in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, {HEAD: EMBEDDING}),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, {}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),  # its default
        ({"architectures": ["GemmaForCausalLM"]}, {HEAD: EMBEDDING}),
        ({"architectures": ["OfThisProgramAlone"], "tie_word_embeddings": True}, {}),
        ({"architectures": None}, {}),
        (None, {}),
    ],
)
def test_ties_that_a_config_states(config: Any, tied: dict[str, str]) -> None:
    assert ties.stated_ties(config, [EMBEDDING, "model.norm.weight"]) == tied
    assert ties.stated_ties(config, [EMBEDDING, HEAD]) == {}  # both are there


def test_t5_shares_its_inputs_even_with_a_head_of_its_own() -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    assert ties.stated_ties(config, ["shared.weight", HEAD]) == {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_the_table_is_what_transformers_ties(name: str) -> None:
    needs("transformers")
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(tie_word_embeddings=True)
    with torch.device("meta"):
        expected = cls(config).get_expanded_tied_weights_keys(all_submodels=True)
    stated = {"architectures": [name], "tie_word_embeddings": True}
    assert ties.stated_ties(stated, list(expected.values())) == expected


@pytest.mark.parametrize("to", ["deepspeed", "dcp", "gathered"])
def test_both_names_are_written(to: str, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    source = save(tmp_path / "run", config)
    options: dict[str, Any] = {"stage": 2, "dp": 2} if to == "deepspeed" else {}
    zckpt.convert(source, tmp_path / "target", to=to, **options)
    parameter = zckpt.read(tmp_path / "target").parameters[EMBEDDING]
    assert parameter.aliases == (HEAD,)
    report = zckpt.convert(
        save(tmp_path / "b"), tmp_path / "c", to=to, tie=[(HEAD, EMBEDDING)], **options
    )
    assert zckpt.read(tmp_path / "c").parameters[EMBEDDING].aliases == (HEAD,)
    assert not any("--tie" in line for line in texts(report["warnings"]))


def test_deepspeeds_module_has_both_names(tmp_path: Path) -> None:
    """DeepSpeed's loader is strict: it needs both names."""
    source = save(tmp_path / "run")
    zckpt.convert(source, tmp_path / "t", to="deepspeed", stage=2, dp=1, tie=[(HEAD, EMBEDDING)])
    (file,) = (tmp_path / "t").glob("*/mp_rank_00_model_states.pt")
    module = torch.load(file, weights_only=False)["module"]
    assert torch.equal(module[HEAD], module[EMBEDDING])


def test_a_likely_tie_is_said_before_the_first_byte(tmp_path: Path, zckpt: Program) -> None:
    source = save(tmp_path / "run")
    words = ("convert", source, tmp_path / "t", "--to", "dcp")
    said = zckpt(*words, "--dry-run")
    assert f"add --tie {HEAD}={EMBEDDING}" in said.err
    assert not (tmp_path / "t").exists()
    done = zckpt(*words)
    assert done.err.count("--tie") == 1
    tied = zckpt("convert", source, tmp_path / "b", "--to", "dcp", "--tie", f"{HEAD}={EMBEDDING}")
    assert (tied.code, "--tie" in tied.err) == (0, False)


@pytest.mark.parametrize(
    ("tie", "said"),
    [
        ((HEAD, "x.weight"), "no weight x.weight"),
        (("model.norm.weight", EMBEDDING), "a separate weight model.norm.weight"),
    ],
)
def test_ties_that_cannot_be(tie: tuple[str, str], said: str, tmp_path: Path) -> None:
    source = save(tmp_path / "run")
    with pytest.raises(errors.WrongOption, match=said):
        zckpt.convert(source, tmp_path / "t", to="dcp", tie=[tie])
    assert not (tmp_path / "t").exists()


def test_a_tie_without_an_equals_sign(tmp_path: Path, zckpt: Program) -> None:
    refused = zckpt("convert", tmp_path, tmp_path / "t", "--tie", HEAD)
    assert refused.code == 2
    assert "NAME=NAME" in refused.err


def test_a_second_name_of_another_weight(tmp_path: Path) -> None:
    with pytest.raises(errors.WrongOption, match=r"head\.weight is a second name of embedding"):
        zckpt.convert(EXAMPLE, tmp_path / "out", tie=[("head.weight", "fc1.weight")])
