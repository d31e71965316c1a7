"""Megatron-Core's checkpoints of the kind `torch_dist`, 0.14 and later.

    files.py        which directory is meant; the kinds that are refused
    common.py       what the ranks share: arguments, hyper-parameters, the step
    names.py        names of parameters, from keys under which layers are stacked; and back
    groups.py       which group each parameter is in, and its step
    read.py         the manifest, and the check of masters against weights
    optimizers.py   the optimizers and groups that a target's run has
    write.py        an iteration's directory, from which any tp, pp and dp resumes

Facts in this package are of megatron-core 0.16.1 unless said otherwise.
"""

from ...training.options import ALLOW_OBJECT, DTYPE, EP, MAX_FILE_SIZE, WEIGHTS_ONLY
from ..format import Format

ANY_SIZES = "runs of any tp, pp and dp resume from the same files"

FORMAT = Format(
    name="megatron",
    folder="megatron",
    about="Megatron-Core torch_dist: fully_reshardable, not distributed",
    family="megatron",
    options=(WEIGHTS_ONLY, DTYPE, MAX_FILE_SIZE, ALLOW_OBJECT, EP),
    reasons={"dp": ANY_SIZES, "tp": ANY_SIZES, "pp": ANY_SIZES},
    numbers=True,
    checks=True,
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
