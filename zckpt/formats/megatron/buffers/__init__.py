"""Flat buffers of the distributed optimizer: which parameters each has, and where.

flats.py    dp_reshardable, dp_zero_gather_scatter, fully_sharded_model_space: whole tensors
stages.py   which parameters a buffer has
placing.py  where in it they begin, by the bytes of their weights
order.py    the order of a GPTModel's parameters
"""
