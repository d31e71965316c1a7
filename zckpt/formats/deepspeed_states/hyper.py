"""Hyper-parameters and states that the target's optimizer needs and a source may lack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...core.checkpoint.dtypes import FLOATS, NUMBERS
from ...core.checkpoint.manifest import Manifest
from ...errors import MissingData, UnsupportedCheckpoint, UnsupportedState, WrongOption, listed
from ...training.hyperparameters import are_given, are_inferred, given_groups
from ...training.optimizers import (
    ADAM,
    TORCH,
    check_moments,
    is_of_muon,
    known_optimizer,
    likely_optimizer,
    plain_name,
)
from ...training.options import DROP_STATE, OPTIMIZER, Options
from ...training.steps import kept_place
from .engine import TargetEngine
from .options import CONFIG
from .states import WRAPPERS

# keys of groups beside ADAM's, by the class that `--optimizer` asks for
CLASSES: dict[str, dict[str, Any]] = {
    "torch": {"amsgrad": False, **TORCH, "fused": None},
    "deepspeed-cpu-adam": {"bias_correction": True, "amsgrad": False},
    "deepspeed-fused-adam": {"bias_correction": True},
    "apex-fused-adam": {"bias_correction": True},
}
# keys that select an implementation and do not change the training
OF_IMPLEMENTATIONS = frozenset((*TORCH, "fused", "bias_correction", "decoupled_weight_decay"))


def optimizer_name(engine: TargetEngine, source: Manifest) -> str:
    """The target's base optimizer as `plain_name` spells it: "adamw"; "" if nothing names it."""
    return plain_name(engine.optimizer) if engine.optimizer else likely_optimizer(source)


def adam_class(engine: TargetEngine, source: Manifest) -> str | None:
    """The class of Adam whose param groups and steps are written, as `--optimizer` names it.

    `--optimizer` decides, else the ds_config. None if the engine makes no Adam. Also None if a
    source of DeepSpeed states all hyper-parameters, and the user gives neither `--optimizer` nor
    `--ds-config`: then its groups and steps are kept.
    """
    if engine.options[OPTIMIZER]:
        return engine.options[OPTIMIZER]
    if _is_complete(engine, source) and engine.options[CONFIG] is None:
        return None
    return engine.adam_class


FLAT, UNFLATTENED = WRAPPERS
FUSED = ("deepspeed-fused-adam", "apex-fused-adam")


def wrapper(engine: TargetEngine, source: Manifest) -> str | None:
    """The engine's class that wraps the optimizer in a target of stage 0; None for fp32.

    FP16_Optimizer, which flattens groups, wraps DeepSpeed's and Apex's FusedAdam.
    FP16_UnfusedOptimizer wraps all other optimizers (0.19.8, engine.py
    `_configure_fp16_optimizer`).
    """
    if engine.dtype == "F32":
        return None
    before, asked = engine.before, engine.options[OPTIMIZER]
    by_class = engine.adam_class if asked is None else asked
    is_stated = asked is not None or (engine.options[CONFIG] is not None and engine.optimizer)
    if not is_stated and before is not None and before.optimizer_class in WRAPPERS:
        return before.optimizer_class
    if is_stated or engine.optimizer:
        return FLAT if by_class in FUSED else UNFLATTENED
    # a FusedAdam shows in the place where the source's optimizer keeps its step
    place, is_adam = kept_place(source), optimizer_name(engine, source) in ("adam", "adamw")
    is_fused = place.where == "group" or place.stale is not None
    return FLAT if is_adam and is_fused else UNFLATTENED


def shares_steps(engine: TargetEngine, source: Manifest) -> bool:
    """Whether the target stores one step for all parameters of a group.

    ZeRO and FP16_Optimizer store one, because their buffers are flat. So do optimizers without flat
    buffers that keep the step in groups, or in the state of a group's last parameter (DeepSpeed's
    FusedAdam, 0.19.8).
    """
    if not engine.whole or wrapper(engine, source) == FLAT:
        return True
    name, place = adam_class(engine, source), kept_place(source)
    return name in FUSED or place.where == "group" or place.stale is not None


def _is_complete(engine: TargetEngine, source: Manifest) -> bool:
    stored = source.groups is not None and not are_inferred(source)
    return stored and engine.before is not None


def complete_groups(
    engine: TargetEngine, source: Manifest
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Completes all groups with the keys that the target's optimizer needs.

    Returns the groups, and the values that zckpt assumed: {"eps": 1e-08}. Missing values come from
    `--group-defaults`, then from the ds_config, then from the optimizer's own defaults. Raises
    WrongOption, MissingData and UnsupportedCheckpoint.
    """
    options, name, adam = engine.options, optimizer_name(engine, source), adam_class(engine, source)
    inferred, complete = are_inferred(source), _is_complete(engine, source)
    has_defaults = bool(known_optimizer(name).defaults)
    is_known = has_defaults or options[OPTIMIZER] or options.weights_only
    if source.groups is None and not inferred and not is_known:
        raise WrongOption(
            "optimizer-unsupported",
            "DeepSpeed's ZeRO does not support the source's optimizer: "
            f"{source.optimizer or 'no file names it'}",
            hint="continue with Adam: --optimizer torch; or write only the weights: --weights-only",
        )
    if source.groups and not inferred:
        _refuse_given(source, options)
    needed = _needed(engine, source, name, adam)
    params_in_config = _from_config(engine, needed) if not complete else {}
    assumed: dict[str, Any] = {}
    groups = given_groups(source, options)
    tagged = all("use_muon" in group for group in groups)
    copied = complete and engine.whole  # without ZeRO the program's own optimizer continues
    has_muon = name == "muon" or (not complete and any(map(is_of_muon, groups)))
    if has_muon and not (tagged or copied or options.weights_only):
        raise MissingData(
            "hyperparameter-missing",
            f"{source.root} does not say which groups Muon updates and which Adam",
            hint="state it: --group-defaults 0:use_muon=true --group-defaults 1:use_muon=false; "
            "or write only the weights: --weights-only",
            file=source.root,
        )
    for place, group in enumerate(groups):
        if inferred and not are_given(source):
            scheduled = {key: group[key] for key in _scheduled(source) if key in group}
            group |= params_in_config | scheduled | options.defaults_of(place, len(groups))
        for key, value in params_in_config.items():
            group.setdefault(key, value)
        if complete and adam is None:
            continue
        for key, value in needed.items():
            if key not in group:
                group[key] = value
                if key in ADAM or not (complete or key in OF_IMPLEMENTATIONS):
                    assumed[key] = value
    if not options.weights_only:
        _refuse_groups_of_adagrad(engine, name, groups)
    return groups, assumed


def _refuse_groups_of_adagrad(
    engine: TargetEngine, name: str, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UnsupportedCheckpoint for torch's Adagrad with several groups under ZeRO.

    The engine would fail when it trains or loads (0.19.8, stages 1, 2 and 3).
    """
    # the engine rebuilds the optimizer with one group (`initialize_optimizer_states`); DeepSpeed's
    # own CPUAdagrad supports several groups, which have no `lr_decay`
    of_torch = name == "adagrad" and any("lr_decay" in group for group in groups)
    if of_torch and len(groups) > 1 and not (engine.whole or engine.offloads):
        raise UnsupportedCheckpoint(
            "optimizer-unsupported",
            "with torch's Adagrad, DeepSpeed's ZeRO supports only one param group, but the source "
            f"has {len(groups)}",
            hint="write for --stage 0, which keeps all groups, or only the weights: --weights-only",
        )


def _scheduled(source: Manifest) -> tuple[str, ...]:
    """The hyper-parameters that torch's scheduler in the source sets: the learning rates.

    Empty if the source has no such scheduler.
    """
    scheduler = source.state.get("lr_scheduler")
    return ("lr", "initial_lr") if isinstance(scheduler, dict) and "_last_lr" in scheduler else ()


def _refuse_given(source: Manifest, options: Options) -> None:
    groups = source.groups or ()
    for place, group in enumerate(groups):
        if twice := sorted(set(options.defaults_of(place, len(groups))) & set(group)):
            raise WrongOption(
                "option-not-applicable",
                f"--group-defaults sets {', '.join(twice)}, which the source states already",
                hint="leave these keys out of --group-defaults; to replace the source's values: "
                f"--set-group {','.join(f'{key}=...' for key in twice)}",
            )


def _needed(engine: TargetEngine, source: Manifest, name: str, adam: str | None) -> dict[str, Any]:
    """The hyper-parameters that each group of the target needs, with default values.

    `name` is the result of `optimizer_name`, `adam` that of `adam_class`.
    """
    needed = dict(known_optimizer(name).defaults)
    if adam is not None:
        decay = {"weight_decay": needed["weight_decay"]} if adam == "torch" and needed else {}
        needed = {**ADAM, **decay, **CLASSES[adam]}
        if adam == "torch" and engine.adam_class == "torch":
            needed["decoupled_weight_decay"] = engine.decouples_decay
    elif name in ("adam", "adamw") and not engine.optimizer:
        # the program makes the Adam, so its class is unknown: other classes than torch's need this
        needed["bias_correction"] = True
        # torch's Adam and AdamW differ only in this value: the universal loader would turn one into
        # the other
        del needed["decoupled_weight_decay"]
    slots = source.slots
    for key, slot in (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg")):
        if key in needed and slot in slots:
            needed[key] = True
    return needed


def _from_config(engine: TargetEngine, needed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `needed` hyper-parameters that the ds_config states for its optimizer."""
    in_config = engine.option("optimizer", "params")
    params = in_config.items() if isinstance(in_config, dict) else ()
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in params
        if value != "auto" and key in needed
    }


def one_type(key: str, dtypes: Sequence[str]) -> str:
    """The one dtype with which a state of all parameters fits into a flat buffer.

    `dtypes` are the state's dtypes in the source, one per parameter. Different floats become F64 or
    F32. Raises UnsupportedState for a mix of integers and other dtypes.
    """
    types = {*dtypes}
    if len(types) == 1:
        return dtypes[0]
    if not types <= FLOATS & NUMBERS:
        raise UnsupportedState(
            "state-unsupported",
            f"the optimizer's {key} has the types {listed(sorted(types))} in one group, and a flat "
            "buffer has one type",
            hint=f"to go on without it: {DROP_STATE.flag} {key} (or --weights-only)",
        )
    return "F64" if "F64" in types else "F32"


def _no_states(source: Manifest) -> MissingData:
    root, ways = source.run.origin.root, "write only the weights: --weights-only"
    if root is None:
        return MissingData(
            "optimizer-missing",
            f"{source.root} holds no optimizer state",
            hint=ways,
            file=source.root,
        )
    if source.notices.likely:
        ways = f"name it: --root {root}={source.notices.likely[0]}; or {ways}"
    return MissingData(
        "optimizer-missing",
        f"{source.root}: nothing shows that an optimizer trains the weights in {root}",
        hint=ways,
        file=source.root,
    )


def are_of_families(name: str, source: Manifest) -> bool | None:
    """Whether the optimizer `name` can continue from the states of the source's optimizer.

    Adam can continue from AdamW's states, for example. `name` is spelled as by `plain_name`. None
    if zckpt does not know one of the two optimizers.
    """
    before = [plain_name(each) for each in (source.optimizer or "").split(", ")]
    family = known_optimizer(name).family
    families = {known_optimizer(each).family for each in before} - {None}
    if not (family and families):
        return None
    # DeepSpeed's Muon updates some groups as Adam does
    return family in families and families <= {family, *(["adam"] if family == "muon" else [])}


def is_other_optimizer(engine: TargetEngine, source: Manifest) -> bool:
    """Whether the engine makes an optimizer that cannot continue from the source's states.

    If zckpt does not know one of the optimizers, their names are compared. False if the engine's or
    the source's optimizer is not named anywhere.
    """
    if None in (source.optimizer, engine.optimizer):
        return False
    name = plain_name(engine.optimizer or "")
    fits = are_of_families(name, source)
    return name != plain_name(source.optimizer or "") if fits is None else not fits


def check_states(engine: TargetEngine, source: Manifest, states: Collection[str]) -> None:
    """Raises if the target's optimizer needs states that the source does not have.

    `states` are the names of the states that the target gets from the source, such as "exp_avg".
    Raises MissingData if the source has no optimizer state at all, otherwise WrongOption.
    """
    listing = ", ".join(sorted(states)) or "none"
    if not states and source.groups is None and not are_inferred(source):
        raise _no_states(source)
    name = optimizer_name(engine, source)
    if states and engine.optimizer and are_of_families(name, source) is False:
        raise WrongOption(
            "ds-config-wrong",
            f"the ds_config's optimizer is {engine.optimizer}, but the source's is "
            f"{source.optimizer}",
            hint="use the optimizer of the source, or --weights-only",
        )
    missing = [slot for slot in known_optimizer(name).states if slot not in states]
    if missing and states and (engine.optimizer or engine.options[OPTIMIZER]):
        raise WrongOption(
            "ds-config-wrong",
            f"the ds_config's optimizer {engine.optimizer or name} keeps {', '.join(missing)}, "
            f"which the source does not hold (it holds {listing})",
            hint="use the optimizer of the source, or --weights-only",
        )
    check_moments(engine.options[OPTIMIZER], states)
