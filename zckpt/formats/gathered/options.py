"""Which options do files of torch.save understand?"""

from ...core.values import replace
from ...training.options import (
    ALLOW_OBJECT,
    DIALECT,
    DTYPE,
    GROUP_DEFAULTS,
    OPTIMIZER,
    WEIGHTS_ONLY,
)

OPTIONS = (
    WEIGHTS_ONLY,
    DTYPE,
    OPTIMIZER,
    replace(DIALECT, choices=("safetensors", "accelerate")),
    GROUP_DEFAULTS,
    ALLOW_OBJECT,
)
REASONS = {"dp": "whole files load on any number of ranks"}
