"""Derives the values of a lost model file (ZeRO stage 1 or 2) from the model file of an older save.

The optimizer's files state the updates, the learning rates, the loss scaler and the ds_config of
the lost save. So the engine's counters can be computed from the older counters (0.19.8, engine.py
`_take_model_step`):

    global_steps      the number in the tag, or the older number and the loss scaler's steps since
    skipped_steps     steps that were no updates
    global_samples    steps times the batch size, if that has not changed
    lr_scheduler      advanced once per update

Whatever the files do not determine stays as it was in the older save, and is listed as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.inert import Foreign, TensorName, nested
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.mended import MadeValue
from ...core.storage.inventory import parse_name
from ...errors import InconsistentCheckpoint, ZckptError, listed
from ...files.torchfile import Parsed, TorchFile
from ...training.batches import global_batch
from ...training.schedulers import OF_GROUPS, with_rates
from ..deepspeed_states.directories import MODEL, OPTIMIZER, ROLES
from ..deepspeed_states.of_files import SLICES
from ..deepspeed_states.schedulers import COUNTER
from ..deepspeed_states.states import open_files, shapes_of_groups
from ..schedulers import OF_TORCH

AS_OLDER = "as in the older checkpoint, since nothing shows how the value has changed"
STEPS, SKIPPED, SAMPLES = "global_steps", "skipped_steps", "global_samples"
TAG = re.compile(r"global_step(\d+)", re.ASCII)
"""The tag that the engine gives a save without one: it has the counter `global_steps`."""
OF_PRECISION = ("bf16", "fp16", "zero_optimization", "data_types")
"""The sections of a ds_config that decide the contents of files."""
CONSTANT = OF_GROUPS | {
    *("step_size", "gamma", "milestones", "T_max", "eta_min", "factor", "total_iters", "power"),
    *("start_factor", "end_factor", "verbose", "_get_lr_called_within_step", "_is_initial"),
}
"""Keys of a torch scheduler's state whose values are constants or learning rates (torch 2.13).

A state with only these keys and counters can be advanced to a later step.
"""
COUNTS = (OF_TORCH, "_step_count")
"""The keys of torch's schedulers that grow by one with each call of `step()`."""


def continued(manifest: Manifest, older: Manifest) -> tuple[Manifest, list[MadeValue], bool]:
    """Fills in the values of a lost model file, derived from the model file of an older save.

    `manifest` was read with the model file of `older`. Returns the manifest with derived values,
    the report's list of values, and whether the optimizer's files confirm the parameters' order.
    Raises InconsistentCheckpoint if the older file does not fit, or is of a later save.
    """
    names = {
        path: own for path in manifest.files.paths if (own := parse_name(ROLES, path)) is not None
    }
    models = [path for path, own in names.items() if own.role is MODEL]
    ranks = sorted((own.numbers, path) for path, own in names.items() if own.role is OPTIMIZER)
    if len(models) != 1 or not ranks:
        raise _unfit(older, "is not of a run with one model file")
    model, *optimizers = open_files([models[0], *(path for _, path in ranks)], Parsed())
    is_ordered = _need_same_model(model, optimizers, older)
    manifest = _with_config(manifest, model, optimizers[0], older)
    updates = _updates(manifest), _updates(older)
    if None not in updates and updates[0] < updates[1]:  # type: ignore[operator]
        raise _unfit(older, f"is of {updates[1]} updates, and the damaged one of {updates[0]}")
    counters, lines = _counters(manifest, older, *updates)
    scheduler, of_scheduler = _scheduler(manifest, *updates)
    state = {**manifest.state, "counters": counters, "lr_scheduler": scheduler}
    lines += [*of_scheduler, *_unchanged(manifest)]
    return manifest.replace(state=state), lines, is_ordered


def _unfit(older: Manifest, why: str) -> ZckptError:
    return InconsistentCheckpoint(
        "mixed-saves",
        f"the model file of the older checkpoint {older.where} {why}",
        hint="give another checkpoint of the same run, with the same model and ds_config",
        file=older.where,
    )


def _need_same_model(model: TorchFile, optimizers: Sequence[TorchFile], older: Manifest) -> bool:
    """Raises InconsistentCheckpoint if model file and optimizer files list different parameters.

    Also raises if their order differs, or if the run has experts. Returns whether the order was
    compared.
    """
    if model.value.get("num_experts"):
        raise _unfit(older, "is of a run with experts, and zckpt does not write such a file again")
    states = [file.value["optimizer_state_dict"] for file in optimizers]
    of_ranks = [state.get(SLICES) for state in states]
    if not all(isinstance(groups, list) for groups in of_ranks):
        return False  # old versions of DeepSpeed have no such list
    shapes = enumerate(shapes_of_groups(model.value.get("param_shapes"), model))
    sizes = {(n, name): prod(shape) for n, group in shapes for name, shape in group.items()}
    counted: dict[tuple[int, str], int] = {}
    for groups in of_ranks:
        for number, parts in enumerate(groups):
            for name, address in parts.items():
                fields = address.state if isinstance(address, Foreign) else {}
                count = fields.get("numel", 0) if isinstance(fields, dict) else 0
                counted[number, name] = counted.get((number, name), 0) + count
    if counted != sizes:
        names = sorted({name for (_, name), _ in sizes.items() ^ counted.items()})
        raise _unfit(older, f"has other parameters than the optimizer's files: {listed(names, 4)}")
    config = optimizers[0].value.get("ds_config") or model.value.get("ds_config")
    # under round robin, the list does not have the flat buffer's order (0.19.8)
    is_dealt = nested(config, "zero_optimization", "round_robin_gradients")
    if not is_dealt and sorted(counted, key=itemgetter(0)) != [*sizes]:
        raise _unfit(older, "has the parameters in another order than the optimizer's files")
    return not is_dealt


def _with_config(
    manifest: Manifest, model: TorchFile, optimizer: TorchFile, older: Manifest
) -> Manifest:
    """Replaces the ds_config and version of the older save by those in the optimizer's files."""
    engine, before = manifest.run.engine, model.value.get("ds_config")
    config, version = (optimizer.value.get(key) for key in ("ds_config", "ds_version"))
    if isinstance(version, str):
        manifest = manifest.replace(origin=replace(manifest.run.origin, version=version))
        if isinstance(engine, FlatBufferEngine):
            engine = replace(engine, version=version)
    if isinstance(config, dict) and config and isinstance(engine, FlatBufferEngine):
        for key in OF_PRECISION if isinstance(before, dict) else ():
            if config.get(key) != before.get(key):
                raise _unfit(older, f"has another {key!r} in ds_config than the optimizer's files")
        engine = replace(engine, config=config)
    return manifest.replace(engine=engine)


def _updates(manifest: Manifest) -> int | None:
    """The number of completed updates in the optimizer's files; None if they do not state it."""
    steps = [each.step for each in manifest.parameters.values() if each.trainable]
    return max((int(step) for step in steps if step is not None), default=None)


# -- counters


def _counters(
    manifest: Manifest, older: Manifest, updates: int | None, before: int | None
) -> tuple[dict[str, Any], list[MadeValue]]:
    old = {key: older.state["counters"].get(key) for key in (STEPS, SKIPPED, SAMPLES)}
    new, how = dict(old), dict.fromkeys(old, AS_OLDER)
    passed, where = _steps_since(manifest, older)
    done = None if updates is None or before is None else updates - before
    if passed is not None and passed >= (done or 0):
        new[STEPS], how[STEPS] = (
            old[STEPS] + passed,
            f"{old[STEPS]} in the older checkpoint, {where}",
        )
        if done is not None and type(old[SKIPPED]) is int:
            new[SKIPPED] = old[SKIPPED] + passed - done
            how[SKIPPED] = f"{done} of the {passed} steps since the older checkpoint were updates"
        size, size_before = global_batch(manifest), global_batch(older)
        if size == size_before and size is not None and old[SAMPLES] == old[STEPS] * size:
            new[SAMPLES], how[SAMPLES] = new[STEPS] * size, f"{STEPS} times a batch of {size}"
    return new, [MadeValue(key, new[key], how[key]) for key in new if new[key] is not None]


def _steps_since(manifest: Manifest, older: Manifest) -> tuple[int | None, str]:
    """The number of engine steps since the older save, and a phrase that says what shows it.

    Skipped steps count too. The number is None if nothing shows it, or if the files disagree.
    """
    before = older.state["counters"].get(STEPS)
    named, named_before = (TAG.fullmatch(own.run.origin.tag or "") for own in (manifest, older))
    counts = _iterations(manifest), _iterations(older)
    if type(before) is not int:
        return None, ""
    # if both tags and loss scalers state the number, they must agree
    by_scaler = None if None in counts else counts[0] - counts[1]  # type: ignore[operator]
    if named and named_before and int(named_before[1]) == before:
        by_tag = int(named[1]) - before
        if by_scaler in (None, by_tag):
            return by_tag, f"and {by_tag} steps since then, as the tag {named[0]} says"
        return None, ""
    return by_scaler, f"and {by_scaler} steps since then, as the loss scaler says"


def _iterations(manifest: Manifest) -> int | None:
    """The number of engine steps that a dynamic loss scaler has counted; None for other scalers."""
    scaler = nested(manifest.state, "optimizer", "loss_scaler")
    values = scaler.state if isinstance(scaler, Foreign) else None
    count = values.get("cur_iter") if isinstance(values, Mapping) else None
    return count if type(count) is int else None


# -- the scheduler


def _scheduler(
    manifest: Manifest, updates: int | None, before: int | None
) -> tuple[Any, list[MadeValue]]:
    """The scheduler's state to write, and the report's lines about its values.

    `updates` and `before` are the completed updates of this save and of the older one. A state that
    zckpt cannot advance from `before` to `updates` is returned unchanged.
    """
    state = manifest.state.get("lr_scheduler")
    if state is None:
        return None, []
    if not isinstance(state, dict) or updates is None or before is None:
        return state, [MadeValue("lr_scheduler", None, AS_OLDER)]
    keys = COUNTER, OF_TORCH
    counts = {COUNTER: before - 1, OF_TORCH: before}
    counted = [key for key in keys if key in state]
    # only constants, learning rates and a counter that agrees with `before` can be advanced
    is_known = {*state} <= {*counted, *COUNTS, *CONSTANT} and len(counted) == 1
    if not is_known or state[counted[0]] != counts[counted[0]]:
        return state, [MadeValue("lr_scheduler", None, AS_OLDER)]
    passed = updates - before
    ahead = {key: state[key] + passed for key in (*keys, *COUNTS) if type(state.get(key)) is int}
    advanced = with_rates({**state, **ahead}, manifest.groups or ())
    how = f"advanced by {passed} updates since the older checkpoint"
    return advanced, [
        MadeValue(f"lr_scheduler.{key}", value if type(value) in (int, float, str) else None, how)
        for key, value in advanced.items()
        if value != state[key] or key in ahead
    ]


# -- all else


def _unchanged(manifest: Manifest) -> Iterator[MadeValue]:
    """Yields the report's lines about values taken unchanged from the older save's model file.

    Tensors are left out, because the report lists them separately.
    """
    state = manifest.state
    for key in ("data_sampler", "random_ltd"):
        if state.get(key) is not None:
            yield MadeValue(key, None, AS_OLDER)
    for key in ("client_state", "module_extra"):
        for name, value in (state.get(key) or {}).items():
            if isinstance(value, TensorName):
                continue
            plain = value if type(value) in (int, float, str, bool) else None
            yield MadeValue(f"{key}.{name}", plain, AS_OLDER)
