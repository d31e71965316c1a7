"""Megatron-Core's checkpoints: `torch_dist`, `mp_rank_*` (older) and `fsdp_dtensor` directories.

    files.py          finds the directory; refuses some kinds
    saving_program.py the program that saved a directory, and the files it put beside the tensors
    common_state.py   state that all ranks share: arguments, hyper-parameters, the step
    names.py          names of parameters, and the keys in torch_dist under which layers are stacked
    groups.py         the group of each parameter, and its step
    read.py           reads a torch_dist directory, key by key
    manifest.py       builds the manifest from what a reader has collected
    masters.py        finds wrong fp32 masters, and drops them; compares replicas
    buffers/          flat buffers of the optimizer
    legacy/           the older directories, mp_rank_*
    fsdp.py           the directories of Megatron-FSDP
    fsdp2.py          gated layers whose rows torch's FSDP2 divided over ranks
    write.py          writes an iteration's directory, from which any tp, pp and dp resumes
    optimizers.py     the optimizers and groups of the target's run
    vocabulary.py     the number of rows of a padded vocabulary (`--tp`)
    run_template.py   `--like`: sources of other engines, with the keys and groups of a run
    functions.py      the table of this format's functions; why another run cannot load files
    gather/           joins ranks' shards as Megatron-Core's code does, for `verify --gather`

Facts in this package are of megatron-core 0.16.1 unless said otherwise.
"""

from ...training.options import (
    ALLOW_OBJECT,
    DP,
    DTYPE,
    EP,
    GROUP_DEFAULTS,
    LIKE,
    MAX_FILE_SIZE,
    PP,
    TP,
    VOCAB_SIZE,
    WEIGHTS_ONLY,
)
from ..format import Format
from .files import ROLES, counter, detect, iterations, latest, to_load

FORMAT = Format(
    name="megatron",
    about="Megatron-Core: torch_dist, mp_rank_*, fsdp_dtensor",
    family="megatron",
    detect=detect,
    tags=iterations,
    counter=counter,
    pointer=latest,
    to_load=to_load,
    options=(
        *(WEIGHTS_ONLY, DTYPE, GROUP_DEFAULTS, MAX_FILE_SIZE, ALLOW_OBJECT),
        *(DP, TP, PP, EP, VOCAB_SIZE, LIKE),
    ),
    numbers=True,
    reports_unused_rules=True,
    compares="all",
    fits_any_dp=True,
    overrides_groups=True,
    reasons={
        "groups_from": "Megatron-Core assigns parameters to groups by its own rule",
        "set_group": "for this target, --group-defaults lr=... replaces the source's values",
    },
    states="Megatron-Core's optimizer keeps exp_avg and exp_avg_sq",
    roles=ROLES,
    objects=frozenset(
        (
            # megatron.core.safe_globals, 0.16.1; zckpt's own list has the others
            "_io.BytesIO",
            "megatron.core.enums.ModelType",
            "megatron.core.optimizer.optimizer_config.OptimizerConfig",
            *(
                f"megatron.core.rerun_state_machine.{name}"
                for name in ("RerunDiagnostic", "RerunMode", "RerunState")
            ),
            *(
                f"megatron.core.transformer.enums.{name}"
                for name in ("AttnBackend", "CudaGraphScope")
            ),
            "pathlib.PosixPath",
            "signal.Signals",
            "types.SimpleNamespace",
        )
    ),
)
