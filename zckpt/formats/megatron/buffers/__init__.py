"""Flat buffers of the distributed optimizer: their parameters, and the places of these.

flats.py    dp_reshardable, dp_zero_gather_scatter, fully_sharded_model_space: full tensors
stages.py   the parameters of a buffer
placing.py  the first element of each parameter, by the bytes of its weight
order.py    the order of a GPTModel's parameters
"""
