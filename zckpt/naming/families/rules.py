"""Rules that say which tensors of Hugging Face correspond to which tensors of Megatron-Core.

Each family of models is a JSON file: llama.json, qwen3.json, mixtral.json and gpt2.json here, or a
user's own. Its rules are in the order of `named_parameters()` of transformers 5.23. Names of
Megatron-Core are those of its local spec (GPTModel 0.16.1).

A program may have two names for the same tensor. The rule with the second name is marked by `only`:
such names are read but never written. They are the names of norms in the spec for Transformer
Engine, and of experts in files on the Hub.
"""

import re
from pkgutil import get_data

from msgspec import Struct
from msgspec.json import decode

from ...core.storage import sources
from ...errors import MALFORMED, WrongOption, cause

HUGGING_FACE, MEGATRON = "Hugging Face", "Megatron"
OTHER = {HUGGING_FACE: MEGATRON, MEGATRON: HUGGING_FACE}
NAMES = ("llama", "qwen3", "mixtral", "gpt2")
SUFFIX = ".json"
PACKINGS = (
    "same",
    "vocabulary",
    "rows",
    "attention",
    "whole attention",
    "turned",
    "turned whole attention",
    "experts",
)
"""How tensors of Hugging Face become tensors of Megatron-Core, and back: see layouts.py."""
MAX_FILE = 1 << 20  # bytes
NUMBERS = re.compile(r"\{(.*?)\}")


class FamilyRule(Struct, frozen=True, forbid_unknown_fields=True):
    """The names of the same tensors in Hugging Face and in Megatron-Core.

    In names, `{layer}` and `{expert}` stand for numbers. `packing` says how one program's tensors
    become the other's (see layouts.py). With `only` ("Hugging Face" or "Megatron"), the rule is for
    checkpoints of this program only.
    """

    hugging_face: tuple[str, ...]
    megatron: tuple[str, ...]
    packing: str = "same"
    only: str | None = None

    def __post_init__(self) -> None:
        names = [*self.hugging_face, *self.megatron]
        places = {place for name in names for place in NUMBERS.findall(name)}
        if not self.hugging_face or not self.megatron or not places <= {"layer", "expert"}:
            raise ValueError(
                "only {layer} and {expert} may be in braces, and hugging_face and megatron need "
                f"names: {', '.join(names)}"
            )
        if self.packing not in PACKINGS:
            raise ValueError(f"there is no packing {self.packing!r}: choose {', '.join(PACKINGS)}")
        if self.only not in (None, *OTHER):
            raise ValueError(f"the value {self.only!r} of `only` is none of {', '.join(OTHER)}")

    def names(self, side: str) -> tuple[str, ...]:
        return self.hugging_face if side == HUGGING_FACE else self.megatron


class Family(Struct, frozen=True):
    """The rules for a family of models, such as llama.

    `types` are values of `model_type` in config.json. `buffers` are patterns of names of buffers
    that are left out.
    """

    rules: tuple[FamilyRule, ...]
    types: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any("{layer}" in rule.hugging_face[0] for rule in self.rules):
            raise ValueError("at least one rule needs {layer} in the first name of hugging_face")
        for pattern in self.buffers:
            re.compile(pattern)


def family_of(name: str) -> Family:
    """The family of models called `name`: a known one, or the one in the user's file `name`.

    Raises WrongOption for a file that is missing or invalid, and OSError if it cannot be read.
    """
    if name in NAMES:
        return decode(get_data(__package__, name + SUFFIX) or b"", type=Family)
    hint = "docs/megatron.md shows such a file"
    if not sources.is_file(name):
        raise WrongOption(
            "option-names-nothing", f"--family {name}: there is no such file", hint=hint
        )
    try:
        with sources.opened(name) as file:
            return decode(file.read(MAX_FILE).decode("utf-8-sig"), type=Family)
    except (*MALFORMED, re.error) as error:
        raise WrongOption(
            "option-invalid", f"--family {name} is not a family: {cause(error)}", hint=hint
        ) from error
