"""Chooses the hyper-parameters of the optimizer groups in a target.

A value that the source stores comes first, then the user's value (`--group-defaults`), then the
default of torch's own optimizer, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.inert import nested, to_json
from ..core.checkpoint.manifest import Manifest
from ..errors import Notice, listed, warning
from .optimizers import known_optimizer, likely_optimizer
from .options import Options


def are_inferred(source: Manifest) -> bool:
    """Whether the hyper-parameters of the source come from its ds_config and scheduler.

    This is so for DeepSpeed's elastic files, because their optimizer groups contain no
    hyper-parameters (0.19.8).
    """
    return isinstance(source.run.engine, FlatBufferEngine) and source.run.engine.elastic


def are_given(source: Manifest) -> bool:
    """Whether the hyper-parameters come from the user, because the source's files have none."""
    return isinstance(source.run.engine, FlatBufferEngine) and source.run.engine.given


def given_groups(source: Manifest, options: Options) -> list[dict[str, Any]]:
    """The hyper-parameters of every group, with those of `--group-defaults` added.

    A value that the source stores takes precedence over `--group-defaults`. A value that zckpt
    inferred (see `are_inferred`) does not.
    """
    count = 1 + max((item.group or 0 for item in source.parameters.values()), default=0)
    groups: Sequence[dict[str, Any]] = source.groups or [{}] * count
    pairs = zip(groups, options.defaults(len(groups)), strict=True)
    if are_inferred(source):
        return [{**group, **own} for group, own in pairs]
    return [{**own, **group} for group, own in pairs]


def unused_defaults(source: Manifest, options: Options, replaceable: bool) -> list[Notice]:
    """Warns about values of `--group-defaults` that change nothing.

    This happens if the source stores another value for a hyper-parameter. If `replaceable`, the
    target supports `--set-group`, which the warning proposes.
    """
    if not source.groups or are_inferred(source):
        return []
    pairs = list(zip(source.groups, options.defaults(len(source.groups)), strict=True))
    unused = {
        key: group[key]
        for group, defaults_of_group in pairs
        for key, value in defaults_of_group.items()
        if key in group and to_json(group[key]) != to_json(value)
        if all(key in each for each, theirs in pairs if key in theirs)
    }
    if not unused:
        return []
    stored = ", ".join(f"{key}={value}" for key, value in unused.items())
    way = f"Replace it with --set-group {','.join(f'{key}=...' for key in unused)}"
    return [
        warning(
            "option-without-effect",
            f"--group-defaults {listed(list(unused))} is not used: the source stores {stored}. "
            f"{way if replaceable else 'Change it in the program that resumes'}",
            subject="--group-defaults",
        )
    ]


def torch_groups(
    source: Manifest, options: Options, named: str | None = None
) -> tuple[list[dict[str, Any]], list[Notice]]:
    """Completes all groups with the hyper-parameters of torch's own optimizer.

    Also returns warnings about assumed values. `named` is the class given with `--optimizer`, which
    is always an Adam. DeepSpeed's and Apex's Adam decay weights as AdamW does, unless the
    configuration states otherwise.
    """
    groups = given_groups(source, options)
    name = likely_optimizer(source) or ("adam" if named else "")
    needed = dict(known_optimizer(name).defaults)
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
        message = f"hyper-parameters that the source does not store get {name}'s defaults: {values}"
        warnings.append(warning("value-assumed", message, subject=next(iter(assumed))))
    complete = [{**needed, **group} for group in groups]
    for group in complete:  # a list if it comes from a JSON config
        if isinstance(betas := group.get("betas"), Sequence):
            group["betas"] = tuple(betas)
    return complete, warnings


def _adam_w_mode(source: Manifest) -> bool:
    config = source.run.engine.config if isinstance(source.run.engine, FlatBufferEngine) else {}
    return nested(config, "optimizer", "params", "adam_w_mode") is not False
