"""What DeepSpeed's engine keeps in its model and optimizer states, in either kind of directory.

Shared by the formats `deepspeed` (a partition per rank) and `deepspeed_universal` (a file per
parameter); it is not a format itself.

    options.py             the options of a conversion that only DeepSpeed's formats understand
    directories.py         which tags a run directory has, the trainer's files around them, and
                           files of other writers, which are refused by name
    agreement.py           whether all ranks state the same of their run, and every file the rank
                           that its name says
    states.py              what model and optimizer states say of the run and of a flat buffer
    module_names.py        names of parameters that are not those of the module's weights
    experts.py             names, layers and places of experts
    tensors.py             parameters, buffers, aliases and replicas of a manifest
    of_files.py            what files of single ranks hold beside tensors
    manifest.py            the manifest of it all
    schedulers.py          which state the scheduler of the next run loads
    engine.py              which engine a target is written for
    estimates.py           hyper-parameters that each rank has estimated of its own
    hyper.py               what its optimizer needs and a source may lack
    target.py              what is decided before the first byte is written
    reports.py             what the user is warned of
    model_files.py         the model files of a target
    optimizer_values.py    what its optimizer files hold beside flat tensors

Facts are of DeepSpeed 0.19.8 unless said otherwise.
"""

OBJECTS = frozenset(
    (
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)
"""Classes that the engine's own files name (DeepSpeed 0.5.10 to 0.19.8)."""
