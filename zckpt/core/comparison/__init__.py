"""Compares tensors: those of two checkpoints, or those of one checkpoint that must agree.

compare.py        finds the elements that differ; difference.py measures by how much
statistics.py     statistics of the numbers in one tensor
masters.py        checks that the masters of a checkpoint round to its weights
replicas.py       checks that replicas on several ranks are equal, and that slices are not
duplicates.py     finds files that are copies of other files
"""
