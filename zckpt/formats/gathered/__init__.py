"""Files of torch.save: whole, or one per rank.

    files.py          which files make the checkpoint
    read.py           the state dicts in them, and their manifest
    distributed.py    ShardedTensor and DTensor in the file of one rank
    ranked.py         the same, merged over all ranks
    local.py          the state that each rank saved of its own part
    zro.py            which parameters ZeroRedundancyOptimizer gives to which rank
    write.py          whole files that plain torch and trainers load
    gather.py         how torch joins ranks' parts: the rule behind verify --gather

Facts in this package are of torch 2.13.0 unless said otherwise.
"""

from ...core.values import replace
from ...training.options import ALLOW_OBJECT, DIALECT, DTYPE, GROUP_DEFAULTS, WEIGHTS_ONLY
from ..format import Format

FORMAT = Format(
    name="gathered",
    folder="gathered",
    about="files of torch.save, whole or one per rank: FSDP, ZeroRedundancyOptimizer, plain torch",
    family="torch",
    options=(
        WEIGHTS_ONLY,
        DTYPE,
        replace(DIALECT, choices=("safetensors", "accelerate")),
        GROUP_DEFAULTS,
        ALLOW_OBJECT,
    ),
    reasons={"dp": "whole files load on any number of ranks"},
    weak=True,
    numbers=True,
    gathers=True,
    keeps_steps=True,
    groups="with_trainers_groups",
    objects=frozenset(),
)
