"""Passes over all tensors of a checkpoint: plans, parts, threads and memory.

plan.py           joins two manifests: which bytes of a source are which bytes of a target
layout.py         the files of a target before any tensor is copied
pieces.py         reads elements from files into a buffer
streaming.py      one pass over tensors, with the threads and memory of resources.py
full_checks.py    comparisons of complete tensors that a conversion makes while it copies
pooling.py        divides the tasks of a pass among several processes
pace.py           reports the progress of a pass, a line a minute
loading.py        loads one tensor into memory
description.py    what `inspect` prints; selects tensors by a glob
"""
