"""Writes a target: creates its files, fills them, adds checksums, and renames the directory.

    convert.py        the five steps of a conversion
    copy.py           fills the files of a target
    assembling.py     assembles one chunk of a file
    comparing.py      compares complete tensors meanwhile: masters with weights, replicas
    filling.py        a file while it is filled: its regions, and the checksums of its bytes
    targets.py        checks whether a target may be written at a path, and fits there
    staging.py        makes the target appear completely or not at all
    journal.py        records which regions are complete; journals.py for several processes
    without_locks.py  where a run writes on a filesystem without locks
    sharing.py        which regions this process writes

No engine or file type is named here. The plan of a copy, made in `core`, says what goes where.
"""
