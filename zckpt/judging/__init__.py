"""Is a checkpoint whole, of one save, intact, and does it load here? Every command asks here.

    inventory.py   which files there are, what each is for, and in which state it is
    file_state.py  whether one file is empty, zeros, cut or unreadable
    verdict.py     is it whole, and of one save? What is damaged without need?
    contents.py    is it intact, before a tensor leaves: masters, copies of ranks, copied files
    damaged_source.py  reads a checkpoint of which files are missing, or cannot be read
    about.py       what other programs say beside it: the model, the loss, the epoch
    loads.py       does a program load it here: its size, its engine, its model and groups?

Which file a program needs is a row of `training/needs.py`.
"""
