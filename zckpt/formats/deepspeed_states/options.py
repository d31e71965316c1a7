"""Which options of a conversion do DeepSpeed's formats alone understand?"""

from __future__ import annotations

from typing import Any, TypedDict

from ...training.options import ALLOW_OBJECT, DP, DTYPE, GROUP_DEFAULTS, WEIGHTS_ONLY, Option

STAGE: Option[int | None] = Option(
    "stage",
    "--stage",
    None,
    "The ZeRO stage",
    choices=(0, 1, 2, 3),
    usual="the source's",
    reason="ZeRO stages are DeepSpeed's",
)
OPTIMIZER: Option[str | None] = Option(
    "optimizer",
    "--optimizer",
    None,
    "Store the step where this Adam looks for it: torch, deepspeed-fused-adam, deepspeed-cpu-adam "
    "or apex-fused-adam",
    # the keys of training.steps.WRITTEN, whose import would make `--help` slower; a test compares
    choices=("torch", "deepspeed-fused-adam", "deepspeed-cpu-adam", "apex-fused-adam"),
    usual="as in the source",
    metavar="CLASS",
    group="Optimizer and steps",
    rare=True,
)
CONFIG: Option[dict[str, Any] | None] = Option(
    "config",
    "--ds-config",
    None,
    "The ds_config that the target will run with",
    kind="json",
    usual="the source's",
    metavar="FILE",
    rare=True,
)

OPTIONS = (DP, STAGE, WEIGHTS_ONLY, DTYPE, OPTIMIZER, CONFIG, GROUP_DEFAULTS, ALLOW_OBJECT)
"""What the writers of both of DeepSpeed's formats understand."""


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    stage: int | None
    optimizer: str | None
    config: dict[str, Any] | None
