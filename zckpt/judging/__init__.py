"""Judges a checkpoint: whether it is complete, of one save, intact, and loads here.

Every command asks this folder.

    inventory.py   lists the files, the purpose of each, and its state
    file_state.py  whether one file is empty, zeros, cut or unreadable
    verdict.py     whether it is complete and of one save; damage that resuming does not need
    contents.py    whether it is intact, before tensors are used: masters, replicas, copied files
    damaged_source.py  reads a checkpoint with missing or unreadable files
    about.py       what other programs state beside it: the model, the loss, the epoch
    loads.py       whether a program loads it here: its size, its engine, its model and groups

The files that a program needs are rows of `training/needs.py`.
"""
