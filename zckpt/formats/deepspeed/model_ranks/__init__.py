"""A run with several model ranks: stages of a pipeline, and tensor ranks with slices of tensors.

grid.py             which model ranks there are, and their places in the grid
pipeline.py         stages and files of layers become one model
tensor_ranks.py     slices of tensor ranks become boxes of whole tensors
universal_info.py   which dimension was cut, as the checkpoint says it (naming/tensor_rules.py)
copies.py           whether their copies of a tensor are equal
apart.py            all model ranks in one manifest, without joining them
target_ranks.py     which model ranks a target has, and what each one has of the source
write_tensor_ranks.py  how a target's tensor ranks cut the whole model
recut.py            a pipeline at other bounds of its stages
stage_bounds.py     which bounds: --pp-bounds, --pp-partition
"""
