"""A model with experts (`deepspeed.moe.layer.MoE`), which are spread over data-parallel ranks.

experts.py   the files of experts, and those of a target; which ranks share which experts
auto_ep.py   which experts the stacked parameters of AutoEP have
regroup.py   a source for another expert-parallel size
"""
