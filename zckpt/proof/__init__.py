"""Checks a checkpoint for contradictions, compares it with another one, and measures its tensors.

    verify.py       one checkpoint alone, two checkpoints, or one and a saved proof
    allgather/      `--gather`: joins the ranks' shards as the engine does, by torch.distributed
    pairs.py        which tensors are compared            report.py    lines of a report
    values.py       steps, scalars, groups                states.py    schedulers, counters, ...
    health.py       statistics of all tensors
    damage.py       which tensor damaged bytes belong to  sibling_files.py  files of a trainer, ...
    saved.py        the file of --save-proof              unsupported.py    states zckpt cannot read
    file_digest.py  whether the files of two checkpoints are copies
    roots.py        selects one model from a proof of several models

Only allgather/ needs torch.
"""
