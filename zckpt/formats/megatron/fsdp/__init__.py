"""Megatron-FSDP's directories (`fsdp_dtensor`), which torch.distributed.checkpoint saves.

directories.py  a directory, from its items to one model
items.py        the items: their keys by what they are, their values and tensors
"""
