"""A run without ZeRO (stage 0): the model file has the whole optimizer, without names.

optimizer.py   the optimizer in the model file; a model rank's manifest; a target's optimizer
numbers.py     what it knows by each number: state, master, shape
naming.py      which names its numbers have
stages.py      the optimizers of a pipeline's stages
samples.py     reads the bytes that show names
"""
