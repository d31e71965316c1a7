"""A model with experts (`deepspeed.moe.layer.MoE`), spread over data-parallel ranks.

experts.py   the files of experts, read and written; the ranks that share experts
auto_ep.py   the experts in the stacked parameters of AutoEP
regroup.py   converts a source to another expert-parallel size
"""
