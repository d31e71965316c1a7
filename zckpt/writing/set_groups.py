"""Replaces hyper-parameters of param groups, also where the files store them a second time.

    lr    in the group, its `initial_lr`, and the lists of rates in states of torch's schedulers

A warning names the values that no file keeps and those that a program sets itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.inert import Scalar, nested
from ..core.checkpoint.manifest import Manifest
from ..errors import Notice, WrongOption, counted, listed, warning
from ..formats.deepspeed_states.options import CONFIG
from ..formats.schedulers import schedulers_of, with_schedulers
from ..training import schedulers
from ..training.hyperparameters import are_inferred
from ..training.options import GROUPS_FROM, SET_GROUP, Options

OTHER_RATES = ("max_lr", "min_lr", "swa_lr")
"""Rates that torch's OneCycleLR and SWALR keep in groups beside `initial_lr`."""


def with_values(manifest: Manifest, options: Options) -> Manifest:
    """Sets the hyper-parameters of --set-group, wherever the files store them.

    Raises WrongOption for hyper-parameters or param groups that do not exist.
    """
    counts = {len(own.groups or ()) for own in manifest.rank_manifests}
    if 0 in counts or are_inferred(manifest):
        raise WrongOption(
            "option-not-applicable",
            f"--set-group: {manifest.root} stores no hyper-parameters of groups",
            hint=f"give them with --group-defaults, or take those of a run: {GROUPS_FROM.flag} RUN",
        )
    by_group = options.by_group(SET_GROUP)
    numbers = [key for key in by_group if isinstance(key, int)]
    if numbers and (len(counts) > 1 or max(numbers) >= max(counts)):
        raise WrongOption(
            "option-names-nothing",
            f"--set-group: there is no group {max(numbers)}: {manifest.root} has "
            f"{counted(max(counts), 'group')}, counted from 0"
            + (", and some ranks have fewer groups" if len(counts) > 1 else ""),
            hint=_known_keys(manifest),
        )
    shared = {key: value for key, value in by_group.items() if isinstance(key, str)}
    every = [group for own in manifest.rank_manifests for group in own.groups or ()]
    if strangers := [key for key in shared if not any(key in group for group in every)]:
        raise _no_such(strangers[0], manifest)

    def changed(rank_manifest: Manifest) -> Manifest:
        groups = []
        for number, group in enumerate(rank_manifest.groups or ()):
            values = {key: value for key, value in shared.items() if key in group}
            for key, value in by_group.get(number, {}).items():
                if key not in group:
                    raise _no_such(f"{number}:{key}", manifest)
                values[key] = value
            if "lr" in values and "initial_lr" in group:
                values.setdefault("initial_lr", values["lr"])
            new = {key: of_form(key, group[key], value) for key, value in values.items()}
            groups.append({**group, **new})
        return replace(rank_manifest, groups=tuple(groups)) if groups else rank_manifest

    result = manifest.map_ranks(changed) if manifest.ranks else changed(manifest)
    return _with_rates(result, options) if _sets(by_group, "lr") else result


def _sets(by_group: Mapping[Any, Any], key: str) -> bool:
    return key in by_group or any(key in own for own in by_group.values() if isinstance(own, dict))


def _no_such(key: str, manifest: Manifest) -> WrongOption:
    return WrongOption(
        "option-names-nothing",
        f"--set-group {key}: no such hyper-parameter in {manifest.root}",
        hint=_known_keys(manifest),
    )


def _known_keys(manifest: Manifest) -> str:
    groups = manifest.rank_manifests[0].groups or ()
    return "; ".join(f"group {n} has {listed(list(own), 30)}" for n, own in enumerate(groups))


def _with_rates(manifest: Manifest, options: Options) -> Manifest:
    """Copies the param groups' learning rates into the states of schedulers.

    Warns of schedulers that will set other rates.
    """
    groups = manifest.rank_manifests[0].groups or ()

    def rated(own: Manifest) -> Manifest:
        return with_schedulers(own, lambda each: schedulers.with_rates(each, groups))[0]

    result, unreached = with_schedulers(manifest, lambda each: schedulers.with_rates(each, groups))
    result = result.map_ranks(rated)
    lines = [*about_files(unreached), *_about_schedules(manifest, options)]
    return result.replace(warnings=(*result.notices.warnings, *lines))


def about_files(names: Sequence[str]) -> list[Notice]:
    return [
        warning(
            "program-must-set",
            f"{name} is copied unchanged, because it holds more than plain values: after the first "
            "update the scheduler sets the source's learning rates again, so change the rates in "
            "the program too",
            file=name,
            subject="lr",
        )
        for name in names
    ]


def _about_schedules(manifest: Manifest, options: Options) -> list[Notice]:
    """Warns about schedulers that will replace the learning rates that the user has set.

    They take their rates from the ds_config or the program. Other warnings name further values from
    which a scheduler computes rates.
    """
    first_rank, engine, config = manifest.rank_manifests[0], manifest.run.engine, options[CONFIG]
    if config is None and isinstance(engine, FlatBufferEngine):
        config = dict(engine.config)
    name, params = (nested(config, "scheduler", key) for key in ("type", "params"))
    if isinstance(name, str):
        keys = [key for key in params if "lr" in str(key)] if isinstance(params, dict) else []
        where = listed([f"scheduler.params.{key}" for key in keys] or ["scheduler.params"])
        message = (
            f"after the first update, {name} sets lr from the ds_config: change {where} in it too"
        )
        return [warning("program-must-set", message, subject="lr")]
    states, scheduler = schedulers_of(first_rank), first_rank.state.get("lr_scheduler")
    opaque = scheduler is not None and not isinstance(scheduler, dict)
    other_rates = [
        key for key in OTHER_RATES if any(key in group for group in first_rank.groups or ())
    ]
    lists = [key for key in schedulers.MAXIMA if any(key in state for state in states)]
    lines = []
    if opaque or not all(map(schedulers.keeps_rates, states)):
        lines.append(
            "the scheduler's state keeps no base rates: after the first update it sets the lr that "
            "the program built it with, so change the rate in the program too"
        )
    if other_rates:
        flags = " ".join(f"{SET_GROUP.flag} {key}=..." for key in other_rates)
        lines.append(
            f"the scheduler also uses {listed(other_rates)} of the groups: change them with {flags}"
        )
    if lists:
        lines.append(
            f"the scheduler also uses {listed(lists)} of its state, which zckpt does not change"
        )
    return [warning("program-must-set", line, subject="lr") for line in lines]


def number_of(value: Any) -> float | None:
    number = value.value if isinstance(value, Scalar) else value
    return float(number) if type(number) in (int, float) else None


def of_form(key: str, before: Any, value: Any) -> Any:
    """Converts a value of --set-group to the type of the present value `before`.

    Raises WrongOption if the value does not fit this type.
    """
    is_number = type(value) in (int, float)
    if isinstance(before, Scalar) and is_number:
        return replace(before, value=type(before.value)(value))
    if isinstance(before, (list, tuple)) and isinstance(value, (list, tuple)):
        if len(before) == len(value) and all(type(each) in (int, float) for each in value):
            return type(before)(value)
    elif type(before) is float and is_number:
        return float(value)
    elif before is None or type(before) is type(value) or (type(before) is int and is_number):
        return value
    raise WrongOption(
        "option-invalid",
        f"--set-group {key}={value!r} does not fit the present value {before!r}",
        hint="give a value of the same type and length; a pair is written betas=[0.9,0.95]",
    )
