"""Flat buffers of Megatron-Core's distributed optimizer: where each parameter's elements lie.

flats.py    joins flat buffers (three of Megatron-Core's layouts) into full tensors
stages.py   finds which parameters a buffer contains
placing.py  finds the first element of each parameter, by comparing masters with weights
order.py    the order of a GPTModel's parameters
"""
