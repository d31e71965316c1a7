"""How a target comes about: its files are laid out, filled, sealed and renamed.

    convert.py      the five steps of a conversion
    copy.py         fills the files of a target
    assembling.py   one chunk of a file
    comparing.py    masters are compared with their weights meanwhile
    filling.py      a file while it is filled: its regions, and what its bytes belong to
    targets.py      may a target be written at a path, and does it fit?
    staging.py      it appears whole or not at all
    journal.py      which regions are complete; journals.py of several processes
    without_locks.py  where a run writes on a filesystem without locks
    sharing.py      which regions this process writes

Knows no engine and no container, as core/, whose plan of a copy it carries out.
"""
