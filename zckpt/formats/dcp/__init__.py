"""Directories of torch.distributed.checkpoint, as FSDP1, FSDP2 and plain torch save them.

    files.py      which folders make the checkpoint
    rest.py       the file beside items with all that is no state dict
    read.py       the state dicts in them, and their manifest
    items.py      the same by key: an item is read when a program asks for it
    hf.py         Hugging Face's storage of the same: safetensors without an index
    write.py      a directory that any number of ranks loads
    options.py    what a user may ask of such a directory
    functions.py  what zckpt does with them
    gather.py     how torch's planner joins boxes: the rule behind verify --gather

Facts in this package are of torch 2.13.0 unless said otherwise.
"""

from ..format import Format
from .files import ROLES, counter, detect, detect_weak, steps, updates
from .options import OPTIONS

FORMAT = Format(
    name="dcp",
    about="torch.distributed.checkpoint of FSDP1, FSDP2, plain torch",
    family="torch",
    detect=detect,
    tags=steps,
    counter=counter,
    updates=updates,
    detect_weak=detect_weak,
    options=OPTIONS,
    numbers=True,
    keeps_steps=True,
    roles=ROLES,
    objects=frozenset(),
)
