"""A run with several model ranks: stages of a pipeline, and tensor ranks with slices of tensors.

pipeline.py         stages and files of layers become one model; which files are of a tied layer
tensor_ranks.py     slices become boxes of whole tensors; whether the ranks' copies are equal
target_slices.py    how a target's tensor ranks cut the whole model
stage_bounds.py     at which layers stages of a target begin
target_stages.py    which stage of a target has what, and which of them share a tied layer
"""
