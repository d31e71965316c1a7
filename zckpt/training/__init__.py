"""What a checkpoint says beside its tensors and names: steps, optimizers, trainers, options.

A module here may name classes of optimizers and programs that train, but reads no engine's files.

    steps.py            where optimizers keep their step, and which of several is true
    optimizers.py       what each optimizer keeps, and the defaults of its hyper-parameters
    schedulers.py       what schedulers of learning rates keep for each group
    hyperparameters.py  which hyper-parameters the groups of a target get
    trainers.py         the files that trainer programs put beside a checkpoint
    needs.py            which files each program needs to resume
    trainers_steps.py   the steps that these programs state, and which of them must be equal
    lightning.py        whether Lightning's state is there, and where Lightning looks for it
    megatron_arguments.py  sizes that Megatron's programs save as their arguments
    faults.py           what programs are known to write or load wrongly
    best.py             the best checkpoint of a Trainer's run
    objects.py          which objects may go into a target's pickles
    options.py          the options of a conversion
"""
