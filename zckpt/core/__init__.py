"""Elements and bytes: what a checkpoint is, how it is read and compared. No engine, no container.

    storage/       files, places in them, and checksums of their bytes
    checkpoint/    what a checkpoint is: tensors, parameters, groups, states
    ranks/         from the checkpoints of single ranks to one, and back
    passes/        how all tensors are gone through once
    comparison/    are tensors equal?
    grouping.py    what belongs together, by a key, its size or its place
    version.py     the version of zckpt

A folder imports from those above it alone, and `grouping.py` from none. Start with
checkpoint/manifest.py and storage/fragments.py.
"""
