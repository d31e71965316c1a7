"""Writes a checkpoint in another format or for another number of ranks, and reports on it.

The target gets the source's tensors under the names and in the param groups that its engine needs.
The files that the target's format lays out are then written by `copying.convert`.

    conversion.py       the source of a conversion, its checks, and how it is written
    target.py           names, order, groups and files that a target gets
    next_groups.py      the groups of the next run: --groups-from
    set_groups.py       hyper-parameters that the user replaces: --set-group
    beginnings.py       the states of parameters that the source did not train
    state_loss.py       whether the target has every state of the source's optimizer
    effects.py          finds options that change nothing
    report.py           the report before the first byte is written
    run_options.py      how a conversion runs, and which functions it calls back
    names_only.py       a target with file names but no data, for a loader that fills it in memory
    numbered.py         a target that is a numbered folder like its source
    run_checkpoints.py  several checkpoints of a trainer's run as one target
    models.py           several models of one program as one target
"""
