"""Files of torch.save: complete, or one per rank.

    files.py          finds the checkpoint's files
    read.py           reads the state dicts and builds their manifest
    sharded_tensors.py  ShardedTensor and DTensor in the file of one rank
    rank_trees.py     merges the state dicts of all ranks
    averages.py       averages that ranks saved as plain slices, beside the model's DTensors
    items.py          files that torch_checkpointing names by rank, and slices in safetensors
    zero_redundancy.py  local states of ZeroRedundancyOptimizer's ranks
    write.py          complete files that plain torch and trainers load
    write_ranks.py    files for each of N ranks, as verl saves FSDP2
    functions.py      the table of this format's functions
    gather.py         how torch joins the ranks' shards: the rule behind verify --gather

Facts in this package are of torch 2.13.0 unless said otherwise.
"""

from msgspec.structs import replace

from ...training.options import (
    ALLOW_OBJECT,
    DIALECT,
    DP,
    DTYPE,
    GROUP_DEFAULTS,
    GROUPS_FROM,
    OPTIMIZER,
    SET_GROUP,
    WEIGHTS_ONLY,
)
from ..format import Format
from .files import ROLES, counter, detect, detect_weak, updates

FORMAT = Format(
    name="gathered",
    about="files of torch.save, full or one per rank: FSDP, ZeroRedundancyOptimizer, plain torch",
    family="torch",
    detect=detect,
    counter=counter,
    updates=updates,
    detect_weak=detect_weak,
    options=(
        DP,
        WEIGHTS_ONLY,
        DTYPE,
        OPTIMIZER,
        replace(DIALECT, choices=("safetensors", "accelerate")),
        GROUPS_FROM,
        SET_GROUP,
        GROUP_DEFAULTS,
        ALLOW_OBJECT,
    ),
    numbers=True,
    is_plain=True,
    keeps_steps=True,
    fits_any_dp=True,
    roles=ROLES,
    loads_by_place=True,
    objects=frozenset(),
)
