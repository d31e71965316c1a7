"""An engine of DeepSpeed loads files that are in no filesystem: they are made in its memory.

    support.py    which engines load what zckpt hands to them?
    load.py       what all ranks do, and how an error ends the load in all of them
    filled.py     a file of the target that is in no filesystem: torch.load reads it
    agreeing.py   have all ranks together read what the source's checksums state?
    temporary.py  the directory in which the engine finds the names of its files
    hook.py       the engine's own loader takes a directory of names

The target is laid out as `reshard` does: shells, read back by the format's own reader, and joined
with the source. `reshard` then writes all files. Here a rank fills those that its engine asks for,
in the memory of the tensors that torch.load makes.
"""
