"""How a manifest becomes a checkpoint of another format or size, and the report about it.

The target gets the source's tensors under the names and in the groups that its engine needs; what
the target's format lays out is then written by `copying.convert`.

    conversion.py  the source of a conversion, its checks, and the way to the target
    target.py      names, order, groups and files that a target gets
    keeping.py     whether the target has every state of the source's optimizer
    report.py      what can be said before the first byte is written
    running.py     how a conversion runs, and whom it informs
    several.py     several checkpoints of a trainer's run as one target
    models.py      several models of one program as one target
"""
