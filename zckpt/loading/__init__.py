"""A DeepSpeed engine loads a checkpoint of another size; its files are made in memory, not on disk.

support.py    which engines can load a checkpoint that zckpt makes in memory?
load.py       what all ranks do, and how an error ends the load in all of them
filled.py     a file of the target that torch.load reads, though no disk has its tensors
agreeing.py   have all ranks together read what the source's checksums state?
temporary.py  the directory in which the engine finds the names of its files
hook.py       `engine.load_checkpoint` accepts such a directory of names

The target is laid out as `reshard` does: files with holes where tensors go (shells) are read back
by the format's own reader and joined with the source. `reshard` then writes all files. Here a rank
makes only those that its engine asks for, in the memory of the tensors that torch.load creates.
"""
