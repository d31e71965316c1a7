"""A run with several model ranks: stages of a pipeline, and tensor ranks with slices of tensors.

grid.py             which model ranks there are, and their places in the grid
layer_names.py      which layer of a pipeline has a tensor
pipeline.py         stages and files of layers become one model
tensor_ranks.py     slices of tensor ranks become boxes of whole tensors
universal_info.py   which dimension was cut, as the checkpoint says it (naming/tensor_rules.py)
copies.py           whether their copies of a tensor are equal
rank_manifests.py   one manifest for each model rank; and all of them in one, without joining them
target_ranks.py     which model ranks a target has, and what each one has of the source
target_slices.py    how a target's tensor ranks cut the whole model
stage_bounds.py     at which layers stages of a target begin
target_stages.py    which stage of a target has what
"""
