"""Warnings for the user before a DeepSpeed target is written."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.checkpoint.facts import StateDictEngine
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.weights import weight_of
from ...errors import Notice, brief, listed, warning
from ...training import batches
from ...training.faults import UNSCALED_GRADIENTS
from ...training.options import BUFFERS
from ...training.trainers import number
from .hyper import FLAT, optimizer_name
from .states import version_numbers
from .target import DeepSpeedTarget

TRAINED_ALONE = (
    "give the optimizer only the trained parameters: in fp32 at stage 0, DeepSpeed loads its state "
    "by number, and the source does not show whether frozen parameters have numbers too"
)


def of_config(target: DeepSpeedTarget) -> list[Notice]:
    """The source's warnings, a warning if no ds_config is known, and the scheduler's notices."""
    warnings = list(target.source.notices.warnings)
    if not target.engine.has_config:
        message = "no ds_config is known: DeepSpeed's defaults are assumed"
        warnings.append(warning("value-assumed", message, subject="ds_config"))
    return [*warnings, *target.scheduler.notices]


def of_assumed(target: DeepSpeedTarget) -> list[Notice]:
    """A warning that lists the hyper-parameters that zckpt had to assume; empty without any."""
    if not target.assumed:
        return []
    values = ", ".join(
        f"{key}={value}" for key, value in target.assumed.items() if value is not None
    )
    name = optimizer_name(target.engine, target.source)
    message = f"the source lacks hyper-parameters; these are set to {name}'s defaults: {values}"
    return [warning("value-assumed", message, subject=next(iter(target.assumed)))]


def usual_norm(target: DeepSpeedTarget) -> float:
    """The norm to which the engine clips gradients if its ds_config states none.

    0 means that the engine does not clip.
    """
    return 1.0 if version_numbers(target.version) >= (0, 19, 3) else 0.0


def of_weights(target: DeepSpeedTarget) -> list[Notice]:
    """Warnings on weights guessed to be frozen, missing masters and clipping."""
    return [
        *_of_guessed(target),
        *_of_masters(target),
        *_of_clipping(target),
    ]


def of_stage_0(target: DeepSpeedTarget, wholes: Sequence[Manifest]) -> list[Notice]:
    """Warnings about frozen parameters, and about changing between ZeRO and stage 0 in fp16.

    `wholes` are the full models from which pipeline stages were cut. Frozen parameters in any stage
    cause the warning, because the target does not record which stage's optimizer lists them.
    """
    engine, before = target.engine, target.engine.before
    has_frozen = bool(target.frozen) and not target.lists_frozen
    has_frozen |= any(not own.trainable for each in wholes for own in each.parameters.values())
    warnings = []
    if engine.whole and target.wrapper is None and has_frozen:
        warnings.append(warning("program-must-set", TRAINED_ALONE))
    if before is None or before.dtype != "F16" or engine.dtype != "F16":
        return warnings
    was_whole = target.source.run.origin.zero_stage == 0
    if was_whole != engine.whole and version_numbers(target.version) >= (0, 18, 3):
        warnings.append(warning("engine-fault", UNSCALED_GRADIENTS.message))
    return warnings


def of_sequences(target: DeepSpeedTarget) -> list[Notice]:
    """Warnings for a run in which several ranks share a sequence.

    Stage 3 scales gradients otherwise than stages 1 and 2. Releases with the older file names
    (DeepSpeed 0.18.2 to 0.19.5) fail to load any checkpoint of such a run.
    """
    engine, origin = target.engine, target.source.run.origin
    warnings = []
    # stage 3 divides gradients by the number of all ranks, stages 1 and 2 by that of sequences
    # (0.19.8, runtime/comm/coalesced_collectives.py and stage_1_and_2.py)
    if engine.sp > 1 and origin.sp and (origin.zero_stage == 3) != engine.partitioned:
        message = (
            f"if {engine.sp} ranks share a sequence, gradients of stages 1 and 2 (DeepSpeed "
            f"0.19.8) are {engine.sp} times as large as those of stage 3: the moments need some "
            "updates to adapt"
        )
        warnings.append(warning("not-exact", message, subject="--stage"))
    if not engine.has_older_names:
        return warnings
    message = (
        "DeepSpeed before 0.19.6 loads no checkpoint in a run whose ranks share sequences: "
        "load_checkpoint ends in IndexError (list index out of range), unless the program patches "
        "it; 0.19.6 and later need the newer file names (leave out --dialect)"
    )
    return [*warnings, warning("engine-fault", message, subject="--dialect")]


def _of_guessed(target: DeepSpeedTarget) -> list[Notice]:
    """A warning if zckpt guessed which tensors of a state dict are frozen weights, not buffers.

    Empty except in stage 3, which stores frozen weights and buffers in different places.
    """
    engine = target.source.run.engine
    guessed = isinstance(engine, StateDictEngine) and engine.guessed
    if not (guessed and target.engine.partitioned and target.frozen) or target.options[BUFFERS]:
        return []
    # DeepSpeed refuses a buffer that is stored as a frozen weight: its size in the module is wrong
    names = list(target.frozen)
    message = (
        f"{listed(names, 4)}: assumed to be frozen parameters; if any is a buffer, name it with "
        "--buffers"
    )
    return [warning("frozen-inferred", message, subject=names[0])]


def _of_masters(target: DeepSpeedTarget) -> list[Notice]:
    weights = (weight_of(target.source.entries, name) for name in target.trainable)
    # the weights of a pipeline stage may be in files of layers
    dtypes = {w.param.dtype for w in weights if w.master is None and w.param is not None} - {"F32"}
    if not dtypes:
        return []
    message = f"the source holds no fp32 masters: they are cast from {', '.join(sorted(dtypes))}"
    return [warning("masters-missing", message)]


def of_batch(target: DeepSpeedTarget, source: Manifest, sp: int) -> list[Notice]:
    """A warning that says how to keep the global batch of `source`, if something must be set.

    `sp` ranks of the target share each sequence. Weights alone get no warning.
    """
    if target.options.weights_only:
        return []
    return batches.of_next_run(source, target.dp, target.engine.config, sp)


def _of_clipping(target: DeepSpeedTarget) -> list[Notice]:
    """A warning that the ds_config must state the source's clipping norm.

    Empty if the ds_config already does, if the target's files store the norm, or if the source has
    none (DeepSpeed 0.19.8).
    """
    norm = number(target.optimizer_state.get("clip_grad"))
    keeps = not target.engine.partitioned and (not target.engine.whole or target.wrapper == FLAT)
    clipping_in_config = target.engine.option("gradient_clipping")
    if target.options.weights_only or keeps or norm is None:
        return []
    if norm == (usual_norm(target) if clipping_in_config is None else clipping_in_config):
        return []
    message = (
        f"the source clips gradients to {brief(norm)} (clip_grad), but the target's engine reads "
        f'the norm from its ds_config: set "gradient_clipping": {brief(norm)} there'
    )
    return [warning("program-must-set", message, subject="gradient_clipping")]
