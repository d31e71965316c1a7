"""Facts of a checkpoint beside its tensors and names: steps, optimizers, trainers, options.

A module here may name classes of optimizers and programs that train, but reads no engine's files.

    steps.py            where optimizers keep their step, and which of several steps is true
    optimizers.py       the states of each optimizer, and defaults of its hyper-parameters
    schedulers.py       what learning rate schedulers keep for each group
    hyperparameters.py  the hyper-parameters of a target's groups
    batches.py          the global batch, and how another number of ranks keeps it
    trainers.py         the files that trainer programs put beside a checkpoint
    needs.py            the files that each program needs to resume
    trainers_steps.py   the steps that these programs state, and which of them must be equal
    lightning.py        detects Lightning's state, and where Lightning looks for it
    megatron_arguments.py  sizes that Megatron's programs save as their arguments
    faults.py           known faults of programs that write or load checkpoints
    best.py             the best checkpoint of a Trainer's run
    objects.py          objects that a target's pickles may contain
    options.py          the options of a conversion
"""
