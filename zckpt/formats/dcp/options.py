"""The options of a torch.distributed.checkpoint directory as a target."""

from __future__ import annotations

from typing import TypedDict

from msgspec.structs import replace

from ...training.options import (
    ALLOW_OBJECT,
    DIALECT,
    DP,
    DTYPE,
    GROUP_DEFAULTS,
    GROUPS_FROM,
    MAX_FILE_SIZE,
    OPTIMIZER,
    SET_GROUP,
    WEIGHTS_ONLY,
    Option,
)

LAYOUT: Option[str | None] = Option(
    "dcp_layout",
    None,
    "The layout of the optimizer's keys",
    choices=("nested", "flat"),
    usual="the source's, or nested",
    rare=True,
)
OPTIONS = (
    DP,
    WEIGHTS_ONLY,
    DTYPE,
    OPTIMIZER,
    LAYOUT,
    replace(DIALECT, choices=("accelerate", "torchtitan")),
    GROUPS_FROM,
    SET_GROUP,
    GROUP_DEFAULTS,
    MAX_FILE_SIZE,
    ALLOW_OBJECT,
)


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    dcp_layout: str | None
