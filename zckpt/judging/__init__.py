"""Judges a checkpoint: whether it is complete, of one save, intact, and loads here.

All commands use this package for these questions.

    inventory.py   lists the files, the purpose of each, and its state
    file_state.py  whether one file is empty, only zeros, cut short or unreadable
    verdict.py     whether it is complete and of one save; damage that does not affect resuming
    contents.py    whether it is intact, before tensors are used: masters, replicas, copied files
    damaged_source.py  reads a checkpoint with missing or unreadable files
    about.py       what a trainer's files beside it state: the model, the loss, the epoch
    loads.py       whether a program loads it: number of ranks, engine, model, optimizer groups

The table in `training/needs.py` lists the files that each program needs to resume.
"""
