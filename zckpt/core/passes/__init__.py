"""How all tensors are gone through once: to where, in which parts, on which threads.

plan.py           the join of two manifests: which bytes of a source are which of a target
layout.py         the files of a target before any tensor is copied
pieces.py         elements from files into a buffer
streaming.py      one pass over tensors, with the threads and memory of resources.py
pooling.py        which tasks of a pass this process carries out
pace.py           a line a minute about it
loading.py        one tensor in memory
description.py    what `inspect` prints; tensors by a glob
"""
