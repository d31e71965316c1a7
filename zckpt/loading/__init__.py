"""Loads a checkpoint into a DeepSpeed engine with another number of ranks, without files on disk.

    support.py    which engines can load a checkpoint that zckpt makes in memory?
    load.py       the steps of a load in all ranks; an error in one rank ends the load in all
    filled.py     a file object for torch.load, whose tensors are read from the source checkpoint
    agreeing.py   combines the checksums of all ranks and compares them with those of the source
    temporary.py  the directory with the engine's files without tensor data
    hook.py       lets `engine.load_checkpoint` accept a directory of empty files of `auto_resume`

As in `reshard`, zckpt first writes the target's files without tensor data (shells: headers, and
holes where tensors go). The format's own reader reads them to learn where each tensor belongs.
`reshard` then fills all files on disk. Here a rank fills only the files that its engine asks for,
directly in the memory that torch.load allocates.
"""
