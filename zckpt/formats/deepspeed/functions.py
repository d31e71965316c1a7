"""What does zckpt do with these files?

Why a run does not load them as they are (`obstacles`): they are for one grid of ranks, one stage,
type and optimizer. ZeRO's loader compares `dp_world_size`, and opens the files of its own ranks by
their names (0.19.8). Without ZeRO the model file has everything, and any number of data ranks loads
it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...core.facts import layers_of
from ...core.grid import Grid, Place
from ...core.inert import nested
from ...core.manifest import Manifest
from ...core.replicas import averaged, check_slices
from ...errors import Notice, problem
from ...files.torchshell import seal_records
from ...training.options import DP, EP, PP, TP, Options
from ..deepspeed_states.engine import TargetEngine
from ..deepspeed_states.hyper import is_other_optimizer
from ..deepspeed_states.options import CONFIG
from ..format import Functions
from ..groups import of_trained
from .gather import partitions
from .model_ranks.tensor_ranks import check
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
"""What of an engine decides how its files are cut, by its name for a sentence."""
OF_DEEPSPEED = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own schedulers; others are torch's."""


def obstacles(source: Manifest, options: Options) -> list[Notice]:
    """Everything in which the files and the run of these options differ."""
    own, new = _engine_of(source, Options()), _engine_of(source, options)
    pairs = _pairs(own, new)
    if is_other_optimizer(new, source):
        pairs["optimizer"] = own.optimizer or source.optimizer, new.optimizer
    ep = max((layer.ep for layer in layers_of(source.run.engine)), default=1)
    grid = source.run.origin
    for name, option, size in (("tp", TP, grid.tp), ("pp", PP, grid.pp), ("ep", EP, ep)):
        pairs[name] = size or 1, options[option] or size or 1
    if not (own.whole and new.whole and ep == 1):
        pairs["dp"] = source.dp, options[DP] or source.dp
    return [
        problem("size-differs", f"{what} {has}, and not {wants}", subject=what)
        for what, (has, wants) in pairs.items()
        if has != wants
    ]


def unlike(source: Manifest, run: Manifest, options: Options) -> list[Notice]:
    """In what the engine of a program that has saved `run` differs from that of a target.

    Types are no difference: the loader casts them, and finds the files by both names (0.19.8).
    """
    if options[CONFIG] is not None:  # which says it
        return []
    own, new = _engine_of(source, options), _engine_of(run, Options())
    pairs = _pairs(own, new)
    del pairs["type"]
    if is_other_optimizer(new, source):
        pairs["optimizer"] = source.optimizer, new.optimizer
    hint = "give the next run's ds_config too: --ds-config FILE"
    return [
        problem("program-does-not-fit", f"{what} {has}, and not {wants}", subject=what, hint=hint)
        for what, (has, wants) in pairs.items()
        if has != wants
    ]


def _engine_of(source: Manifest, options: Options) -> TargetEngine:
    """The engine of every model rank."""
    grid = Grid(source.run.origin.pp or 1, source.run.origin.tp or 1)
    return TargetEngine(replace(source, place=Place(0, grid)), options)


def _pairs(own: TargetEngine, new: TargetEngine) -> dict[str, tuple[Any, Any]]:
    """What two engines have of all that decides what is in their files."""
    pairs = {what: (getattr(own, name), getattr(new, name)) for what, name in OF_ENGINES.items()}
    if own.partitioned and new.partitioned:
        pairs["sub_group_size"] = own.sub_group_size, new.sub_group_size
    if None not in (own.adam_class, new.adam_class):
        pairs["class of Adam"] = own.adam_class, new.adam_class
    return pairs


def missing(source: Manifest, options: Options) -> list[Notice]:
    """The state of the scheduler that the given ds_config makes, if the source has none for it.

    DeepSpeed's schedulers load `last_batch_iteration` alone, and raise without it (0.19.8,
    runtime/lr_schedules.py). Those of torch take any dictionary, and would begin anew without
    `last_epoch`.
    """
    config = options[CONFIG] or {}
    name = nested(config, "scheduler", "type")
    if not isinstance(name, str):
        return []
    key = "last_batch_iteration" if name in OF_DEEPSPEED else "last_epoch"
    state = source.state.get("lr_scheduler")
    if isinstance(state, dict) and key in state:
        return []
    lacks = f"no {key} in the state of its scheduler" if state else "no scheduler"
    return [
        problem(
            "program-does-not-fit",
            f"the checkpoint has {lacks}, and the ds_config's {name} loads that",
            subject=name,
            hint="use the scheduler of the checkpoint, or let another one begin anew: "
            "load_checkpoint(..., load_lr_scheduler_states=False)",
        )
    ]


FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    lay_out_like=lay_out_like,
    seal=seal_records,
    partitions=partitions,
    averaged=averaged,
    check=check,
    check_slices=check_slices,
    groups=of_trained,
    obstacles=obstacles,
    missing=missing,
    unlike=unlike,
)
