"""Merges the manifests of ranks into one checkpoint, and splits one checkpoint over ranks.

merge.py        joins the manifests of ranks that share a model
split.py        says which rank of a target gets which part
partition.py    records for each format's gather.py: how its engine partitions tensors
"""
