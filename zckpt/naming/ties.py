"""Finds the second names of tied weights, if a file has only one of the names.

`save_pretrained` writes a tied weight once, but the program that resumes asks for both names. zckpt
takes ties from config.json beside the file and from ties.json, the names that each class of
transformers ties (generated from transformers 5.23), or from `--tie NAME=NAME`. It never guesses a
tie.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pkgutil import get_data
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..errors import WrongOption, listed
from . import peft

CONFIG = "config.json"
EMBEDDING = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|embeddings"
    r"|tokens_embed)\.weight"
)
HEAD = re.compile(
    r"(?:.*\.)?(?:\w*head\w*|embed_out|output|\w*proj_out|output_projection|score)\..*"
)


def stated_ties(config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Finds tied names that a file lacks: {missing name: name under which the file has the weight}.

    `config` is the content of config.json, and `names` are the names in the file.
    """
    stored = set(names)
    pairs = of_config(config or {}).items()
    return {alias: owner for alias, owner in pairs if alias not in stored and owner in stored}


def of_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Maps each second name of a tied weight to its first name, by the content of config.json.

    For example, {"lm_head.weight": "model.embed_tokens.weight"}.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return {}
    pairs, default = _of_class(str(classes[0]))
    if config.get("tie_word_embeddings", default):
        return pairs
    # T5 shares its input embeddings even if its head is not tied to them
    return {
        alias: owner
        for alias, owner in pairs.items()
        if owner.endswith("shared.weight") and alias.endswith("embed_tokens.weight")
    }


def _of_class(name: str) -> tuple[dict[str, str], bool]:
    """The ties of a class of transformers, and whether the class ties these names by default.

    The ties map second names to first names. They are empty for an unknown class.
    """
    table = json.loads(get_data(__package__, "ties.json") or b"")
    for line in table["ties"]:
        if name in line["classes"]:
            return line["names"], line["default"]
    return {}, False


def with_ties(manifest: Manifest, pairs: Iterable[tuple[str, str]]) -> Manifest:
    """Adds second names to tied weights; `pairs` are (second name, name in the source).

    Raises WrongOption if the source lacks the weight, or if the second name is a separate weight.
    """
    parameters = dict(manifest.parameters)
    module = list(manifest.state.get("module") or ())
    for alias, owner in pairs:
        parameter = parameters.get(owner)
        if parameter is None:
            raise WrongOption(
                "option-names-nothing",
                f"--tie {alias}={owner}: the source has no weight {owner}",
                hint=f"the source's weights are {listed(list(parameters), 5)}",
            )
        other = next((name for name, each in parameters.items() if alias in each.aliases), owner)
        if other != owner:
            raise WrongOption(
                "option-not-applicable",
                f"--tie {alias}={owner}: in the source, {alias} is a second name of {other}",
                hint="leave out --tie: both names are written",
            )
        if alias in parameters or alias in manifest.buffers:
            raise WrongOption(
                "option-not-applicable",
                f"--tie {alias}={owner}: the source has a separate weight {alias}",
                hint="leave out --tie: both names are written",
            )
        if alias not in parameter.aliases:
            parameters[owner] = replace(parameter, aliases=(*parameter.aliases, alias))
            module += [alias] if module else []
    state = {**manifest.state, "module": module} if module else manifest.state
    return replace(manifest, parameters=parameters, state=state)


def of_root(pairs: Iterable[tuple[str, str]], root: str) -> list[tuple[str, str]]:
    """Selects the ties of one of several models, and removes its prefix `root` from both names."""
    front = f"{root}."
    return [
        (alias.removeprefix(front), owner.removeprefix(front))
        for alias, owner in pairs
        if owner.startswith(front)
    ]


def likely(manifest: Manifest) -> list[tuple[str, str]]:
    """Lists ties that the source may lack, as pairs (second name, first name).

    The user is told of them; zckpt does not add them. There is at most one pair for each model in
    the source.
    """
    fronts = [f"{root}." for root in manifest.roots] if len(manifest.roots) > 1 else [""]
    pairs = ((front, _likely_of_model(manifest, front)) for front in fronts)
    return [(front + pair[0], front + pair[1]) for front, pair in pairs if pair is not None]


def _likely_of_model(manifest: Manifest, before: str) -> tuple[str, str] | None:
    """Guesses the tie that a model's files may lack: (output layer's weight, embedding).

    `before` is the prefix of the model's names; the result lacks it. None if the model has an
    output layer, or if the names do not show both names of the tie.
    """
    parameters, other_names = (
        [name.removeprefix(before) for name in names if name.startswith(before)]
        for names in (manifest.parameters, (*manifest.owners, *manifest.buffers))
    )
    names = [*parameters, *other_names]
    embeddings = [name for name in parameters if EMBEDDING.fullmatch(name)]
    if len(embeddings) != 1 or any(HEAD.fullmatch(name) for name in names):
        return None
    (owner,) = embeddings
    # a model without a head has no prefix before its layers, except those of wrappers
    front = peft.PREFIX if owner.startswith(peft.PREFIX) else ""
    if not owner.removeprefix(front).startswith(("model.", "transformer.")):
        return None
    return f"{front}lm_head.weight", owner
