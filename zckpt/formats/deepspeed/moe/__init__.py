"""A model with experts (`deepspeed.moe.layer.MoE`), which are spread over data-parallel ranks.

layers.py          over how many ranks each layer is spread
experts.py         the experts of a model, and which ranks share them
group_order.py     the groups of all ranks in one order
expert_places.py   which ranks have which experts, where no ds_config says it
expert_files.py    the files of experts
expert_shells.py   the same of a target
whole_experts.py   the optimizers of all ep ranks in stage 0; whole_names.py names their parameters
gather_experts.py  what the engine gathers of these
auto_ep.py         which experts the stacked parameters of AutoEP have
named_layers.py    the layers that names show, if the source does not state them
stages.py          stages of a pipeline as one model
regroup.py         a source for another expert-parallel size
"""
