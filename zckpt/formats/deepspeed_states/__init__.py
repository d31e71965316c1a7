"""What DeepSpeed's model and optimizer files contain, whichever kind of directory they are in.

The formats `deepspeed` (a partition per rank) and `deepspeed_universal` (a file per parameter)
share this package; it is not a format itself.

    options.py             the options that only DeepSpeed's formats have
    directories.py         the tags of a run directory, the trainer's files around them, and
                           files of other writers, which are refused by name
    agreement.py           checks that all ranks state the same facts, and that every file belongs
                           to the rank in its name
    states.py              facts in model and optimizer states about the run and its flat buffers
    module_names.py        maps listed parameter names to the names of the module's weights
    experts.py             names and layers of experts, and the ranks that have them
    tensors.py             parameters, buffers, second names and replicas of a manifest
    of_files.py            values in the files of single ranks that are no tensors
    manifest.py            builds the manifest from all of these
    schedulers.py          the state that the next run's scheduler loads
    engine.py              the engine that a target is written for
    estimates.py           hyper-parameters that each rank has estimated separately
    hyper.py               hyper-parameters and states that a target needs and a source may lack
    target.py              everything that is decided before the first byte is written
    reports.py             warnings for the user
    model_files.py         the model files of a target
    optimizer_values.py    values in a target's optimizer files that are no flat tensors

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
