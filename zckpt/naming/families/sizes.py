"""Collects the numbers of heads and the vocabulary size of a model that `--family` converts.

They come from `--family llama:heads=32,kv_heads=8`, from config.json beside the source, and from
Megatron's arguments in its checkpoint. If several of these state a size, it must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ...core.checkpoint.manifest import Manifest, Sibling
from ...core.storage import sources
from ...errors import InconsistentCheckpoint, WrongOption
from ...training.megatron_arguments import arguments
from ...training.trainers import files_to_load_by, json_of
from ..ties import CONFIG
from .rules import NAMES, SUFFIX, Family

KEYS = ("heads", "kv_heads", "vocab_size")


class Sizes(Struct, frozen=True):
    """The sizes that are needed to fuse and split tensors; None for a size that is not stated.

    `vocab_size` is the number of rows in the target's vocabulary.
    """

    heads: int | None = None
    kv_heads: int | None = None
    vocab_size: int | None = None


def parsed(text: str) -> tuple[str, dict[str, int]]:
    """Parses `--family`: the name or file of the family, and its sizes; raises WrongOption."""
    name, _, rest = text.partition(":")
    if name not in NAMES and not name.endswith(SUFFIX):
        raise WrongOption(
            "option-invalid",
            f"--family {name} is none of {', '.join(NAMES)}",
            hint="for other models, give a .json file of rules (docs/megatron.md), or rename "
            "parameters with --rename REGEX=REPL",
        )
    sizes: dict[str, int] = {}
    for pair in rest.split(",") if rest else ():
        key, _, value = pair.partition("=")
        is_number = value.isascii() and value.isdecimal() and 0 < len(value) < 12
        if key not in KEYS or key in sizes or not is_number or not int(value):
            raise WrongOption(
                "option-invalid",
                f"--family {text}: {pair!r} is not a size",
                hint=f"write {name}:heads=32,kv_heads=8 or {name}:vocab_size=32000",
            )
        sizes[key] = int(value)
    return name, sizes


def sizes_of(
    manifest: Manifest,
    family: Family,
    given: Mapping[str, int],
    to_hugging_face: bool,
    path: str | None,
) -> Sizes:
    """Collects the model's sizes from `--family` (`given`), a config.json and Megatron's arguments.

    Raises InconsistentCheckpoint if two places differ. `path` is the path of a config.json, or of
    its folder, if the user gives one. Otherwise config.json beside the source is used.
    """
    siblings = files_to_load_by(manifest.files.siblings)
    if path is not None:
        file = os.path.join(path, CONFIG) if sources.is_folder(path) else path
        # the writer needs the file, and reports an error if it is missing
        siblings = [Sibling(CONFIG, file, sources.size(file))] if sources.is_file(file) else []
    config = json_of(siblings, CONFIG)
    stated_sizes: dict[str, tuple[str, int]] = {
        key: ("--family", value) for key, value in given.items()
    }
    places = [("config.json", _of_config(config or {}, family, to_hugging_face))]
    places.append(("Megatron's arguments", _of_arguments(manifest, to_hugging_face)))
    for place, sizes in places:
        for key, value in sizes.items():
            first, stated_value = stated_sizes.setdefault(key, (place, value))
            if stated_value != value and not (key == "vocab_size" and first == "--family"):
                raise InconsistentCheckpoint(
                    "options-conflict",
                    f"{first} says {key}={stated_value}, {place} says {key}={value}",
                    hint="give --family the sizes of the source's model, or no sizes"
                    if first == "--family"
                    else "give the config.json of the source's model: --config config.json",
                )
    return Sizes(**{key: value for key, (_, value) in stated_sizes.items()})


def _of_config(config: Mapping[str, Any], family: Family, to_hugging_face: bool) -> dict[str, int]:
    """The sizes in a config.json of transformers.

    Raises WrongOption if the file is about a model of another family.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind not in family.types:
        raise WrongOption(
            "family-does-not-fit",
            f"config.json is of a model {kind[:80]!r}, and this --family is for "
            f"{', '.join(family.types)}",
            hint="choose another --family: models with the same names may compute something else",
        )
    sizes = _numbers(
        heads=config.get("num_attention_heads", config.get("n_head")),
        kv_heads=config.get("num_key_value_heads"),
        vocab_size=config.get("vocab_size") if to_hugging_face else None,
    )
    if "heads" in sizes and "num_key_value_heads" not in config:
        sizes["kv_heads"] = sizes["heads"]
    return sizes


def _of_arguments(manifest: Manifest, to_hugging_face: bool) -> dict[str, int]:
    """The sizes in Megatron's saved arguments; empty if the checkpoint has no arguments."""
    state = manifest.state
    common_state = (state.get("megatron") or {}).get("common")
    for holder in (common_state, state.get("client_state"), state):
        values = arguments(holder if isinstance(holder, dict) else None)
        if "num_attention_heads" in values:
            break
    else:
        used = ((state.get("megatron") or {}).get("vocabulary") or {}).get("used")
        return _numbers(vocab_size=used) if to_hugging_face else {}
    heads = values["num_attention_heads"]
    # Megatron's num_query_groups counts only with group_query_attention
    is_grouped = values.get("group_query_attention", values.get("num_query_groups") is not None)
    return _numbers(
        heads=heads,
        kv_heads=values.get("num_query_groups") if is_grouped else heads,
        vocab_size=values.get("vocab_size") if to_hugging_face else None,
    )


def _numbers(**values: Any) -> dict[str, int]:
    return {key: value for key, value in values.items() if type(value) is int and value > 0}
