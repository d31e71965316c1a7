"""Param groups, steps, loss scale and other values in a target's optimizer files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.checkpoint import agreement
from ...core.checkpoint.inert import Foreign, Global
from ...errors import InconsistentCheckpoint
from ...files.torchshell import Storages
from ...training.options import OPTIMIZER
from . import estimates
from .engine import TargetEngine
from .manifest import INFERRED, STEPS_OF
from .target import DeepSpeedTarget, TargetBuffer

SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def own_statements(target: DeepSpeedTarget) -> dict[str, Any]:
    """Facts that zckpt writes into a target's files under keys of its own; the engine ignores them.

    They are the parameter names that zckpt inferred, and the optimizer that `--optimizer` names.
    """
    inferred, named = target.source.notices.inferred, target.engine.options[OPTIMIZER]
    return {
        **({INFERRED: list(inferred)} if inferred else {}),
        **({STEPS_OF: named} if named and not target.options.weights_only else {}),
    }


def clipping(target: DeepSpeedTarget) -> dict[str, Any]:
    """The item `clip_grad` of an optimizer file: the source's clipping norm, else the ds_config's.

    Empty if neither states a norm. The engine then keeps its own (1.0 unless its config differs).
    """
    value = target.optimizer_state.get("clip_grad", target.engine.option("gradient_clipping"))
    return {} if value is None else {"clip_grad": value}


def stage_enum(target: DeepSpeedTarget) -> Foreign:
    return Foreign(Global("deepspeed.runtime.zero.config.ZeroStageEnum"), (target.engine.stage,))


def base_state(
    target: DeepSpeedTarget,
    states: Mapping[int, Any],
    storages: Storages,
    rank: int = 0,
    numbers: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The base optimizer's state dict for one rank: {"state": ..., "param_groups": ...}.

    states      the states of each member of a group, by its number: {0: {"exp_avg": ...}}
    storages    collects the storages of the new file's tensors
    numbers     the numbers of each group's members: [[0, 1], [2]]. None if the members are the flat
                buffers, whose numbers are their indices in `target.buffers`
    """
    groups = []
    for number, group in enumerate(target.groups):
        places = [place for place, flat in enumerate(target.buffers) if flat.group == number]
        members = places if numbers is None else list(numbers[number])
        stepped = group_step(target, [target.buffers[place] for place in places], storages)
        rank_estimates = estimates.of_rank(target.source, number, rank, storages)
        groups.append(
            target.thawed(group, storages) | rank_estimates | stepped | {"params": members}
        )
    return {
        **target.source.states.numbers("beside"),
        "state": {place: state for place, state in states.items() if state}
        | target.source.states.numbers("among"),
        "param_groups": groups,
    }


# -- steps, where the target's optimizer looks for them


def numbers(target: DeepSpeedTarget, buffer: TargetBuffer, storages: Storages) -> dict[str, Any]:
    """The single numbers in one flat buffer's state: {"step": 7, "mu_product": 0.98}.

    A number that the optimizer keeps as a tensor becomes a tensor. Its storage is added to
    `storages`, which collects those of the new file.
    """
    values: dict[str, Any] = {}
    if buffer.step is not None and target.step_place.where == "state":
        step = buffer.step if target.counts(buffer) else 0
        values["step"] = typed_step(target, step, storages)
    for key, scalar in buffer.scalars.items():
        values[key] = target.thawed(scalar.unwrapped(), storages)
    return values


def typed_step(target: DeepSpeedTarget, step: agreement.Step, storages: Storages) -> Any:
    """A step in the form in which the target's optimizer stores it: a Python number or a tensor.

    The storage of a tensor is added to `storages`, which collects those of the new file.
    """
    return target.thawed(target.step_place.number(step).unwrapped(), storages)


def group_step(
    target: DeepSpeedTarget, members: Iterable[TargetBuffer], storages: Storages
) -> dict[str, Any]:
    """The step to store in a param group: {"step": 7}; empty if groups store no step.

    `members` are the group's flat buffers. Raises InconsistentCheckpoint if they have different
    steps. `storages` collects the storages of the new file's tensors: a step may be a tensor.
    """
    place = target.step_place
    if target.options.weights_only:
        return {}
    if place.where == "group":
        values = {buffer.step for buffer in members if buffer.step is not None}
        if len(values) > 1:
            raise InconsistentCheckpoint(
                "one-value-needed",
                f"the optimizer keeps one step per group, but the source has several: "
                f"{sorted(values)}",
            )
        return {"step": typed_step(target, values.pop(), storages)} if values else {}
    return {} if place.stale is None else {"step": target.thawed(place.stale, storages)}


# -- loss scale

DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")


def loss_scaling(target: DeepSpeedTarget, storages: Storages) -> dict[str, Any]:
    """The items of a ZeRO optimizer file that hold the loss scaler.

    The source's scaler is kept if source and target have the same weight type. Otherwise, or if the
    source has none, it is a new scaler. `storages` collects the storages of the new file's tensors.
    """
    kept = target.optimizer_state
    if target.engine.same_dtype and isinstance(kept.get("loss_scaler"), Foreign):
        return {
            "loss_scaler": target.thawed(kept["loss_scaler"], storages),
            "dynamic_loss_scale": kept.get("dynamic_loss_scale", False),
            "overflow": kept.get("overflow", False),
        }
    scaler, dynamic = _fresh_scaler(target.engine)
    if target.engine.same_dtype and "cur_scale" in kept:  # of stage 0, which has no scaler object
        dynamic = bool(kept.get("dynamic_loss_scale"))
        scaler = _scaler_with(target.engine, kept, dynamic)
    return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}


def whole_scaling(target: DeepSpeedTarget) -> dict[str, Any]:
    """The numbers of the loss scaler in a model file of stage 0: {"cur_scale": 65536.0, ...}.

    They are the source's if the target has the source's weight type, otherwise a new scaler's.
    """
    kept = target.optimizer_state
    scaler = kept.get("loss_scaler")
    values = scaler.state if isinstance(scaler, Foreign) else None
    if not target.engine.same_dtype:
        values = None
    elif "cur_scale" in kept:
        values = {**kept, "dynamic": kept.get("dynamic_loss_scale")}
    if not isinstance(values, Mapping) or "cur_scale" not in values:
        values = _fresh_scaler(target.engine)[0].state
    assert isinstance(values, Mapping)
    dynamic = bool(values.get("dynamic", "min_scale" in values))
    # the engine stores these for bf16 too, with the number of updates as `cur_iter` (0.19.8,
    # fp16/unfused_optimizer.py `state_dict`)
    return {
        "dynamic_loss_scale": dynamic,
        "cur_scale": values["cur_scale"],
        "cur_iter": values.get("cur_iter", target.counters["global_steps"]),
        **({key: values[key] for key in DYNAMIC if key in values} if dynamic else {}),
    }


def _scaler_with(engine: TargetEngine, kept: Mapping[str, Any], dynamic: bool) -> Foreign:
    """A loss scaler object made from the scaler's numbers in a stage-0 source (`kept`).

    For a dynamic scaler, the ds_config gives the numbers that `kept` lacks.
    """
    if not dynamic:
        return _static(float(kept["cur_scale"]))
    numbers = {key: kept[key] for key in ("cur_scale", "cur_iter", *DYNAMIC) if key in kept}
    return _dynamic({**_dynamic_state(engine), **numbers})


def _fresh_scaler(engine: TargetEngine) -> tuple[Foreign, bool]:
    """A new loss scaler as the engine makes it, and whether it is dynamic.

    DeepSpeed 0.19.8, fp16/loss_scaler.py.
    """
    static = engine.number(0.0, "fp16", "loss_scale") if engine.dtype == "F16" else 1.0
    if static:
        return _static(float(static)), False
    return _dynamic(_dynamic_state(engine)), True


def _static(scale: float) -> Foreign:
    return Foreign.instance(f"{SCALERS}.LossScaler", cur_scale=scale, dynamic=False)


def _dynamic(state: Mapping[str, Any]) -> Foreign:
    return Foreign.instance(f"{SCALERS}.DynamicLossScaler", **state)


def _dynamic_state(engine: TargetEngine) -> dict[str, Any]:
    shift = engine.number(2, "fp16", "hysteresis")
    return {
        "cur_scale": 2.0 ** engine.number(16, "fp16", "initial_scale_power"),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": engine.number(1000, "fp16", "loss_scale_window"),
        "min_scale": engine.number(1, "fp16", "min_loss_scale"),
        "delayed_shift": shift,
        "cur_hysteresis": shift,
        "consecutive_hysteresis": bool(engine.option("fp16", "consecutive_hysteresis")),
        "raise_error_at_min_scale": True,
        "dtype": Global("torch.float16"),
    }
