"""What `save_pretrained` of the installed transformers makes of names and tensors, as a table.

python -m tests.saved_names > zckpt/naming/saving/table.json
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from zckpt.naming.saving.rules import claimed

MADE_BY = (
    "python -m tests.saved_names, from the names and rules of transformers (Apache-2.0), reversed"
)
AUTO = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoBackbone": "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}
"""The Auto classes that models choose inner models by, and the lists of their classes."""


# -- rules


def rules() -> dict[str, list[dict[str, Any]]]:
    """By the name of a class or of a model's type, in the order in which saving applies them."""
    import transformers.conversion_mapping as mapping
    from transformers.core_model_loading import LayerPairCollapse, PrefixChange

    mapping.get_checkpoint_conversion_mapping("")
    known = mapping._checkpoint_conversion_mapping_cache
    result = {}
    for key in sorted(known):
        if key == "legacy":  # never applied on save
            continue
        # a prefix changes on save only if it did on load; layers are not split again
        own = [t for t in known[key] if not isinstance(t, (PrefixChange, LayerPairCollapse))]
        listed = [rule(transform.reverse_transform()) for transform in own[::-1]]
        result[key] = [item for item in listed if item]
    return result


def rule(transform: Any) -> dict[str, Any] | None:
    """One transform, reversed; None if it changes nothing."""
    from transformers.core_model_loading import (
        GroupWeightRename,
        Inkling2IndexOffsetWeightRename,
        WeightConverter,
    )

    sources, targets = transform.source_patterns, transform.target_patterns
    item: dict[str, Any] = {"from": [pattern(each) for each in sources], "to": targets}
    if isinstance(transform, WeightConverter):
        steps = [step for op in transform.operations if (step := operation(op, sources))]
        if not steps and sources == targets:
            return None
        item["do"] = steps
        if len(targets) > 1 and not any(step[0] in ("cut", "unmix", "queries") for step in steps):
            item["to"] = targets[:1]  # what was made of several files on load is saved as one
    elif not isinstance(transform, GroupWeightRename):
        item["to"] = targets[:1]
    if isinstance(transform, Inkling2IndexOffsetWeightRename):
        item["add"] = transform.offset
    return item


def pattern(source: str) -> str:
    """The regular expression of a source, as WeightTransform compiles it."""
    regex = source.replace("*.", r".*\.")
    return regex + r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", regex) else regex


def operation(op: Any, sources: list[str]) -> list[Any] | None:
    """What saving does with tensors; None for an operation that leaves them as they are."""
    name = type(op).__name__
    if name == "Chunk":
        return ["cut", op.dim, *([op.num_shards_attribute] if op.num_shards_attribute else [])]
    if name == "Concatenate":
        return ["join", op.dim]
    if name == "SplitModulelist":
        return ["unstack", op.dim]
    if name == "Transpose":  # with `check_dims`, saved tensors already have the right shape
        return None if op.check_dims else ["swap", op.dim0, op.dim1]
    if name == "ErnieSplitAndDecoupleTextVisionExperts":
        return ["unmix", op.concat_dim, op.stack_dim]
    if name == "Inkling2LoopDequantizeExperts":
        return None
    if getattr(op, "inverse", False):
        if name == "Interleave":
            return ["deal", op.dim]
        if name == "PermuteForRope":
            names = op.permute_layer_names
            places = [
                n for n, each in enumerate(sources) if not names or any(x in each for x in names)
            ]
            return ["rope", places, op.subconfig_key]
        if name == "Inkling2UnpadVocab":
            return ["pad"]
        if name == "Inkling2LoopMergeMessageQueries":
            return ["queries"]
    raise NotImplementedError(f"{name} on save")


# -- models


def classes() -> dict[str, Any]:
    """All models of transformers by name."""
    import transformers
    from transformers import PreTrainedModel

    found = {}
    for name in dir(transformers):
        try:
            cls = getattr(transformers, name)
        except Exception:  # of a package that is not installed
            continue
        is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
        if is_model and not name.endswith("PreTrainedModel") and cls.config_class is not None:
            found[name] = cls
    return found


def empty(cls: Any, config: Any) -> Any:
    """A model without memory."""
    import torch

    with torch.device("meta"):
        return cls(config)


def paths(config: Any) -> dict[int, str]:
    """Where the configurations inside of a configuration lie, by id."""
    from transformers import PreTrainedConfig

    found = {id(config): ""}

    def walk(inner: Any, path: str) -> None:
        for key, value in vars(inner).items():
            if isinstance(value, PreTrainedConfig) and id(value) not in found:
                found[id(value)] = f"{path}.{key}" if path else key
                walk(value, found[id(value)])

    walk(config, "")
    return found


def modules(model: Any) -> Iterator[list[Any]]:
    """The models inside of a model: path, class, type, path of its configuration, Auto class."""
    from transformers import PreTrainedModel

    known = paths(model.config)
    where: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        above = next((where[p] for p in parents(path) if p in where), "")
        own = known.get(id(module.config), above)  # some modules have a copy of the one above
        where[path] = own
        name = type(module).__name__
        yield [path, name, module.config.model_type, own, auto(module) if own != above else None]


def parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def auto(module: Any) -> str | None:
    """The Auto class that chooses a module's class by its configuration."""
    from transformers.models.auto import modeling_auto

    for name, mapping in AUTO.items():
        if getattr(modeling_auto, mapping).get(module.config.model_type) == type(module).__name__:
            return name
    return None


# -- configurations


def _values(**values: Any) -> Callable[[Any], None]:
    """Sets attributes; `text_config__head_dim` is one of an inner configuration."""

    def change(config: Any) -> None:
        for key, value in values.items():
            *inner, last = key.split("__")
            target = config
            for name in inner:
                target = getattr(target, name)
            setattr(target, last, value)

    return change


def _resnet(config: Any) -> None:
    """A backbone that needs no further package."""
    from transformers import ResNetConfig

    config.backbone_config = ResNetConfig(out_indices=[1, 2, 3, 4])
    config.use_timm_backbone, config.backbone = False, None


def _heads(config: Any) -> None:
    """The layers of the head of Sapiens2."""
    head = config.head_config
    head.upsample_out_channels, head.upsample_kernel_sizes = [16, 16, 16, 16], [4, 4, 4, 4]
    head.conv_out_channels, head.conv_kernel_sizes = [16, 16, 16], [1, 1, 1]
    head.scale_conv_out_channels, head.scale_conv_kernel_sizes = [16, 16, 16], [1, 1, 1]
    head.scale_final_input_size, head.scale_final_hidden_sizes = 16, [16, 8]


CHANGES: dict[str, Callable[[Any], None]] = {
    "aya_vision": _values(vision_config__num_attention_heads=12),
    "beit": _values(out_indices=[0, 1, 2, 3]),
    "conditional_detr": _resnet,
    "deepseek_ocr2": lambda config: _of_layers(config.text_config),
    "deformable_detr": _resnet,
    "detr": _resnet,
    "dots1": _values(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "emu3": _values(vocabulary_map={"<image>": 1, "<|extra_200|>": 2}),
    "esm": _values(vocab_size=33, pad_token_id=1),
    "hunyuan_v1_moe": _values(head_dim=64, num_experts=4),
    "hunyuan_vl": _values(text_config__head_dim=64),
    "lfm2_moe": _values(
        layer_types=["conv", "full_attention"], num_hidden_layers=2, num_dense_layers=1
    ),
    "qwen3_omni_moe": _values(
        talker_config__text_config__shared_expert_intermediate_size=64,
        talker_config__spatial_merge_size=2,
    ),
    "qwen4_exp_text": lambda config: _indexed(config),
    "qwen4_exp": lambda config: _indexed(config.text_config),
    "sapiens2": _heads,
    "t5gemma2_encoder": _values(text_config__dropout_rate=0.0),
}
"""What to change in a default configuration, by the type of the model."""


def _indexed(config: Any) -> None:
    config.indexer_budget, config.indexer_compress_ratio = 64, 4
    config.indexer_n_heads, config.indexer_kv_heads, config.indexer_head_dim = 4, 1, 32


def _of_layers(config: Any) -> None:
    config.mlp_layer_types = ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)


def built(cls: Any) -> Any:
    """A model of that class without memory, of its default configuration as far as it has one."""
    config = cls.config_class()
    if change := CHANGES.get(config.model_type):
        change(config)
    code = sys.modules[cls.__module__]
    if hasattr(code, "requires_backends"):  # losses need scipy, and no weight does
        vars(code)["requires_backends"] = lambda *_: None
    return empty(cls, config)


# -- the table


def table() -> dict[str, Any]:
    """Everything that zckpt's table has."""
    import transformers

    known = rules()
    models = {name: of_class(name, cls, known) for name, cls in classes().items()}
    alike: dict[str, dict[str, Any]] = {}
    for name, about in models.items():
        if about:
            alike.setdefault(json.dumps(about), {"classes": [], **about})["classes"].append(name)
    listed = {name for name, about in models.items() if about}
    return {
        "made_by": MADE_BY,
        "transformers": transformers.__version__,
        "rules": shared(known),
        "models": list(alike.values()),
        "classes": auto_classes(listed, known),
    }


def shared(known: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The rules, with the first name of equal ones in the place of others."""
    first: dict[str, str] = {}
    result: dict[str, Any] = {}
    for key, listed in known.items():
        name = first.setdefault(json.dumps(listed), key)
        result[key] = listed if name == key else name
    return result


def of_class(name: str, cls: Any, known: dict[str, Any]) -> dict[str, Any] | None:
    """What the table says of a class; None if no rule can be for it or for a model inside of it."""
    try:
        model = built(cls)
    except Exception as error:
        if is_known(cls, known):
            print(f"{name}: {error!r}"[:200], file=sys.stderr)
        return None
    if not model.state_dict():  # only other classes are models
        return None
    root, *others = modules(model)
    inner = [(path, cls_name, kind) for path, cls_name, kind, *_ in (root, *others)]
    used = {path for path, key in claimed(inner, known) if known[key]}
    others = [item for item in others if item[4] or item[0] in used]
    if not used and not others:
        return None
    about: dict[str, Any] = {"type": root[2], "prefix": model.base_model_prefix, "modules": others}
    inside = {key for item in (root, *others) for key in (item[1], item[2]) if key in known}
    steps = [step for key in sorted(inside) for rule in known[key] for step in rule.get("do", ())]
    for key, where in filter(None, (size_of(model.config, step) for step in steps)):
        assert about.setdefault("sizes", {}).setdefault(key, where) == where, (name, key)
    if marks := marks_of(model):
        about["saved"] = marks
    return about


def is_known(cls: Any, known: dict[str, Any]) -> bool:
    return cls.__name__ in known or getattr(cls.config_class, "model_type", "") in known


def size_of(config: Any, step: list[Any]) -> tuple[str, list[Any]] | None:
    """A number of the configuration that an operation needs: its path there, and its default."""
    if step[0] == "rope":
        where, key = step[2] or "", "num_attention_heads"
        where = where if where and hasattr(config, where) else ""
    elif step[0] == "pad" or (step[0] == "cut" and len(step) > 2):
        where = paths(config).get(id(config.get_text_config()), "")
        key = "vocab_size" if step[0] == "pad" else step[2]
    else:
        return None
    inner = getattr(config, where) if where else config
    value = getattr(inner, key, 1 if step[0] == "rope" else None)
    return key, [*filter(None, where.split(".")), inner.attribute_map.get(key, key), value]


def marks_of(model: Any) -> list[str]:
    """Parts of names that saved names have and modules' names do not have.

    None if saved names would stay as they are on another save. Parts are one or two neighbors
    between dots.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = list(model.state_dict())
    saved = list(revert_weight_conversion(model, dict(model.state_dict())))
    if not renames_again(model, saved):
        return []
    others = {part for name in own for part in parts_of(name)}
    lacking = {name for name in saved if name not in set(own)}
    marks: list[str] = []
    while lacking:
        counts = Counter(
            part for name in sorted(lacking) for part in parts_of(name) if part not in others
        )
        if not counts:
            break
        mark, count = max(
            counts.items(), key=lambda item: (item[1], "." in item[0], -len(item[0]), item[0])
        )
        marks.append(mark)
        lacking = {name for name in lacking if mark not in parts_of(name)}
        if count < len(saved) // 20:
            break
    return marks


def parts_of(name: str) -> set[str]:
    words = name.split(".")
    parts = {*words, *map(".".join, pairwise(words))}
    return {part for part in parts if not any(word.isdecimal() for word in part.split("."))}


def renames_again(model: Any, saved: list[str]) -> bool:
    """Whether another save would change names that were saved."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model, add_legacy=False)
    own = [each for each in known if not isinstance(each, loading.PrefixChange)]
    reverse = [each.reverse_transform() for each in own[::-1]]
    renames = [each for each in reverse if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, loading.WeightConverter)]
    return any(
        loading.apply_converters(name, converters)[1] is not None
        or loading.apply_renamings(name, renames) != name
        for name in saved
    )


def auto_classes(models: set[str], known: dict[str, Any]) -> dict[str, dict[str, str]]:
    """By Auto class, the class of every type that matters if it is inside of another model."""
    from transformers.models.auto import modeling_auto

    return {
        name: {
            kind: chosen
            for kind, chosen in getattr(modeling_auto, mapping).items()
            if isinstance(chosen, str) and (chosen in known or chosen in models)
        }
        for name, mapping in AUTO.items()
    }


def text(document: dict[str, Any]) -> str:
    """The table as JSON, with a line for each rule and each model."""
    first = ("made_by", "transformers")
    lines = [f" {json.dumps(key)}: {json.dumps(document[key])}" for key in first]
    rules = []
    for key, value in document["rules"].items():
        items = value
        if isinstance(value, list) and value:
            items = "[\n   " + ",\n   ".join(json.dumps(item) for item in value) + "]"
        rules.append(
            f"  {json.dumps(key)}: " + (items if items is not value else json.dumps(value))
        )
    models = [f"  {json.dumps(item)}" for item in document["models"]]
    classes = [f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in document["classes"].items()]
    lines.append(' "rules": {\n' + ",\n".join(rules) + "}")
    lines.append(' "models": [\n' + ",\n".join(models) + "]")
    lines.append(' "classes": {\n' + ",\n".join(classes) + "}")
    return "{" + ",\n".join(lines)[1:] + "}\n"


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    document = table()
    sys.stdout.write(text(document))


if __name__ == "__main__":
    main()
