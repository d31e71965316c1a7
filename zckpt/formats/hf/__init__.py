"""Folders for `from_pretrained` of transformers and PEFT: weights, and the files that load them.

    files.py    the names of the weights' files
    read.py     the weights of a folder that was laid out
    write.py    the folder for `zckpt export`

They are written only: a user reads such a folder as `gathered`, weights alone.
"""

from __future__ import annotations

from typing import TypedDict

from ...core.values import replace
from ...training.options import DTYPE, MAX_FILE_SIZE, WEIGHTS_ONLY, Option
from ..format import Format

MODEL_CONFIG: Option[str | None] = Option(
    "model_config",
    "--config",
    None,
    "A config.json (PEFT: adapter_config.json), or a folder with it and the tokenizer, if SRC has "
    "none",
    metavar="FILE|DIR",
)


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    model_config: str | None


FORMAT = Format(
    name="hf",
    folder="hf",
    about="weights for from_pretrained of transformers and PEFT; read as gathered",
    family="hf",
    options=(
        WEIGHTS_ONLY,
        DTYPE,
        MODEL_CONFIG,
        replace(
            MAX_FILE_SIZE,
            flag="--max-shard-size",
            help="Split the weights into files of at most this size",
            rare=False,
        ),
    ),
    reasons={"dp": "a folder for from_pretrained has no ranks"},
    reads=False,
    is_resumed=False,
)
