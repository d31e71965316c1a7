"""The options of a conversion that only DeepSpeed's formats understand."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, TypedDict

from msgspec.structs import replace

from ...errors import WrongOption
from ...training.options import (
    ALLOW_OBJECT,
    BUFFERS,
    DIALECT,
    DP,
    DTYPE,
    EP,
    FROZEN,
    GROUP_DEFAULTS,
    GROUPS_FROM,
    LIKE,
    OPTIMIZER,
    PP,
    SET_GROUP,
    SIZES,
    SP,
    TP,
    VOCAB_SIZE,
    WEIGHTS_ONLY,
    Option,
)


def _check_bounds(bounds: Sequence[int]) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or any(map(operator.ge, bounds, bounds[1:])):
        raise WrongOption(
            "option-invalid",
            f"--pp-bounds {','.join(map(str, bounds))} must begin with 0 and then increase",
            hint="give the first layer of each stage, then the number of all layers: 0,12,24",
        )


def _check_partition(method: str) -> None:
    if not re.fullmatch(r"uniform(:\d+)?|parameters|type:.+", method):
        raise WrongOption(
            "option-invalid",
            f"--pp-partition {method!r} is none of uniform, uniform:LAYERS, parameters, type:REGEX",
            hint="give the partition_method of the PipelineModule, or --pp-bounds",
        )


STAGE: Option[int | None] = Option(
    "stage",
    None,
    "The ZeRO stage",
    choices=(0, 1, 2, 3),
    group=SIZES,
    reason="ZeRO stages are DeepSpeed's",
)
PP_BOUNDS: Option[Sequence[int] | None] = Option(
    "pp_bounds",
    None,
    "The first layer of each pipeline stage, then the number of all layers, with functions: "
    "0,12,24",
    kind="integers",
    metavar="N,...",
    check=_check_bounds,
    group=SIZES,
    rare=True,
    reason="the whole model is written",
)
PP_PARTITION: Option[str | None] = Option(
    "pp_partition",
    None,
    "How DeepSpeed chooses the first layer of each stage: uniform, uniform:LAYERS (the number of "
    "all layers, with functions), parameters, or type:REGEX",
    metavar="METHOD",
    check=_check_partition,
    group=SIZES,
    rare=True,
    reason="the whole model is written",
)
CONFIG: Option[dict[str, Any] | None] = Option(
    "config",
    None,
    "The ds_config of the new run",
    kind="json",
    usual="the source's",
    metavar="FILE",
    group="Engine",
    flag="--ds-config",
)
OPTIONS = (
    DP, STAGE, WEIGHTS_ONLY, DTYPE, OPTIMIZER, CONFIG, GROUPS_FROM, SET_GROUP, GROUP_DEFAULTS,
    ALLOW_OBJECT, FROZEN, BUFFERS,
)  # fmt: skip
"""Options that the writers of both DeepSpeed formats understand."""
OLDER_NAMES, LATER_NAMES = "deepspeed-0.18", "deepspeed-0.19"
"""Values of `--dialect`: how files are named if several ranks share a sequence.

Up to DeepSpeed 0.19.5, names contain the rank's index among the ranks that share a sequence.
"""
NAMES = replace(DIALECT, choices=(LATER_NAMES, OLDER_NAMES), usual=LATER_NAMES)
OF_RANKS = (TP, PP, EP, SP, PP_BOUNDS, PP_PARTITION, VOCAB_SIZE, LIKE, NAMES)
"""Options that only the writer of ranks' files understands."""


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    stage: int | None
    pp_bounds: Sequence[int] | None
    pp_partition: str | None
    sp: int | None
    config: dict[str, Any] | None
