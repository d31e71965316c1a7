"""Hyper-parameters that a source never stored, and states that an optimizer cannot lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import MissingData, WrongOption
from ...hyper import ADAM, DEFAULTS, TORCH, plain_name
from ...manifest import Manifest
from .engine import Engine

# what groups hold beside ADAM's, by the class that `--optimizer` asks for
CLASSES: dict[str, dict[str, Any]] = {
    "torch": {"amsgrad": False, **TORCH, "fused": None},
    "deepspeed-cpu-adam": {"bias_correction": True, "amsgrad": False},
    "deepspeed-fused-adam": {"bias_correction": True},
    "apex-fused-adam": {"bias_correction": True},
}
FAMILIES = {"adam": "adam", "adamw": "adam"} | {
    name: name for name in ("nadam", "rmsprop", "adagrad", "sgd", "lion", "muon")
}
NEEDED = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg",),
}
NEEDED_NUMBERS = {"nadam": ("mu_product",)}


def optimizer_name(engine: Engine, source: Manifest) -> str:
    """The target's base optimizer in lower case, without the words for who implements it."""
    return plain_name(engine.optimizer or source.optimizer or "AdamW")


def complete_groups(
    engine: Engine, source: Manifest, count: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every group with all that the target's optimizer needs, and what had to be assumed.

    Groups that an engine wrote are complete. Elastic files and other engines' are filled up from
    `--group-defaults`, then from the optimizer's own defaults.
    """
    options, name = engine.options, optimizer_name(engine, source)
    elastic = bool(engine.before.get("elastic"))
    complete = source.groups is not None and bool(engine.before) and not elastic
    groups = [dict(group) for group in source.groups or [{}] * count]
    needed = dict(DEFAULTS.get(name, {}))
    known = needed or options.optimizer or options.weights_only
    if source.groups is None and not elastic and not known:
        raise WrongOption(
            f"the source's {source.optimizer} is no optimizer of DeepSpeed's ZeRO",
            hint="go on with Adam: --optimizer torch; or write --weights-only",
        )
    if options.optimizer:
        adam = {key: needed.get(key, value) for key, value in ADAM.items()}
        needed = {**adam, **CLASSES[options.optimizer]}
        if options.optimizer == "torch":
            needed["decoupled_weight_decay"] = name == "adamw"
    assumed: dict[str, Any] = {}
    stated = engine.option("optimizer", "params")
    for group in groups:
        if (
            source.groups
            and not elastic
            and (twice := sorted(set(options.group_defaults) & set(group)))
        ):
            raise WrongOption(
                f"--group-defaults gives {', '.join(twice)}, which the source holds",
                hint="change hyper-parameters in the program that resumes",
            )
        if not complete and isinstance(stated, dict):
            told = {key: value for key, value in stated.items() if value != "auto"}
            told = {key: _hyper(value) for key, value in told.items() if key in needed}
            group |= told if elastic else {**told, **group}
        for key, value in options.group_defaults.items():
            group.setdefault(key, value)
        if complete and not options.optimizer:
            continue
        for key, value in needed.items():
            if key not in group:
                group[key] = value
                if key in ADAM or not complete:
                    assumed[key] = value
    return groups, assumed


def _hyper(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_states(engine: Engine, source: Manifest, held: Mapping[str, Any]) -> None:
    """Raises where the target's optimizer needs states that the source does not hold."""
    told = ", ".join(sorted(held)) or "none"
    if not held and source.groups is None:
        raise MissingData(f"{source.root} holds no optimizer state", hint="write --weights-only")
    name = optimizer_name(engine, source)
    before = plain_name(source.optimizer or "")
    families = FAMILIES.get(name), FAMILIES.get(before)
    if held and engine.optimizer and None not in families and families[0] != families[1]:
        raise WrongOption(
            f"the ds_config's optimizer is {engine.optimizer}, the source's is {source.optimizer}",
            hint="use the optimizer of the source, or --weights-only",
        )
    missing = [slot for slot in NEEDED.get(name, ()) if slot not in held]
    if missing and held and (engine.optimizer or engine.options.optimizer):
        raise WrongOption(
            f"the ds_config's optimizer {engine.optimizer or name} keeps {', '.join(missing)}, "
            f"which the source does not hold (it holds {told})",
            hint="use the optimizer of the source, or --weights-only",
        )
    if engine.options.optimizer and not {"exp_avg", "exp_avg_sq"} <= set(held):
        raise WrongOption(
            f"--optimizer {engine.options.optimizer} is an Adam; the source holds {told}"
        )
