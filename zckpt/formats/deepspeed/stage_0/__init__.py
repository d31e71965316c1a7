"""A run without ZeRO (stage 0): the model file has the full optimizer, without names.

optimizer.py   reads and writes the optimizer in the model file; a model rank's manifest
numbers.py     the optimizer's state, master and shape for each number
naming.py      the parameter names of these numbers
stages.py      the optimizers of a pipeline's stages
samples.py     reads the bytes that identify weights
"""
