"""PEFT's names: of the module, and of the files that it saves, against PEFT itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zckpt.naming import peft

from ..conftest import needs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens)))


KINDS = (
    *("lora", "dora", "lora on embeddings", "ia3", "adalora"),
    *("loha", "lokr", "vera", "tokens"),
)


def configs() -> dict[str, Any]:
    import peft as package

    shared: dict[str, Any] = {"target_modules": ["layer"], "modules_to_save": ["head"]}
    return {
        "lora": package.LoraConfig(r=2, **shared),
        "dora": package.LoraConfig(r=2, use_dora=True, **shared),
        "lora on embeddings": package.LoraConfig(r=2, target_modules=["embedding", "layer"]),
        "ia3": package.IA3Config(target_modules=["layer"], feedforward_modules=[]),
        "adalora": package.AdaLoraConfig(total_step=10, **shared),
        "loha": package.LoHaConfig(r=2, **shared),
        "lokr": package.LoKrConfig(r=2, **shared),
        "vera": package.VeraConfig(r=2, target_modules=["layer"], save_projection=False),
        "tokens": package.TrainableTokensConfig(token_indices=[1], target_modules=["embedding"]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_that_peft_saves(kind: str) -> None:
    needs("peft")
    import peft as package

    assert tuple(configs()) == KINDS
    config = configs()[kind]
    model = package.get_peft_model(Model(), config)
    saved = package.get_peft_model_state_dict(model, save_embedding_layers=False)
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all(map(peft.is_adapters, trained))
    assert {peft.saved_name(name) for name in trained} <= set(saved)
    whole = {"modules_to_save": getattr(config, "modules_to_save", None)}
    back = peft.module_names(list(saved), config=whole)
    assert {back.get(name, name) for name in saved} >= set(trained)
    names = peft.module_names(list(saved), names_in_module=trained)
    assert {names.get(name, name) for name in saved} >= set(trained)


def test_other_names_stay() -> None:
    names = ["layers.0.lora_A.weight", "model.default.weight.x", "head.weight", "a"]
    assert peft.module_names(names) == {}  # not PEFT's
    assert [peft.saved_name(name) for name in ("head.weight", "a")] == ["head.weight", "a"]
    module = "base_model.model.layer.lora_A.default.weight"
    assert peft.module_names([module]) == {}


def test_an_embedding_needs_its_base_weight() -> None:
    front = "base_model.model.embedding"
    adapter = [f"{front}.lora_embedding_{each}.default" for each in "AB"]
    assert peft.missing_bases(adapter) == [f"{front}.base_layer.weight"]
    assert peft.missing_bases([*adapter, f"{front}.base_layer.weight"]) == []


def test_an_adapter_is_told_from_its_model() -> None:
    """PEFT saves an adapted embedding with its base weights; a model has those of every layer."""
    front = "base_model.model"
    adapter = [f"{front}.q.lora_A.default.weight", f"{front}.embedding.lora_embedding_A.default"]
    embedding, layer = f"{front}.embedding.base_layer.weight", f"{front}.q.base_layer.weight"
    assert peft.is_adapter_alone(adapter)
    assert peft.is_adapter_alone([*adapter, embedding])
    assert not peft.is_adapter_alone([*adapter, embedding, layer])
    assert not peft.is_adapter_alone(["embedding.weight"])


def test_modules_that_are_saved_whole_are_known_by_the_ends_of_their_names() -> None:
    """PEFT 0.21, `_set_trainable`: `norm` wraps `input_layernorm` as well."""
    front = "base_model.model.layers.0.input_layernorm"
    config = {"modules_to_save": ["norm"]}
    names = [f"{front}.weight", "base_model.model.normal.weight", f"{front}.original_module.weight"]
    assert peft.module_names(names, config=config) == {
        f"{front}.weight": f"{front}.modules_to_save.default.weight"
    }
