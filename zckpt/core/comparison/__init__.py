"""Are the tensors of two checkpoints equal, or those of one that must be?

compare.py        finds what differs; difference.py: by how much
statistics.py     what one tensor's numbers are like
masters.py        do the masters of one checkpoint round to its weights?
replicas.py       are copies that ranks hold equal, and slices really slices?
duplicates.py     whether one file is a copy of another one
"""
