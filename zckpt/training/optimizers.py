"""Which hyper-parameters an optimizer needs in every group, and their defaults.

torch 2.13, DeepSpeed 0.19.8. If a source did not store one, its default is taken, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.facts import FlatBufferEngine
from ..core.inert import to_json
from ..core.manifest import Manifest
from ..errors import listed
from .options import Options

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {**ADAM, "amsgrad": False, **TORCH, "fused": None, "decoupled_weight_decay": False},
    "adamw": {
        **ADAM,
        "weight_decay": 1e-2,
        "amsgrad": False,
        **TORCH,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    "nadam": {
        **ADAM,
        "lr": 2e-3,
        "momentum_decay": 4e-3,
        "decoupled_weight_decay": False,
        **TORCH,
    },
    "rmsprop": {
        "lr": 1e-2,
        "momentum": 0,
        "alpha": 0.99,
        "eps": 1e-8,
        "centered": False,
        "weight_decay": 0,
        "capturable": False,
        "foreach": None,
        "maximize": False,
        "differentiable": False,
    },
    "adagrad": {
        "lr": 1e-2,
        "lr_decay": 0,
        "eps": 1e-10,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "foreach": None,
        "maximize": False,
        "differentiable": False,
        "fused": None,
    },
    "sgd": {
        "lr": 1e-3,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    },
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
}


def plain_name(name: str) -> str:
    """An optimizer's name in lower case, without the words for its implementation."""
    return re.sub(r"^(deepspeed|fused|cpu)+", "", name.lower())


def are_inferred(source: Manifest) -> bool:
    """Whether the hyper-parameters come from a config and a scheduler, not from groups.

    DeepSpeed's elastic files store none (0.19.8).
    """
    return isinstance(source.engine, FlatBufferEngine) and source.engine.elastic


def are_given(source: Manifest) -> bool:
    """Whether the user has stated the hyper-parameters of a source that stores none."""
    return isinstance(source.engine, FlatBufferEngine) and source.engine.given


def given_groups(source: Manifest, options: Options) -> list[dict[str, Any]]:
    """Every group, completed with `--group-defaults`.

    Stored hyper-parameters take precedence over `--group-defaults`, inferred ones do not.
    """
    count = 1 + max((item.group or 0 for item in source.parameters.values()), default=0)
    groups: Sequence[dict[str, Any]] = source.groups or [{}] * count
    given = [options.defaults_of(number, len(groups)) for number in range(len(groups))]
    pairs = zip(groups, given, strict=True)
    if are_inferred(source):
        return [{**group, **own} for group, own in pairs]
    return [{**own, **group} for group, own in pairs]


def unused_defaults(source: Manifest, options: Options) -> list[str]:
    """A warning about `--group-defaults` that no group takes: the source stores other values."""
    if not source.groups or are_inferred(source):
        return []
    given = [
        options.defaults_of(number, len(source.groups)) for number in range(len(source.groups))
    ]
    pairs = list(zip(source.groups, given, strict=True))
    unused = {
        key: group[key]
        for group, own in pairs
        for key, value in own.items()
        if key in group and to_json(group[key]) != to_json(value)
        if all(key in each for each, theirs in pairs if key in theirs)
    }
    if not unused:
        return []
    stored = ", ".join(f"{key}={value}" for key, value in unused.items())
    return [
        f"--group-defaults {listed(list(unused))} is not used: the source stores {stored}. Change "
        "it in the program that resumes"
    ]


def torch_groups(source: Manifest, options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """Every group with all keys of torch's own optimizer, and warnings about assumed values.

    Adam of DeepSpeed and Apex decays weights as AdamW does, unless its config says otherwise.
    """
    groups = given_groups(source, options)
    name = plain_name(source.optimizer or _likely(source.groups))
    needed = dict(DEFAULTS.get(name, {}))
    if name == "adam" and any("bias_correction" in group for group in groups):
        needed["decoupled_weight_decay"] = _adam_w_mode(source)
    assumed = {
        key: value
        for key, value in needed.items()
        if key in ("lr", "betas", "eps", "weight_decay", "momentum")
        and any(key not in group for group in groups)
    }
    warnings = []
    if assumed:
        values = ", ".join(f"{key}={value}" for key, value in assumed.items())
        warnings.append(
            f"hyper-parameters that the source does not hold are {name}'s defaults: {values}"
        )
    return [_typed({**needed, **group}) for group in groups], warnings


def _likely(groups: Sequence[Mapping[str, Any]] | None) -> str:
    """The optimizer by its groups, if its states do not show it: AdamW unless they contradict."""
    own = {"amsgrad", "bias_correction"}  # of torch's Adam; of DeepSpeed's and Apex's
    known = all("lr" not in group or own & group.keys() for group in groups or ())
    return "AdamW" if known else "unknown"


def _adam_w_mode(source: Manifest) -> bool:
    params: Any = source.engine.config if isinstance(source.engine, FlatBufferEngine) else {}
    for key in ("optimizer", "params", "adam_w_mode"):
        params = params.get(key) if isinstance(params, dict) else None
    return params is not False


def _typed(group: dict[str, Any]) -> dict[str, Any]:
    """`betas` as a tuple, as in torch; it is a list if it comes from a JSON config."""
    return {
        key: tuple(value) if key == "betas" and isinstance(value, Sequence) else value
        for key, value in group.items()
    }
