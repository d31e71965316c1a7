"""Files of torch.save: whole, or one per rank.

    files.py          which files make the checkpoint
    read.py           the state dicts in them, and their manifest
    distributed.py    ShardedTensor and DTensor in the file of one rank
    ranked.py         the same, merged over all ranks
    items.py          ranks' items as torch_checkpointing names them, and slices in safetensors
    local.py          the state that each rank saved of its own part
    zro.py            which parameters ZeroRedundancyOptimizer gives to which rank
    write.py          whole files that plain torch and trainers load
    write_ranks.py    files that each of N ranks loads alone, as verl saves FSDP2
    options.py        what a user may ask of these files
    functions.py      what zckpt does with them
    gather.py         how torch joins ranks' parts: the rule behind verify --gather

Facts in this package are of torch 2.13.0 unless said otherwise.
"""

from ..format import Format
from .files import detect, detect_weak
from .options import OPTIONS

FORMAT = Format(
    name="gathered",
    about="files of torch.save, whole or one per rank: FSDP, ZeroRedundancyOptimizer, plain torch",
    family="torch",
    detect=detect,
    detect_weak=detect_weak,
    options=OPTIONS,
    numbers=True,
    keeps_steps=True,
    fits_any_dp=True,
    of_ranks=("rank",),
    objects=frozenset(),
)
