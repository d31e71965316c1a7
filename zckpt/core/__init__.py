"""Elements and bytes: what a checkpoint is, how it is read and compared. No engine, no container.

    storage/       files, the places of bytes in them, and checksums of these bytes
    checkpoint/    what a checkpoint is: tensors, parameters, groups, states
    ranks/         merges the manifests of ranks into one, and splits one into those of ranks
    passes/        reads all tensors of a checkpoint once
    comparison/    compares the elements of tensors
    grouping.py    groups items by a key, by their sizes or by their position
    version.py     the version of zckpt

A folder imports only from the folders above it. `grouping.py` imports from none of them. Start with
checkpoint/manifest.py and storage/fragments.py.
"""
