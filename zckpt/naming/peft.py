"""Converts names of PEFT adapters' weights between the module and saved files.

    in the module       base_model.model.layers.0.q_proj.lora_A.default.weight
    saved               base_model.model.layers.0.q_proj.lora_A.weight

`default` is the name of the adapter. PEFT omits it in `adapter_model.safetensors`, and accelerate
omits it in the model's folder of FSDP2. Optimizers, DeepSpeed and zckpt's manifests use the
module's names. So zckpt adds the adapter's name when it reads such files, and removes it when it
writes them (PEFT 0.21).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

ADAPTER = "default"
PREFIX = "base_model.model."
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG = "adapter_config.json"
TOKENS = "TRAINABLE_TOKENS"
RANKS = f".ranknum.{ADAPTER}"
"""Suffix of tensors that AdaLoRA keeps beside its weights and does not save."""
SAVED_WHOLE = f".modules_to_save.{ADAPTER}."
"""Part of the names of a copy that PEFT trains fully, for example of a new head."""
ORIGINAL = ".original_module."
"""Part of the names of a module's untrained original, if PEFT trains a copy (`modules_to_save`)."""
# modules and parameters that have one tensor or module per adapter
TUNERS = re.compile(
    r"(?P<tuner>base_model\..*\.(?:lora_(?:A|B|E|embedding_A|embedding_B|magnitude_vector)|ia3_l"
    r"|hada_[wt][12](?:_[ab])?|lokr_[wt][12](?:_[ab])?|oft_[Rr]|boft_[Rs]|vera_lambda_[bd]"
    r"|trainable_tokens_delta|fourierft_spectrum|hra_u|miss_block|c3a_kernel))"
    r"(?P<rest>\.[^.]+)?"
)

# the layer that an adapter belongs to; the layer's original weights are called `base_layer`
ADAPTED = re.compile(
    r"(?P<layer>base_model\..*?)\.(?:lora_|ia3_l|hada_|lokr_|oft_|boft_|vera_lambda|fourierft_"
    r"|hra_|miss_|c3a_)"
)

EMBEDDING = re.compile(r"(?P<layer>base_model\..*)\.lora_embedding_[AB]\.")

SAVED_BASE = re.compile(r"base_model\..*\.(?P<layer>embed_tokens|lm_head)\.base_layer\.weight")

LORA = re.compile(
    r"base_model\..*\.lora_(?:(?:[AB]|magnitude_vector)\.(?=[^.]+\.weight$)|embedding_[AB]\.)"
    r"(?P<adapter>[^.]+)(?:\.weight)?"
)


def saved_name(name: str) -> str:
    """The name of a module's parameter in PEFT's files: without the adapter's name `default`.

    Names of other parameters stay unchanged.
    """
    if SAVED_WHOLE in name:
        return name.replace(SAVED_WHOLE, ".")
    if name.endswith(f".{ADAPTER}"):
        return name.removesuffix(f".{ADAPTER}")
    front, _, last = name.rpartition(".")
    if not front.endswith(f".{ADAPTER}"):
        return name
    front = front.removesuffix(f".{ADAPTER}")
    # DoRA's vector was a parameter before it became a module; its saved name is still the old one
    return front if front.endswith(".lora_magnitude_vector") else f"{front}.{last}"


def bare_name(name: str) -> str:
    """The name of an adapter's parameter in memory, in a program with its own adapter modules.

    An example is NeMo AutoModel 0.7. The name has no PEFT prefix and no adapter name. DoRA's vector
    is called `lora_magnitude` in memory, but `lora_magnitude_vector` in the program's files.
    """
    bare = saved_name(name).removeprefix(PREFIX)
    is_vector = bare.endswith(".lora_magnitude_vector")
    return bare.removesuffix("_vector") if is_vector else bare


def is_adapters(name: str) -> bool:
    """Whether a parameter of the module belongs to an adapter."""
    return saved_name(name) != name


def other_adapters(names: Iterable[str]) -> list[str]:
    """The names of LoRA adapters other than `default`."""
    adapters = {match["adapter"] for name in names if (match := LORA.fullmatch(name))}
    return sorted(adapters - {ADAPTER})


def missing_bases(names: Collection[str]) -> list[str]:
    """The base weights that are missing in `names` although an adapter of an embedding needs them.

    PEFT saves the embedding's own weight together with an adapter of this embedding.
    """
    layers = {match["layer"] for name in names if (match := EMBEDDING.match(name))}
    return sorted({f"{layer}.base_layer.weight" for layer in layers} - set(names))


def is_saved_base(name: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT saves this tensor of the base model together with the adapter (0.21).

    PEFT saves biases that were trained with the adapter, and the weight of an embedding with an
    adapter, because rows for new tokens are in no other file (`save_embedding_layers`).
    """
    if "bias" in name:
        of_layer = name.endswith(".base_layer.bias")
        return config.get("bias") == "all" or (config.get("bias") == "lora_only" and of_layer)
    match = SAVED_BASE.fullmatch(name)
    by_tokens = config.get("trainable_token_indices") or config.get("peft_type") == TOKENS
    targets = () if by_tokens else config.get("target_modules") or ()
    return match is not None and match["layer"] in targets


def is_adapter_alone(names: Collection[str]) -> bool:
    """Whether a checkpoint with these tensors contains an adapter without its base model.

    `names` include second names of tied weights, and buffers. A file of the adapter alone may have
    the base weight of an embedding. Only a full model has base weights of all layers.
    """
    adapted = {match["layer"] for name in names if (match := ADAPTED.match(name))}
    based = {name.partition(".base_layer.")[0] for name in names if ".base_layer." in name}
    return any(map(is_adapters, names)) and not (based and adapted <= based)


def module_names(
    saved: Collection[str],
    names_in_module: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Maps names in PEFT's files to the module's names; names that are equal in both are left out.

    `names_in_module` are names that the optimizer's state contains, which are the module's.
    `config` is the content of adapter_config.json.
    """
    of_module = {saved_name(name): name for name in names_in_module if is_adapters(name)}
    whole = (config or {}).get("modules_to_save") or ()
    names = {name: of_module.get(name) or _module_name(name, whole) for name in saved}
    return {name: full for name, full in names.items() if full != name}


def _module_name(saved: str, whole: Sequence[str]) -> str:
    match = TUNERS.fullmatch(saved)
    if match and not is_adapters(saved):
        rest = match["rest"] or ""
        if match["tuner"].endswith(".lora_magnitude_vector"):
            rest = ".weight"
        return f"{match['tuner']}.{ADAPTER}{rest}"
    if SAVED_WHOLE in saved or ORIGINAL in saved:
        return saved
    parts = saved.split(".")
    for module in whole:  # `norm` means `input_layernorm` too (PEFT 0.21, `_set_trainable`)
        for count in range(len(parts) - 1, 0, -1):
            if (layer := ".".join(parts[:count])).endswith(module):
                return f"{layer}{SAVED_WHOLE}{'.'.join(parts[count:])}"
    return saved
