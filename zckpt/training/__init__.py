"""What a checkpoint says beside its tensors: steps, optimizers, groups, names, trainers, options.

A module here may name classes of optimizers and programs that train, but reads no engine's files.

    steps.py            where optimizers keep their step, and which of several is true
    optimizers.py       what each optimizer keeps, and the defaults of its hyper-parameters
    groups.py           the groups that a target's optimizer expects
    names.py            which parameter of one checkpoint is which of another
    order.py            in which order the module has them
    ties.py             second names of tied weights
    peft.py             names of adapters' weights
    families/           names and packings of models in Hugging Face and in Megatron-Core
    tensor_rules.py     which dimension tensor ranks cut; tensor_families.py for known models
    trainers.py         the files that trainer programs put beside a checkpoint
    programs.py         programs whose whole state is one file, and where they look for what
    best.py             the best checkpoint of a Trainer's run
    objects.py          which objects may go into a target's pickles
    options.py          the options of a conversion
"""
