"""The initial optimizer states of parameters that the next run trains and the source did not.

    bare     no state: the optimizer makes it at the first update
    zeros    states of zeros at step 0, for loaders that need a state of each parameter
    group    zeros at the step of the param group, where a target keeps one step per group

Only `group` changes the training: Adam's bias correction takes the step as the age of the moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint import states
from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.inert import Scalar
from ..core.checkpoint.manifest import Manifest, Parameter, slot_key
from ..core.checkpoint.optimizer_states import StateRow, of_parameters
from ..core.checkpoint.weights import is_optimizers
from ..core.grouping import by_key
from ..core.storage.fragments import ZEROS, Extent, solid
from ..errors import Notice, UnsupportedState, listed, warning
from ..formats.format import Format
from ..training.optimizers import NUMBERS, begins_with_zeros
from ..training.options import Options

Group = dict[str, Any]


def begun(source: Manifest, run: Manifest, format: Format, options: Options) -> Manifest:
    """Adds initial optimizer states for parameters that the target trains and the source did not.

    Warnings name these parameters. `run` describes the target's engine: it is the checkpoint given
    with --like, or else the source. Raises UnsupportedState if zckpt does not know how the
    optimizer begins a state that the target needs.
    """
    new = {*states.untouched(source)}
    begins = format.functions.begins
    how = "bare" if begins is None or not new else begins(run, options)
    trained = [(own.group or 0, name) for name, own in source.parameters.items() if own.trainable]
    trained_before = by_key((number, name) for number, name in trained if name not in new)
    anywhere = [] if how == "group" else [*chain.from_iterable(trained_before.values())]
    parameters, entries, rows = dict(source.parameters), dict(source.entries), list[StateRow]()
    of_groups: dict[str, int] = {}
    fresh: list[str] = []
    for number, name in trained:
        # None if all parameters are new, or those of the group if the target keeps its step there
        like = next(iter(trained_before.get(number, anywhere)), None)
        if name not in new or how == "bare" or like is None:
            fresh += [name] if name in new else []
            continue
        group = (source.groups or ({},))[number]
        begin = _beginning(source, name, like, group, how == "group")
        if begin is None:
            fresh.append(name)
            continue
        parameters[name], zeros, numbers = begin
        entries |= {entry.key: entry for entry in zeros}
        rows += of_parameters("number", {name: numbers})
        if how == "zeros":
            fresh.append(name)
        elif zeros or parameters[name].step is not None:  # plain SGD keeps nothing
            of_groups[name] = number
    return source.replace(
        entries=entries,
        parameters=parameters,
        states=source.states + rows,
        warnings=(*source.notices.warnings, *_late(source, of_groups), *_fresh(fresh)),
    )


def _beginning(
    source: Manifest, name: str, like: str, group: Group, at_groups_step: bool
) -> tuple[Parameter, list[Entry], Mapping[str, Scalar]] | None:
    """Makes the initial optimizer states of the parameter `name`: the states that `like` has.

    Returns the parameter, its tensors of zeros, and its states of one number. If zckpt does not
    know an initial value: returns None, or raises UnsupportedState with `at_groups_step`.
    """
    new_parameter, trained = source.parameters[name], source.parameters[like]
    slots = [
        entry
        for entry in source.entries.values()
        if entry.parameter == like and is_optimizers(entry.slot)
    ]
    numbers = source.states.scalars.get(like, {})
    unknown = [slot_key(e.slot) for e in slots if not begins_with_zeros(slot_key(e.slot), group)]
    if not at_groups_step:
        unknown += [key for key in numbers if key not in NUMBERS]
    if unknown and at_groups_step:
        raise UnsupportedState(
            "state-unsupported",
            f"the source did not train {name}, and zckpt does not know how the optimizer begins "
            f"its {listed(unknown)}",
            hint="put it in a separate group in the next program: there it begins without a state"
            "; or start all states afresh with --weights-only",
            subject=name,
        )
    if unknown:
        return None
    step = trained.step
    if not at_groups_step:  # otherwise the step and the numbers are those of `like`
        step = None if step is None else 0
        numbers = {key: replace(each, value=NUMBERS[key]) for key, each in numbers.items()}
    zeros = [_zeros(name, entry, new_parameter.shape) for entry in slots]
    return replace(new_parameter, step=step, updated=True), zeros, numbers


def _zeros(name: str, like: Entry, shape: tuple[int, ...]) -> Entry:
    numel = prod(shape)
    extent = Extent(ZEROS, 0, numel * SIZES[like.dtype])
    return Entry(name, like.slot, like.dtype, shape, solid(numel, extent))


def _fresh(names: Sequence[str]) -> list[Notice]:
    if not names:
        return []
    message = (
        f"the source did not train {listed(names, 4)}: the optimizer creates "
        f"{'its' if len(names) == 1 else 'their'} state at the first update"
    )
    return [warning("begins-afresh", message, subject=names[0])]


def _late(source: Manifest, names: Mapping[str, int]) -> list[Notice]:
    """Warns about parameters that begin with zero moments at the late step of their param group.

    If the group has betas, the warnings state how much larger the first updates are.
    """
    groups = source.groups or ()
    lines = []
    for number, late_names in by_key((number, name) for name, number in names.items()).items():
        step = next(
            parameter.step
            for parameter in source.parameters.values()
            if parameter.trainable and parameter.updated and (parameter.group or 0) == number
        )
        message = (
            f"the source did not train {listed(late_names, 4)}: the target keeps one step for "
            f"group {number}, so {'it begins' if len(late_names) == 1 else 'they begin'} with zero "
            f"moments at step {step}"
        )
        betas = groups[number].get("betas")
        if isinstance(betas, (list, tuple)) and len(betas) == 2:
            message += _larger(*map(float, betas))
        lines.append(warning("begins-late", message, subject=late_names[0]))
    return lines


MOST_UPDATES = 10_000
"""To find Adam's largest update, `_larger` computes updates 1 to MOST_UPDATES - 1."""


def _larger(beta1: float, beta2: float) -> str:
    """The end of a warning: Adam's largest first updates, as multiples of the learning rate.

    Empty if `beta1` is outside of [0, 1), or `beta2` outside of (0, 1).
    """
    if not 0 <= beta1 < 1 or not 0 < beta2 < 1:
        return ""
    # Moments begin with zeros at a late step, when Adam's bias correction is over. With equal
    # gradients, the moments after n updates are 1 - beta ** n of their final value.
    ratios = [
        (1 - beta1**updates) / (1 - beta2**updates) ** 0.5 for updates in range(1, MOST_UPDATES)
    ]
    text = (
        f", and the first updates are up to (1 - beta1) / sqrt(1 - beta2) = {ratios[0]:.3g} times "
        "the rate"
    )
    most = max(ratios)
    if most > ratios[0] * 1.05:
        text += f" (later updates are up to {most:.3g} times the rate, if gradients stay the same)"
    return text
