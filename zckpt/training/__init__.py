"""What checkpoints contain besides tensors and names: steps, optimizer groups, trainers' files.

The modules may name optimizer classes and training programs, but do not read any engine's files.

    steps.py            where optimizers store their step, and which of several steps is true
    optimizers.py       the states of each optimizer, and defaults of its hyper-parameters
    schedulers.py       the values that learning rate schedulers store for each optimizer group
    hyperparameters.py  the hyper-parameters of a target's groups
    batches.py          the global batch size, and how to keep it on another number of ranks
    trainers.py         the files that trainer programs put beside a checkpoint
    needs.py            the files that each program needs to resume
    trainers_steps.py   the steps that these programs state, and which of them must be equal
    lightning.py        detects Lightning's state, and where Lightning looks for it
    megatron_arguments.py  the saved command line arguments of Megatron's programs
    faults.py           known faults of programs that write or load checkpoints
    best.py             the best checkpoint of a Trainer's run
    objects.py          objects that a target's pickles may contain
    options.py          the options of a conversion
"""
