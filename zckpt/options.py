"""What a user asks of a writer; every format takes what it knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OPTIMIZERS = ("torch", "deepspeed-fused-adam", "deepspeed-cpu-adam", "apex-fused-adam")


@dataclass(frozen=True, slots=True)
class Options:
    """`dtype` is safetensors' name of what the module's weights become, made of the masters.

    `dp`, `stage` and `optimizer` are the source's where they are None; `config` is a ds_config that
    replaces the source's; `group_defaults` are hyper-parameters that the source does not hold.
    """

    weights_only: bool = False
    dtype: str | None = None
    max_file_size: int = 8 << 30
    dp: int | None = None
    stage: int | None = None
    config: dict[str, Any] | None = None
    optimizer: str | None = None
    group_defaults: dict[str, Any] = field(default_factory=dict)
