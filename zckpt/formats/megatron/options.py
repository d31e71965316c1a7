"""Which options do Megatron-Core's checkpoints understand?"""

from ...training.options import (
    ALLOW_OBJECT,
    DP,
    DTYPE,
    EP,
    GROUP_DEFAULTS,
    LIKE,
    MAX_FILE_SIZE,
    PP,
    TP,
    VOCAB_SIZE,
    WEIGHTS_ONLY,
)

OPTIONS = (
    *(WEIGHTS_ONLY, DTYPE, GROUP_DEFAULTS, MAX_FILE_SIZE, ALLOW_OBJECT),
    *(DP, TP, PP, EP, VOCAB_SIZE, LIKE),
)
