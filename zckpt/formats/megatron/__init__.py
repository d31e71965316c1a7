"""Megatron-Core's checkpoints: `torch_dist`, the older `mp_rank_*` directories, and its FSDP's.

    files.py          which directory is meant; the kinds that are refused
    saving_program.py whose directory it is, and what lies beside the items
    common_state.py   what the ranks share: arguments, hyper-parameters, the step
    names.py          names of parameters, and the keys in torch_dist under which layers are stacked
    groups.py         which group each parameter is in, and its step
    read.py           a torch_dist directory, item by item
    manifest.py       the manifest of what a reader has collected
    masters.py        what is left if masters do not round to their weights; the check of copies
    buffers/          flat buffers of the optimizer
    legacy/           the older directories, mp_rank_*
    fsdp.py           the directories of Megatron-FSDP
    fsdp2.py          rows of gated layers that torch's FSDP2 has cut
    write.py          an iteration's directory, from which any tp, pp and dp resumes
    optimizers.py     the optimizers and groups that a target's run has
    vocabulary.py     the rows of a padded vocabulary: `--tp`
    run_template.py   sources of other engines, with the keys and groups of a run: `--like`
    functions.py      what zckpt does with them; why a run of other sizes does not load them
    gather/           what Megatron-Core's own rule brings back, for `verify --gather`

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
        "groups_from": "Megatron-Core makes groups by a rule of its own, and no file lists members",
        "set_group": "here --group-defaults lr=... replaces what the source has",
    },
    states="Megatron-Core's optimizer keeps exp_avg and exp_avg_sq",
    roles=ROLES,
    objects=frozenset(
        (
            # megatron.core.safe_globals, 0.16.1; the others are zckpt's own list
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
