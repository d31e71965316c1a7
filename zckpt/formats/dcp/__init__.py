"""Directories of torch.distributed.checkpoint, as FSDP1, FSDP2 and plain torch save them.

    files.py      finds the folders of one checkpoint
    rest.py       meta.pt, Lightning's file of everything outside the state dicts
    read.py       reads the state dicts and builds their manifest
    items.py      reads single keys, on demand
    hf.py         Hugging Face's storage: safetensors files per rank, without an index
    write.py      writes a directory that any number of ranks can load
    options.py    the options of this format as a target
    functions.py  the table of this format's functions
    gather.py     how torch's planner joins shards: the rule behind verify --gather

An item is what is saved under a key: a whole tensor, one shard of it, or another value. Facts in
this package are of torch 2.13.0 unless said otherwise.
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
