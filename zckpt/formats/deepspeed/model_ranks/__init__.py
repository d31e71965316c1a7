"""A run with several model ranks: stages of a pipeline, and tensor ranks with slices of tensors.

pipeline.py         joins stages and layer files into one model; finds the files of tied layers
tensor_ranks.py     finds each slice's place in the full tensor; compares the ranks' replicas
target_slices.py    cuts the full model for a target's tensor ranks
stage_bounds.py     the first layer of each stage of a target
target_stages.py    the parameters of each stage of a target; stages that share a tied layer
"""
