"""Elements and bytes: what a checkpoint is, and how it is read and compared.

Nothing here knows a training engine, or a type of files such as those of torch.save or safetensors.

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
