"""What a checkpoint says beside its tensors: steps, optimizers, groups, names, trainers, options.

A module here may name classes of optimizers and programs that train, but reads no engine's files.
"""
