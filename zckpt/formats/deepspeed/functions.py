"""The functions that zckpt calls for DeepSpeed checkpoints (`FUNCTIONS`).

Also tells which runs can load a checkpoint's files unchanged (`obstacles`). The files fit only one
grid of ranks, one stage, one type and one optimizer. ZeRO's loader compares `dp_world_size` with
the data-parallel size of its run, and each rank opens its own file by name (0.19.8). Without ZeRO
the model file has everything, and a run of any data-parallel size loads it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.facts import layers_of
from ...core.checkpoint.grid import Grid, GridPlace
from ...core.checkpoint.manifest import Manifest
from ...core.comparison.replicas import averaged, check_slices
from ...errors import Notice, problem
from ...files.torchshell import seal_records
from ...training.options import DP, EP, PP, TP, Options
from ..deepspeed_states import schedulers
from ..deepspeed_states.engine import TargetEngine
from ..deepspeed_states.hyper import is_other_optimizer, shares_steps
from ..deepspeed_states.options import CONFIG, LATER_NAMES, OLDER_NAMES
from ..format import Beginning, Functions, differs
from ..groups import of_trained
from .gather import partitions
from .model_ranks.tensor_ranks import check, copies
from .older_model import continued
from .read import read
from .write import lay_out, lay_out_like

OF_ENGINES = {
    "ZeRO stage": "stage",
    "type": "dtype",
    "BF16_Optimizer": "wraps_bf16",
    "elastic checkpoint": "elastic",
    "round_robin_gradients": "round_robin",
    "parameter_alignment": "aligned",
}
"""Engine settings that decide how the files are cut: display name to attribute."""


def obstacles(source: Manifest, options: Options) -> list[Notice]:
    """The reasons why a run with these options cannot load the source's files unchanged.

    One notice for each setting in which the run differs from the source.
    """
    engine, new = _engine_of(source, Options()), _engine_of(source, options)
    pairs = _pairs(engine, new)
    if is_other_optimizer(new, source):
        pairs["optimizer"] = engine.optimizer or source.optimizer, new.optimizer
    names = OLDER_NAMES if new.has_older_names else LATER_NAMES
    pairs["names of files"] = source.run.origin.dialect or LATER_NAMES, names
    ep = max((layer.ep for layer in layers_of(source.run.engine)), default=1)
    grid = source.run.origin
    for name, option, size in (("tp", TP, grid.tp), ("pp", PP, grid.pp), ("ep", EP, ep)):
        pairs[name] = size or 1, options[option] or size or 1
    if not (engine.whole and new.whole and ep == 1):
        pairs["dp"] = source.dp, options[DP] or source.dp
    lines = [differs(what, has, wants) for what, (has, wants) in pairs.items() if has != wants]
    scheduler, state = schedulers.named_in(options[CONFIG]), source.state.get("lr_scheduler")
    if scheduler and not schedulers.fits(state, scheduler):
        decided = schedulers.decide(source, scheduler)
        if decided.state != state:  # otherwise the program has its own, or no conversion makes one
            reason = schedulers.lacking(source, scheduler)
            lines.append(replace(reason, code="scheduler-differs", severity="error", hint=""))
    return lines


def unlike(source: Manifest, run: Manifest, options: Options) -> list[Notice]:
    """Errors for the settings in which the target's engine differs from the engine of `run`.

    `run` is a checkpoint that the next program has saved. Also an error if `run` has a scheduler
    and the source lacks its state. [] if the user gives a ds_config, which states the next engine.
    """
    if options[CONFIG] is not None:
        return []
    engine, new = _engine_of(source, options), _engine_of(run, Options())
    pairs = _pairs(engine, new)
    # the loader casts tensors, and finds optimizer files with and without `bf16_` (0.19.8)
    del pairs["type"]
    if is_other_optimizer(new, source):
        pairs["optimizer"] = source.optimizer, new.optimizer
    hint = "give the next run's ds_config too: --ds-config FILE"
    lines = [
        problem(
            "program-does-not-fit",
            f"saved with {what} {has}; the program has {wants}",
            subject=what,
            hint=hint,
        )
        for what, (has, wants) in pairs.items()
        if has != wants
    ]
    lacking = schedulers.lacking_of(source, run)
    return [*lines, *([] if lacking is None else [replace(lacking, severity="error")])]


def begins(source: Manifest, options: Options) -> Beginning:
    """The kind of state that the target stores for parameters that the optimizer never updated.

    "group": zeros, and the step of the group, because the target stores one step for each group.
    "bare": no state. `source` and `options` determine the target's engine.
    """
    return "group" if shares_steps(_engine_of(source, options), source) else "bare"


def _engine_of(source: Manifest, options: Options) -> TargetEngine:
    before = source.run.origin
    grid = Grid(options[PP] or before.pp or 1, options[TP] or before.tp or 1)
    return TargetEngine(replace(source, place=GridPlace(0, grid)), options)


def _pairs(engine: TargetEngine, new: TargetEngine) -> dict[str, tuple[Any, Any]]:
    """Maps each setting that changes the files' content to its values in the two engines.

    Keys are the settings' names in messages: {"ZeRO stage": (3, 3), "sub_group_size": (1000000000,
    1000)}.
    """
    pairs = {what: (getattr(engine, name), getattr(new, name)) for what, name in OF_ENGINES.items()}
    if engine.partitioned and new.partitioned:
        pairs["sub_group_size"] = engine.sub_group_size, new.sub_group_size
    if None not in (engine.adam_class, new.adam_class):
        pairs["class of Adam"] = engine.adam_class, new.adam_class
    return pairs


def missing(source: Manifest, options: Options) -> list[Notice]:
    """An error if the ds_config names a scheduler and the target would have no state for it."""
    name = schedulers.named_in(options[CONFIG])
    if name is None:
        return []
    decided = schedulers.decide(source, name)
    lines = decided.notices if decided.is_lacking else ()
    return [replace(each, severity="error") for each in lines]


FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    lay_out_like=lay_out_like,
    seal=seal_records,
    partitions=partitions,
    averaged=averaged,
    check=check,
    copies=copies,
    check_slices=check_slices,
    groups=of_trained,
    continued=continued,
    begins=begins,
    obstacles=obstacles,
    missing=missing,
    unlike=unlike,
)
