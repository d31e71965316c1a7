"""A run without ZeRO (stage 0): the model file has the whole optimizer, without names.

optimizer.py   the optimizer in the model file, and which names its numbers have
naming.py      how they get these names
stages.py      the optimizers of a pipeline's stages
samples.py     reads the bytes that show them
states.py      what the optimizer keeps, as flat buffers; a model rank's manifest; a target's
"""
