"""Builds the manifest from opened files: tensors, groups, steps, state and warnings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint import optimizer_states
from ...core.checkpoint.facts import FlatBufferEngine, StepPlace
from ...core.checkpoint.inert import Foreign, nested
from ...core.checkpoint.manifest import Files, Manifest, Notices, Parameter, Run, Sighting
from ...core.checkpoint.optimizer_states import States
from ...core.checkpoint.origin import Origin
from ...core.grouping import by_key
from ...errors import Notice, listed, note, warning
from ...files.torchfile import TorchFile
from ...training import steps
from ...training.faults import LOST_FROZEN, QUANTIZED
from ...training.optimizers import name_of_groups
from . import estimates
from .directories import siblings, trainer_around
from .of_files import (
    RANK_KEYS,
    extra_states_of,
    layout,
    model_values,
    of_ranks,
    optimizer_values,
    own_client_state,
)
from .states import (
    COUNTERS,
    EngineStates,
    FlatBuffer,
    states_of_partitions,
    version_numbers,
)
from .tensors import ManifestTensors

INFERRED = "zckpt_inferred"
"""Key in a file that zckpt wrote: parameters whose names no file of the source stated."""


def manifest_of(
    ranks: EngineStates,
    buffers: Sequence[FlatBuffer],
    format: str,
    config: dict[str, Any],
    module_dtype: str,
) -> Manifest:
    """Builds the manifest from the opened files and their flat buffers.

    `format` is the name of the format. `config` and `module_dtype` are the engine's ds_config and
    the type of its weights, as far as the files show them.
    """
    tensors = ManifestTensors(ranks)
    for buffer in buffers:
        tensors.add_trainable(buffer)
    lost = tensors.add_frozen()
    differing = tensors.add_buffers()
    alone = tensors.add_aliases()
    groups = _groups(ranks, tensors)
    sightings = [line for buffer in buffers for line in buffer.sightings]
    beside, around = siblings(ranks.directory), trainer_around(ranks.directory)
    place = step_place(ranks, buffers)
    of_partitions = states_of_partitions(ranks, buffers, tensors.entries)
    other_rows = tensors.other_rows(buffers)
    state = _state(ranks, tensors)
    estimated = estimates.estimates_of(ranks)
    differing_values = of_ranks(ranks)
    return Manifest(
        root=ranks.directory.path,
        format=format,
        groups=groups,
        optimizer=stated_optimizer(ranks, buffers, groups),
        state=state,
        states=States(
            (
                *tensors.numbers,
                *other_rows,
                *of_partitions,
                *optimizer_states.estimates(estimated),
                *extra_states_of(ranks),
            )
        ),
        replicas=tuple(tensors.replicas),
        entries=tensors.entries,
        parameters=tensors.parameters,
        buffers=tensors.buffer_names,
        run=Run(
            origin=Origin(format, ranks.version, ranks.stage, ranks.dp, ranks.directory.tag),
            engine=FlatBufferEngine(
                "deepspeed",
                ranks.version,
                ranks.engine_class,
                module_dtype,
                ranks.elastic,
                ranks.excludes_frozen,
                config,
            ),
            step_place=place,
            steps=(*dict.fromkeys(sightings), *counters(ranks)),
            weights_differ=has_zenflow(ranks.config) or _is_quantized(ranks.config),
        ),
        files=Files(
            of_ranks=differing_values,
            rank_keys=RANK_KEYS,
            stated_in=ranks.models[0].path,
            layout=layout(ranks),
            records=tuple(record for file in _files(ranks) for record in file.records.values()),
            paths=tuple(file.path for file in _files(ranks)),
            siblings=tuple(beside.files),
        ),
        notices=Notices(
            omitted=(
                *own_client_state(differing_values),
                *beside.omitted,
                *map(_second_name, alone),
            ),
            warnings=(
                *(line for buffer in buffers for line in buffer.warnings),
                *_frozen_warnings(ranks, lost),
                *_buffer_warnings(differing),
                *_elastic_warnings(ranks, groups),
                *estimates.warnings(estimated),
                *_config_warnings(ranks),
                *_trainer_warnings(around),
                *_scaler_warnings(ranks.first),
                *(
                    []
                    if has_zenflow(ranks.config)
                    else ahead_of_counters(ranks, tensors.parameters, place)
                ),
            ),
            inferred=tuple(
                name for file in ranks.optimizers[:1] for name in file.value.get(INFERRED) or ()
            ),
        ),
    )


def _files(ranks: EngineStates) -> list[TorchFile]:
    # each once: in stage 0 one file has the model and its optimizer
    return list(dict.fromkeys((*ranks.models, *ranks.optimizers, *ranks.apart.values())))


def with_files(manifest: Manifest, files: Iterable[TorchFile]) -> Manifest:
    """Adds files to the manifest's list of source files; each file only once."""
    more = [file for file in dict.fromkeys(files) if file.path not in manifest.files.paths]
    return manifest.replace(
        paths=(*manifest.files.paths, *(file.path for file in more)),
        records=(*manifest.files.records, *(record for f in more for record in f.records.values())),
    )


# -- what is not a tensor

GROUPS = "param_groups"  # the name under which tensors among the hyper-parameters are entered
# ds_config arguments that choose the optimizer's class and are no hyper-parameters of groups
CONSTRUCTION = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})


def _groups(ranks: EngineStates, tensors: ManifestTensors) -> tuple[dict[str, Any], ...] | None:
    """The hyper-parameters of each param group; None without optimizer files.

    The keys `params` (the group's members) and `step` are left out.
    """
    if not ranks.bases:
        return None
    groups = ranks.bases[0].get("param_groups")
    if groups is None:
        return _elastic_groups(ranks, tensors)
    hyper = tuple(
        {
            key: tensors.hyper(value, f"{GROUPS}.{place}.{key}", ranks.optimizers[0])
            for key, value in group.items()
            if key not in ("params", "step")
        }
        for place, group in enumerate(groups)
    )
    if any(slot == "state" and name.startswith(GROUPS) for name, slot in tensors.entries):
        for base, file in zip(ranks.bases[1:], ranks.optimizers[1:], strict=True):
            for place, group in enumerate(base.get("param_groups") or ()):
                values = {f"{GROUPS}.{place}.{key}": value for key, value in group.items()}
                tensors.add_state_replicas(values, [file])
    return hyper


def _elastic_groups(
    ranks: EngineStates, tensors: ManifestTensors
) -> tuple[dict[str, Any], ...] | None:
    """The groups' hyper-parameters for elastic files (`elastic_checkpoint`), which contain none.

    They come from the ds_config, and the learning rates from the scheduler. None if neither states
    any.
    """
    count = len(ranks.param_shapes())
    params = nested(ranks.config, "optimizer", "params")
    hyper_parameters = {
        key: value
        for key, value in (params.items() if isinstance(params, dict) else ())
        if value != "auto" and key not in CONSTRUCTION
    }
    groups = [dict(hyper_parameters) for _ in range(count)]
    scheduler = ranks.model.get("lr_scheduler")
    if isinstance(scheduler, dict):
        for key, name in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
            values = scheduler.get(key)
            if isinstance(values, list) and len(values) == count:
                for group, value in zip(groups, values, strict=True):
                    group[name] = tensors.kept(value, f"lr_scheduler.{key}", ranks.models[0])
    return tuple(groups) if any(groups) else None


def _state(ranks: EngineStates, tensors: ManifestTensors) -> dict[str, Any]:
    """The manifest's `state`: all that a target's files need besides tensors of parameters."""
    optimizer = {
        key.removeprefix("optimizer."): tensors.kept(value, key, ranks.optimizers[0])
        for key, value in optimizer_values(ranks.first).items()
    }
    of_model = {
        key: tensors.kept(value, key, ranks.models[0])
        for key, value in model_values(ranks.model, ranks.module).items()
    }
    for files in _by_shared_value(ranks.optimizers[1:]):
        state = files[0].value["optimizer_state_dict"]
        tensors.add_state_replicas(optimizer_values(state), files)
    for files in _by_shared_value(ranks.models[1:]):
        model = files[0].value
        tensors.add_state_replicas(model_values(model, model["module"]), files)
    return {
        "counters": {key: ranks.model.get(key) for key in COUNTERS},
        "module": list(tensors.module),
        **of_model,
        "optimizer": optimizer,
    }


def _by_shared_value(files: Sequence[TorchFile]) -> list[list[TorchFile]]:
    # files with equal pickles share one parsed value
    return [*by_key((id(file.value), file) for file in files).values()]


# -- warnings


def _second_name(name: str) -> Notice:
    message = f"{name}: a second name of a weight that was left out of the save"
    return note("weights-missing", message, subject=name)


def _frozen_warnings(ranks: EngineStates, lost: Sequence[str]) -> list[Notice]:
    warnings = []
    if lost:
        message = f"the weights {listed(lost)} are not in this checkpoint: {LOST_FROZEN.message}"
        warnings.append(warning("weights-missing", message, subject=lost[0]))
    if ranks.excludes_frozen:
        message = "saved with exclude_frozen_parameters: frozen weights, if any, are missing"
        warnings.append(warning("weights-missing", message))
    return warnings


def _buffer_warnings(differing: Sequence[str]) -> list[Notice]:
    if not differing:
        return []
    message = f"the buffers {listed(differing)} differ between ranks; rank 0's are taken"
    return [warning("rank-zero-taken", message, subject=differing[0])]


def _trainer_warnings(around: str | None) -> list[Notice]:
    if around is None:
        return []
    message = f"the Trainer's files are not included: to include them, give the directory {around}"
    return [warning("file-omitted", message, file=around)]


def has_zenflow(config: object) -> bool:
    """Whether the ds_config uses ZenFlow.

    ZenFlow's own Adam updates the 16-bit weights, but not their masters (DeepSpeed 0.19.8,
    runtime/zenflow).
    """
    return bool(nested(config, "zero_optimization", "zenflow"))


def _is_quantized(config: object) -> bool:
    """Whether the ds_config makes MoQ quantize stored 16-bit weights, but not their masters.

    DeepSpeed 0.4.0 to 0.19.6, runtime/quantize.py.
    """
    if nested(config, "quantize_training", "enabled"):  # before 0.7.0
        return True
    quantization = nested(
        config, "compression_training", "weight_quantization", "shared_parameters"
    )
    # quantizing in the forward pass does not change stored weights
    return bool(nested(quantization, "enabled")) and not nested(
        quantization, "quantize_weight_in_forward"
    )


def _config_warnings(ranks: EngineStates) -> list[Notice]:
    if _is_quantized(ranks.config):
        return [warning("weights-differ-by-design", QUANTIZED.message)]
    if has_zenflow(ranks.config):
        message = (
            "ZenFlow updates selected columns with a second Adam: in these columns, masters and "
            "moments are older than the weights of the module. DeepSpeed also resumes from the "
            "older masters. `verify` lists these weights"
        )
        return [warning("weights-differ-by-design", message)]
    if ranks.config_path is None:
        return []
    message = (
        f"the files name the ds_config ({ranks.config_path}) but do not contain it: when you write "
        "for DeepSpeed, give it with --ds-config"
    )
    return [warning("option-needed", message, subject="--ds-config", file=ranks.config_path)]


def _scaler_warnings(state: Mapping[str, Any]) -> list[Notice]:
    """A warning if the dynamic loss scale is at its minimum; an empty list otherwise.

    DeepSpeed 0.19.8, DynamicLossScaler: every overflow halves `cur_scale`, down to `min_scale`.
    """
    scaler = state.get("loss_scaler")
    values = scaler.state if isinstance(scaler, Foreign) else None
    if not isinstance(values, dict) or not values.get("dynamic", "min_scale" in values):
        return []
    scale, least = values.get("cur_scale"), values.get("min_scale")
    if not isinstance(scale, (int, float)) or not isinstance(least, (int, float)) or scale > least:
        return []
    message = (
        f"the dynamic loss scale is at its minimum, {scale:g}: another overflow cannot lower it; "
        "if gradients have overflowed often, resume from an earlier checkpoint"
    )
    return [warning("loss-scale-low", message, subject="loss_scaler")]


def _elastic_warnings(ranks: EngineStates, groups: Sequence[dict[str, Any]] | None) -> list[Notice]:
    if not ranks.elastic:
        return []
    if groups is None:
        message = "an elastic checkpoint: it holds no hyper-parameters"
        return [warning("hyperparameter-missing", message)]
    message = (
        "an elastic checkpoint stores no hyper-parameters of groups: they are taken from the "
        "ds_config and the scheduler"
    )
    return [warning("value-assumed", message)]


# -- the optimizer: its name, its step, the counters beside it


STEPS_OF = "zckpt_optimizer"
"""Key in zckpt's files: the class that `--optimizer` named; it decides where the step is kept."""


def stated_optimizer(
    ranks: EngineStates,
    buffers: Sequence[FlatBuffer],
    groups: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    """The optimizer's name: from the ds_config, else inferred from the keys of its state."""
    optimizer_type = nested(ranks.config, "optimizer", "type")
    if isinstance(optimizer_type, str):
        return optimizer_type
    states: dict[int, set[str]] = {group: set() for group, _ in enumerate(groups or ())}
    for buffer in buffers:
        slots = {slot.name for slot in buffer.slots} - {"master"}
        keys = map(str, (*buffer.partition_values, *buffer.other))
        states.setdefault(buffer.group, set()).update(slots, buffer.scalars, keys)
    return name_of_groups([*states.values()], groups)


def step_place(ranks: EngineStates, buffers: Sequence[FlatBuffer]) -> StepPlace | None:
    """Where the base optimizer keeps the step that it uses: in its state, or in param groups.

    If the optimizer uses the step in its state, param groups may have a step that it does not use:
    that one is the result's `stale`. None if there is no step.
    """
    place = next((buffer.step_place for buffer in buffers if buffer.step_place), None)
    if place is None:
        return None
    place = replace(place, optimizer=_named_optimizer(ranks, place))
    if place.where == "group":
        return replace(place, times=_times(ranks, buffers)) if ranks.partitioned else place
    stale = ranks.groups(0)[0].get("step", ranks.first.get("base_optimizer_state_step"))
    return replace(place, stale=stale)


def _times(ranks: EngineStates, buffers: Sequence[FlatBuffer]) -> int:
    """By how much one update increases the step in the param groups of stage 3 (0.19.8).

    Usually it is the number of sub-groups: the engine calls the optimizer once for each sub-group,
    and every call increases the step of all groups.
    """
    if not all("bias_correction" in group for group in ranks.groups(0)):
        return len(buffers)
    # the FusedAdams of Apex and TransformerEngine, whose groups have `bias_correction`, skip groups
    # that are empty during a call
    return max(Counter(buffer.group for buffer in buffers).values())


def _named_optimizer(ranks: EngineStates, place: StepPlace) -> str | None:
    """The optimizer that `--optimizer` or else the ds_config named; None if neither did.

    Also None if the ds_config's optimizer does not keep its step at `place`.
    """
    if named := ranks.optimizers[0].value.get(STEPS_OF) or ranks.first.get(STEPS_OF):
        return str(named)
    optimizer_type = nested(ranks.config, "optimizer", "type")
    # from 0.6.5 on, no optimizer that the ds_config names keeps its step in groups: if the step is
    # there, the program made its own optimizer, and the engine ignored the ds_config's
    is_old = ranks.version is not None and version_numbers(ranks.version) < (0, 6, 5)
    return (
        optimizer_type
        if isinstance(optimizer_type, str) and (is_old or place.where == "state")
        else None
    )


def counters(ranks: EngineStates) -> list[Sighting]:
    """The counters of the engine and of its scheduler: for each, its key in the file and its value.

    The optimizer does not use these counters, but its own step. They differ from that step after
    skipped fp16 steps and warm starts.
    """
    sightings = steps.counter_sightings("engine", ranks.model, ("global_steps", "skipped_steps"))
    scheduler = ranks.model.get("lr_scheduler")
    if isinstance(scheduler, dict):
        keys = (*steps.SCHEDULER_COUNTERS, "last_batch_iteration")
        sightings += steps.counter_sightings("lr_scheduler", scheduler, keys)
    return sightings


def ahead_of_counters(
    ranks: EngineStates, parameters: Mapping[str, Parameter], place: StepPlace | None
) -> list[Notice]:
    """A warning if the optimizer has counted more updates than the engine.

    One more is accepted: before 0.13.2 DeepSpeed began with an extra update.
    """
    step_of = {name: each.step for name, each in parameters.items() if each.step is not None}
    last = max(step_of, key=lambda name: step_of[name], default="")
    model, counted = ranks.models[0], ranks.model.get("global_steps")
    times = 1 if place is None else place.times
    if not last or model is ranks.optimizers[0] or not isinstance(counted, int):
        return []
    # the engine may be ahead: it also counts skipped fp16 steps, and goes on when a program
    # resumes without optimizer states
    if step_of[last] <= (counted + 1) * times:
        return []
    message = (
        f"{model.path} counts {counted} steps, but {last} in "
        f"{os.path.basename(ranks.optimizers[0].path)} has step {step_of[last]}: model and "
        "optimizer are of different saves, unless your program has reset the counter"
    )
    return [warning("steps-disagree", message, subject=last, file=model.path)]
