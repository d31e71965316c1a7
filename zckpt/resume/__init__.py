"""Resumes a run on another number of ranks: `zckpt.auto_resume`, `zckpt check`, `zckpt list`.

A run is a directory with several checkpoints of one training.

    runs.py             finds the checkpoints of a run, the newest first
    fitting.py          the sizes of the next run, and the conversion that makes a checkpoint fit
    check.py            the report of `zckpt check`
    listing.py          the report of `zckpt list`: the state of each checkpoint of a run
    interrupted.py      which files of an interrupted save are complete, and which older tensors fit
    cache.py            resharded checkpoints in RUN/.zckpt: locks, and which ones are removed
    names.py            directories of empty files, for an engine that loads without a copy
    resuming.py         the steps of `auto_resume` in each rank
    auto.py             `auto_resume`: finds the processes of the launch and returns the path
"""
