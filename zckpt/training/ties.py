"""Which names of a model are one weight, where its file has only one of them.

`save_pretrained` writes a tied weight once, and the program that resumes asks for both names. The
tie is taken from config.json beside the file, with the names that each class of transformers ties
(ties.json, made of transformers 5.23), or from `--tie NAME=NAME`. Without either it is not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from ..core.manifest import Manifest
from ..errors import WrongOption, listed

CONFIG = "config.json"
PEFT = "base_model.model."
EMBEDDING = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|embeddings"
    r"|tokens_embed)\.weight"
)
HEAD = re.compile(
    r"(?:.*\.)?(?:\w*head\w*|embed_out|output|\w*proj_out|output_projection|score)\..*"
)


def stated(config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Second names of tied weights and the names of their owners, as config.json states them.

    Only ties of which the file has the owner alone.
    """
    here = set(names)
    pairs = of_config(config or {}).items()
    return {alias: owner for alias, owner in pairs if alias not in here and owner in here}


def of_config(config: Mapping[str, Any]) -> dict[str, str]:
    """All names that a configuration ties, and the names that it ties them to."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return {}
    pairs, default = _of_class(str(classes[0]))
    if config.get("tie_word_embeddings", default):
        return pairs
    # T5 shares its input embeddings, whether or not its head is tied to them
    return {
        alias: owner
        for alias, owner in pairs.items()
        if owner.endswith("shared.weight") and alias.endswith("embed_tokens.weight")
    }


def _of_class(name: str) -> tuple[dict[str, str], bool]:
    """The names that a class of transformers ties, and whether it does so by default."""
    table = json.loads(files(__package__).joinpath("ties.json").read_text("utf-8"))
    for line in table["ties"]:
        if name in line["classes"]:
            return line["names"], line["default"]
    return {}, False


def with_ties(manifest: Manifest, pairs: Iterable[tuple[str, str]]) -> Manifest:
    """The manifest with further names of its parameters: pairs of a second name and the owner's.

    Raises WrongOption where the owner is unknown, or the second name is a weight of its own.
    """
    parameters = dict(manifest.parameters)
    module = list(manifest.state.get("module") or ())
    for alias, owner in pairs:
        parameter = parameters.get(owner)
        if parameter is None:
            raise WrongOption(
                f"--tie {alias}={owner}: the source has no weight {owner}",
                hint=f"its weights are {listed(list(parameters), 5)}",
            )
        if alias in parameters or alias in manifest.buffers:
            raise WrongOption(
                f"--tie {alias}={owner}: the source has a weight {alias} of its own",
                hint="leave --tie out: both names are written",
            )
        if alias not in parameter.aliases:
            parameters[owner] = replace(parameter, aliases=(*parameter.aliases, alias))
            module += [alias] if module else []
    state = {**manifest.state, "module": module} if module else manifest.state
    return replace(manifest, parameters=parameters, state=state)


def likely(manifest: Manifest) -> tuple[str, str] | None:
    """A tie that the source may have lost: an embedding, but no head. Names alone say no more."""
    aliases = {alias for held in manifest.parameters.values() for alias in held.aliases}
    names = [*manifest.parameters, *aliases, *manifest.buffers]
    inside = [name for name in manifest.parameters if EMBEDDING.fullmatch(name)]
    if len(inside) != 1 or any(HEAD.fullmatch(name) for name in names):
        return None
    (owner,) = inside
    # a model without a head has no prefix in front of its layers, but wrappers put theirs
    front = PEFT if owner.startswith(PEFT) else ""
    if not owner.removeprefix(front).startswith(("model.", "transformer.")):
        return None
    return f"{front}lm_head.weight", owner
