"""A run with several model ranks: stages of a pipeline, and tensor ranks with slices of tensors.

grid.py             which model ranks there are, and their places in the grid
pipeline.py         stages and files of layers become one model
tensor_ranks.py     slices of tensor ranks become boxes of whole tensors
universal_info.py   which dimension was cut, as the checkpoint says it (naming/tensor_rules.py)
together.py         what model ranks have in common
copies.py           whether their copies of a tensor are equal
apart.py            all model ranks in one manifest, without joining them
gather_grid.py      what model ranks have together, by the engine's own rule: verify --gather
slices_by_engine.py where slices belong, by that rule
write_grid.py       those of several model ranks for another data-parallel size
write_tensor_ranks.py  for another number of tensor ranks
arguments.py        what Megatron's programs save of the grid
stated_slices.py    parameters of a stage whose model file lists none
rank_shells.py      the files of all model ranks of a target
auto_tp.py          shares of AutoTP, which deals whole key-value heads
write_pipeline.py   a pipeline of any sizes, from the whole model
recut.py            a pipeline at other bounds of its stages
stage_bounds.py     which bounds: --pp-bounds, --pp-partition
"""
