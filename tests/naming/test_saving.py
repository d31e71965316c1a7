"""Names and tensors of files, judged by transformers: what its `save_pretrained` makes of a model.

The judge is `revert_weight_conversion`, which save_pretrained calls. It gets the tensors of every
model, cut to a few rows and filled with numbers of which each is there once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.storage.fragments import ZEROS, Extent, solid
from zckpt.errors import InconsistentCheckpoint, MissingData, UnsupportedCheckpoint, WrongOption
from zckpt.naming.saving import as_saved
from zckpt.naming.saving.modules import as_modules, spelled_as
from zckpt.naming.saving.rules import _table, claimed, rules_for

from .. import saved_names
from ..conftest import needs

State = dict[str, torch.Tensor]
FIRST = (
    "MixtralForCausalLM",  # experts
    "ViTForImageClassification",  # names
    "LlavaForConditionalGeneration",  # names in which those of files are contained
    "Ernie4_5_VLMoeForConditionalGeneration",  # two kinds of experts in one list
    "Step3p7ForConditionalGeneration",  # fused attention, with rotary positions
    "InklingForConditionalGeneration",  # alternating rows
    "Inkling2ForCausalLM",  # a padded vocabulary, and numbers of layers that move
    "Inkling2LoopForCausalLM",  # queries
    "Qwen4ExpForCausalLM",  # as many parts as a size says
    "Nemotron3_5TranscribeForConditionalGeneration",  # turned experts
)
CLASSES = [name for item in _table()["models"] for name in item["classes"]]
WIDTH = 4  # bytes of an element


def built(name: str) -> Any:
    needs("transformers")
    import transformers

    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return saved_names.built(getattr(transformers, name))


def small(model: Any, last: int) -> State:
    """The tensors of the layers up to the `last`, with fewer rows and columns.

    Equal lengths stay equal. The rows of heads stay: config.json says how many heads there are.
    """
    steps = {step[0] for rule in used_rules(model) for step in rule.get("do", ())}
    start, result = 1, {}
    for name, tensor in model.state_dict().items():
        if max((int(word) for word in name.split(".") if word.isdecimal()), default=0) > last:
            continue
        shape = [
            whole if whole <= 16 or (axis == 0 and "rope" in steps) else 8 + whole % 5 * 2
            for axis, whole in enumerate(tensor.shape)
        ]
        count = prod(shape)
        result[name] = torch.arange(start, start + count, dtype=torch.int32).view(shape)
        start += count
    return result


def used_rules(model: Any) -> list[dict[str, Any]]:
    inner = [(path, name, kind) for path, name, kind, *_ in saved_names.modules(model)]
    keys = [key for _, key in claimed(inner, _table()["rules"])]
    return [rule for key in keys for rule in rules_for(key)]


def saved_by_transformers(model: Any, state: State) -> State:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    known = get_model_conversion_mapping(model, add_legacy=False)
    stub = SimpleNamespace(
        _weight_conversions=[each for each in known if not isinstance(each, PrefixChange)],
        config=model.config,
        get_parameter=lambda name: state[name],
    )
    return dict(revert_weight_conversion(stub, dict(state)))


def manifest_of(state: State) -> tuple[Manifest, np.ndarray[Any, Any]]:
    """A manifest whose tensors lie one after another, and the numbers that lie there."""
    entries, parameters, at = {}, {}, 0
    for name, tensor in state.items():
        size = tensor.numel() * WIDTH
        shape = tuple(tensor.shape)
        fragments = solid(tensor.numel(), Extent("file", at, size))
        entries[name, "param"] = Entry(name, "param", "I32", shape, fragments)
        parameters[name] = Parameter(shape)
        at += size
    numbers = [tensor.reshape(-1).numpy() for tensor in state.values()]
    return Manifest("root", "gathered", Run(), entries, parameters), np.concatenate(numbers)


def values(entry: Entry, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    result = np.full(entry.numel, -1, np.int32)
    for fragment in entry.fragments:
        for run in fragment.runs(0, entry.numel):
            first = run.extent.offset // WIDTH
            own = numbers[first : first + run.stop - run.start]
            result[run.start : run.stop] = 0 if run.extent.file == ZEROS else own
    return result.reshape(entry.shape)


def tensors_of(manifest: Manifest, numbers: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for entry in manifest.entries.values():
        yield entry.parameter, values(entry, numbers)


def config_of(model: Any) -> dict[str, Any]:
    """config.json as it lies beside a model."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    return config | {"architectures": [type(model).__name__]}


def check(name: str, last: int) -> None:
    model = built(name)
    state = small(model, last)
    manifest, numbers = manifest_of(state)
    config = config_of(model)
    expected = saved_by_transformers(model, state)
    saved = as_saved(manifest, config)
    found = dict(tensors_of(saved, numbers))
    assert sorted(found) == sorted(expected) == sorted(saved.parameters)
    for key, tensor in expected.items():
        assert found[key].shape == tuple(tensor.shape) == saved.parameters[key].shape, key
        assert np.array_equal(found[key], tensor.numpy()), key
    again = as_saved(saved, config)
    assert again.entries.keys() == saved.entries.keys(), "names of files would change again"
    back = as_modules(saved, manifest, config)
    assert sorted(back.entries) == sorted(manifest.entries)
    for key, array in tensors_of(back, numbers):
        assert np.array_equal(array, state[key].numpy()), key


@pytest.mark.parametrize("name", FIRST)
def test_files_are_those_of_save_pretrained(name: str) -> None:
    assert name in CLASSES
    check(name, last=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CLASSES)
def test_files_of_every_model(name: str) -> None:
    check(name, last=12)


# -- the table


def not_older() -> None:
    needs("transformers")
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(_table()["transformers"]):
        pytest.skip(f"the table is that of a newer transformers: {_table()['transformers']}")


def test_rules_are_those_of_transformers() -> None:
    """If this fails: python -m tests.saved_names > zckpt/naming/saving/table.json"""
    not_older()
    assert _table()["rules"] == saved_names.shared(saved_names.rules())


@pytest.mark.exhaustive
def test_the_table_is_that_of_transformers() -> None:
    not_older()
    installed = json.loads(saved_names.text(saved_names.table()))
    assert {**_table(), "transformers": installed["transformers"]} == installed


# -- which rules are for a model


def weights(**shapes: tuple[int, ...]) -> Manifest:
    """A manifest of weights; two underlines in a name stand for a dot."""
    state = {
        name.replace("__", "."): torch.zeros(shape, dtype=torch.int32)
        for name, shape in shapes.items()
    }
    return manifest_of(state)[0]


def names_under(config: dict[str, Any], **shapes: tuple[int, ...]) -> list[str]:
    return list(as_saved(weights(**shapes), config).parameters)


def test_an_inner_model_that_the_configuration_chooses() -> None:
    """LLaVA with the text model of another family: its own rules are for the names below it."""
    shape = (4, 6, 5)
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    name = "model__language_model__layers__0__mlp__experts__gate_up_proj"
    front = "language_model.model.layers.0.mlp.experts"
    assert names_under(config, **{name: shape}) == [f"{front}.gate_up_proj"]
    mixture = {**config, "text_config": {"model_type": "qwen3_moe"}}
    assert len(names_under(mixture, **{name: shape})) == 8
    assert f"{front}.3.up_proj.weight" in names_under(mixture, **{name: shape})
    tower = "model__vision_tower__layers__0__attention__q_proj__weight"
    vit = {**config, "vision_config": {"model_type": "vit"}}
    assert names_under(config, **{tower: (2, 2)}) == [
        "vision_tower.layers.0.attention.q_proj.weight"
    ]
    assert names_under(vit, **{tower: (2, 2)}) == [
        "vision_tower.encoder.layer.0.attention.attention.query.weight"
    ]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None, "model_type": "llama"},
        {"architectures": ["OfThisProgramAlone"], "model_type": "of_this_program"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": "no list", "model_type": 3},
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "text_config": 7},
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": ["mixtral"]},
        },
    ],
)
def test_models_without_rules_keep_their_names(config: dict[str, Any]) -> None:
    manifest = weights(model__norm__weight=(3,), model__layers__0__weight=(2, 3))
    assert as_saved(manifest, config) is manifest


def test_a_configuration_without_a_class() -> None:
    """The rules of its type are for the whole model."""
    name = "model__layers__0__mlp__experts__down_proj"
    assert names_under({"model_type": "mixtral"}, **{name: (2, 4, 3)}) == [
        f"model.layers.0.block_sparse_moe.experts.{n}.w2.weight" for n in range(2)
    ]


def test_states_of_a_parameter_go_with_it() -> None:
    """Those of another shape keep their names: no rule says what they are of an expert."""
    manifest = weights(model__layers__0__mlp__experts__down_proj=(2, 4, 3))
    name = "model.layers.0.mlp.experts.down_proj"
    entry = manifest.entries[name, "param"]
    more = [
        Entry(name, "exp_avg", "F32", entry.shape, entry.fragments),
        Entry(name, "row", "F32", (2, 4), solid(8, Extent("file", 0, 32))),
    ]
    entries = {**manifest.entries, **{each.key: each for each in more}}
    config = {"model_type": "mixtral"}
    found = as_saved(
        Manifest("root", "gathered", Run(), entries, manifest.parameters), config
    ).entries
    front = "model.layers.0.block_sparse_moe.experts"
    assert sorted(found) == [
        *((f"{front}.{n}.w2.weight", slot) for n in range(2) for slot in ("exp_avg", "param")),
        (name, "row"),
    ]


def test_tensors_that_do_not_fit() -> None:
    config = {"model_type": "mixtral"}
    front = "model__layers__0__mlp__experts"
    with pytest.raises(UnsupportedCheckpoint, match="but that is not possible"):
        as_saved(weights(**{f"{front}__down_proj": ()}), config)
    both = {f"{front}__down_proj": (2, 4, 3), f"{front}__0__w2__weight": (4, 3)}
    with pytest.raises(InconsistentCheckpoint, match="two tensors would become"):
        as_saved(weights(**both), config)
    heads = {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "vision_config": {"num_attention_heads": 5},
    }
    tower = "model__vision_model__layers__0__self_attn"
    parts = {f"{tower}__{each}_proj__weight": (12, 3) for each in "qkv"}
    with pytest.raises(UnsupportedCheckpoint, match="but that is not possible"):
        as_saved(weights(**parts), heads)


def test_weights_that_are_no_longer_whole() -> None:
    """One tensor is made of two: of other types, or each the mean of several ranks."""
    config = {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "vision_config": {"num_attention_heads": 1},
    }
    front = "model__vision_model__layers__0__self_attn"
    manifest = weights(**{f"{front}__{each}_proj__bias": (2,) for each in "qkv"})
    assert list(as_saved(manifest, config).parameters) == [
        "vision_model.transformer.resblocks.0.attn.in_proj_bias"
    ]

    def changed(**values: Any) -> Manifest:
        first, *others = manifest.entries.values()
        entries = [replace(first, **values), *others]
        return replace(manifest, entries={entry.key: entry for entry in entries})

    with pytest.raises(UnsupportedCheckpoint, match="have several types"):
        as_saved(changed(dtype="F32"), config)
    with pytest.raises(WrongOption, match="--replicas mean does not work here: "):
        as_saved(changed(mean=(*manifest.entries.values(),)[:1]), config)


def test_a_size_that_no_one_states() -> None:
    config = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text"}
    name = "model__ngram_embedding__weight"
    assert len(names_under(config, **{name: (1024, 3)})) == 512
    assert len(names_under({**config, "split_ngram_parts": 4}, **{name: (1024, 3)})) == 4
    for wrong in (0, -2, "4", True, [4]):
        with pytest.raises(MissingData, match="has no number split_ngram_parts"):
            names_under({**config, "split_ngram_parts": wrong}, **{name: (1024, 3)})
    assert len(names_under({**config, "split_ngram_parts": 10**12}, **{name: (6, 3)})) == 6


def test_manifests_of_both_kinds() -> None:
    """`verify` compares a module's tensors with those of files, whichever is named first."""
    manifest = weights(model__layers__0__mlp__experts__down_proj=(2, 4, 3))
    saved = as_saved(manifest, {"model_type": "mixtral"})
    assert spelled_as(manifest, saved) is manifest  # no config.json says that they are alike
    assert as_modules(saved, manifest, {"model_type": "mixtral"}).parameters == manifest.parameters
