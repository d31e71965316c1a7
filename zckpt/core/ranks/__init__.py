"""From the checkpoints of single ranks to one, and back.

merge.py        joins the manifests of ranks that share a model
split.py        says which rank of a target gets which part
partition.py    how an engine cuts tensors, in the words of gather.py files
"""
