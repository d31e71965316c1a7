"""The options of a folder for `from_pretrained`."""

from __future__ import annotations

from typing import TypedDict

from msgspec.structs import replace

from ...training.options import DTYPE, MAX_FILE_SIZE, WEIGHTS_ONLY, Option

MODEL_CONFIG: Option[str | None] = Option(
    "model_config",
    None,
    "A config.json (PEFT: adapter_config.json), or a folder with it and the tokenizer, if SRC has "
    "none",
    metavar="FILE|DIR",
    flag="--config",
)
OPTIONS = (
    WEIGHTS_ONLY,
    DTYPE,
    MODEL_CONFIG,
    replace(
        MAX_FILE_SIZE,
        help="Split the weights into files of at most this size",
        rare=False,
    ),
)
REASONS = {"dp": "a folder for from_pretrained has no ranks"}


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    model_config: str | None
