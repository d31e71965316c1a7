"""Merges the manifests of ranks into one checkpoint, and splits one checkpoint over ranks.

merge.py        joins the manifests of ranks that share a model
split.py        says which rank of a target gets which part
partition.py    how an engine partitions tensors, as records that each format's gather.py makes
"""
