"""Which options do files of torch.save understand?"""

from msgspec.structs import replace

from ...training.options import (
    ALLOW_OBJECT,
    DIALECT,
    DP,
    DTYPE,
    GROUP_DEFAULTS,
    OPTIMIZER,
    WEIGHTS_ONLY,
)

OPTIONS = (
    DP,
    WEIGHTS_ONLY,
    DTYPE,
    OPTIMIZER,
    replace(DIALECT, choices=("safetensors", "accelerate")),
    GROUP_DEFAULTS,
    ALLOW_OBJECT,
)
